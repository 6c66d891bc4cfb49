package hammertest_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// points are the gaps between two durable steps of a flow, in which its process can end.
func points() (all []spec) {
	for at, passes := range map[string]int{
		crashpoint.KeyClaimed: 1, crashpoint.KeyCalling: 1, crashpoint.KeyCalled: 1, crashpoint.KeyAdvanced: 2, crashpoint.KeyWorked: 3, crashpoint.KeyCommitting: 3,
	} {
		for nth := range passes {
			all = append(all, spec{At: at, Nth: nth + 1})
		}
	}
	return all
}

// atPoints sends a request of a kind to a server that ends at a point, or freezes there, until the other
// server has an answer. Then the first one is back, and a judge asks both again.
func atPoints(t *testing.T, kind string, points ...spec) {
	t.Helper()
	for _, s := range points {
		t.Run(fmt.Sprint(kind, " ", s.At, " ", s.Nth), func(t *testing.T) {
			t.Parallel()
			h := newHammer(t, pgtest.Database(t), 1, s)
			k, first, over := h.history(kind, "k"), &h.places[0], make(chan struct{})
			go func() { defer close(over); h.ask(t.Context(), k, 0, "A", time.Minute) }()
			if s.Freeze {
				testwait.True(t, "the process is frozen", func() bool {
					stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", first.cmd.Process.Pid))
					return err == nil && strings.Contains(string(stat), ") T ")
				})
			} else {
				testwait.Chan(t, "the process ends", first.read)
			}
			testwait.True(t, "another server has an answer", func() bool { return h.ask(t.Context(), k, 1, "A", 15*time.Second).over() })
			if s.Freeze {
				require.NoError(t, first.cmd.Process.Signal(syscall.SIGCONT))
			} else {
				h.kill(0)
				h.start(t, 0, spec{})
			}
			testwait.Chan(t, "the first answer", over)
			h.settle(t)
			h.judge(t)
		})
	}
}

// Property: killed between any two durable steps, and retried, a flow calls once, and each of its
// phases has its effect once. A call that must not be repeated is in doubt where it may have been made.
// Rows H1, H4, H5 of guarantees.md.
func TestKilledBetweenAnyTwoSteps(t *testing.T) {
	longtest.Only(t, "a process for each point")
	t.Parallel()
	atPoints(t, kindFlow, append(points(), spec{At: crashpoint.KeyCommitted, Nth: 1})...)
	atPoints(t, kindSingle, points()...)
}

// Property: a server that is frozen at any point until its lock is over, and wakes up when another
// one has finished, changes nothing. Row H2 of guarantees.md.
func TestFrozenWorkerIsHarmlessWhenItWakes(t *testing.T) {
	longtest.Only(t, "a process for each point")
	t.Parallel()
	frozen := points()
	for i := range frozen {
		frozen[i].Freeze = true
	}
	atPoints(t, kindFlow, frozen...)
}
