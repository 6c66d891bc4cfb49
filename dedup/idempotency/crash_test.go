package idempotency_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// child is a process that executes the request "k" of a payment, and is killed or frozen on the
// way.
type child struct {
	URL, Bank  string
	At         string
	Nth        int // from 1
	Freeze     bool
	AtMostOnce bool
}

const childVariable = "EFFECTONCE_TEST_CHILD"

func TestMain(m *testing.M) {
	if spec := os.Getenv(childVariable); spec != "" { //nolint:forbidigo // this process is a program, not a test
		os.Exit(runChild(spec)) //nolint:forbidigo // this process is a program, not a test
	}
	pgtest.SideBySide()
	pgtest.Main(m)
}

// What a child says it ended with.
const (
	childDone, childLost, childFailed = 0, 3, 1
)

func runChild(spec string) int {
	var c child
	if err := json.Unmarshal([]byte(spec), &c); err != nil {
		return childFailed
	}
	nth := 0
	crashpoint.Arm(func(name string) {
		if name != c.At {
			return
		}
		if nth++; nth != c.Nth {
			return
		}
		if c.Freeze {
			woken := make(chan os.Signal, 1)
			signal.Notify(woken, syscall.SIGCONT)
			_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
			<-woken
			return
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	})
	ctx := context.Background() //nolint:forbidigo // as above
	pool, err := pgxpool.New(ctx, c.URL)
	if err != nil {
		return childFailed
	}
	defer pool.Close()
	err = c.run(ctx, pool)
	switch {
	case errors.Is(err, idempotency.ErrLockLost), errors.Is(err, idempotency.ErrIndeterminate):
		return childLost
	case err != nil:
		_, _ = fmt.Fprintln(os.Stderr, err)
		return childFailed
	}
	return childDone
}

func (c child) run(ctx context.Context, pool *pgxpool.Pool) error {
	op, err := idempotency.New(pool, idempotency.Config{Operation: "order", Lock: time.Second, WaitMax: 30 * time.Second, IdleTimeout: 2 * time.Second})
	if err != nil {
		return err
	}
	flow, err := idempotency.NewFlow(op, idempotency.FlowConfig[payment]{}, paymentPhases(c.Bank, c.AtMostOnce)...)
	if err != nil {
		return err
	}
	_, err = flow.Do(ctx, key("k"), []byte("100"))
	return err
}

func (c child) start(t *testing.T) *exec.Cmd {
	t.Helper()
	spec, err := json.Marshal(c)
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childVariable+"="+string(spec))
	cmd.Stderr = io.Discard
	if testing.Verbose() {
		cmd.Stderr = os.Stderr
	}
	require.NoError(t, cmd.Start())
	return cmd
}

// requireKilled waits for a child that kills itself.
func requireKilled(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	err := cmd.Wait()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal(), "it did not pass the point")
}

// gaps are the durable steps of a payment between which a process can die: the point, and which
// time it is passed.
func gaps() []child {
	return []child{
		{At: crashpoint.KeyClaimed, Nth: 1},
		{At: crashpoint.KeyWorked, Nth: 1},
		{At: crashpoint.KeyCommitting, Nth: 1},
		{At: crashpoint.KeyAdvanced, Nth: 1},
		{At: crashpoint.KeyCalling, Nth: 1},
		{At: crashpoint.KeyCalled, Nth: 1},
		{At: crashpoint.KeyWorked, Nth: 2},
		{At: crashpoint.KeyCommitting, Nth: 2},
		{At: crashpoint.KeyAdvanced, Nth: 2},
		{At: crashpoint.KeyWorked, Nth: 3},
		{At: crashpoint.KeyCommitting, Nth: 3},
	}
}

// requirePaidOnce retries with the same key, as a client does, and checks everything that may exist
// once.
func requirePaidOnce(t *testing.T, pool *pgxpool.Pool, b *bank) {
	t.Helper()
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{WaitMax: 30 * time.Second}), idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	for range 2 {
		response, err := flow.Do(t.Context(), key("k"), []byte("100"))
		require.NoError(t, err)
		require.Equal(t, 201, response.Status)
		require.Regexp(t, `^order \d+, charge-1$`, string(response.Body))
	}
	_, charges := b.counts()
	require.Equal(t, 1, charges)
	for _, phase := range []string{"reserve", "charge", "book"} {
		require.Equal(t, 1, effects(t, pool, phase+" k"), phase)
	}
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.outbox`))
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished' AND phases = '{reserve,charge,book}'`))
}

// Property: killed between any two durable steps, and retried, a payment is charged once, and its
// local rows and its message exist once. Rows H1, H4, H5 of guarantees.md.
func TestKilledBetweenAnyTwoSteps(t *testing.T) {
	longtest.Only(t, "a process for each point")
	t.Parallel()
	for _, c := range append(gaps(), child{At: crashpoint.KeyCommitted, Nth: 1}) {
		t.Run(fmt.Sprint(c.At, " ", c.Nth), func(t *testing.T) {
			t.Parallel()
			pool, b := newPool(t), newBank(t)
			c.URL, c.Bank = pool.Config().ConnString(), b.URL
			requireKilled(t, c.start(t))
			requirePaidOnce(t, pool, b)
		})
	}
}

// Property: a worker that is frozen at any point until its lock is over, and wakes up when another
// one has finished, changes nothing. Row H2 of guarantees.md.
func TestFrozenWorkerIsHarmlessWhenItWakes(t *testing.T) {
	longtest.Only(t, "a process for each point")
	t.Parallel()
	for _, c := range gaps() {
		t.Run(fmt.Sprint(c.At, " ", c.Nth), func(t *testing.T) {
			t.Parallel()
			pool, b := newPool(t), newBank(t)
			c.URL, c.Bank, c.Freeze = pool.Config().ConnString(), b.URL, true
			cmd := c.start(t)
			requireFrozen(t, cmd)
			requirePaidOnce(t, pool, b)
			require.NoError(t, cmd.Process.Signal(syscall.SIGCONT))
			err := cmd.Wait()
			var exit *exec.ExitError
			if assert.ErrorAs(t, err, &exit) {
				require.Contains(t, []int{childLost, childFailed}, exit.ExitCode()) // failed: the server ended its transaction
			}
			requirePaidOnce(t, pool, b)
		})
	}
}

func requireFrozen(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	testwait.True(t, "the process is frozen", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", cmd.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") T ")
	})
}

// Property: where the foreign system does not deduplicate, a call that a worker may have made when
// it died is never made again by itself: the key becomes indeterminate, until a person or the
// reconciler decides.
func TestCallThatMustNotBeMadeTwice(t *testing.T) {
	t.Parallel()
	for at, asked := range map[string]int{crashpoint.KeyCalling: 0, crashpoint.KeyCalled: 1} {
		happened := asked == 1
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			pool, b := newPool(t), newBank(t)
			requireKilled(t, child{URL: pool.Config().ConnString(), Bank: b.URL, At: at, Nth: 1, AtMostOnce: true}.start(t))
			cfg := idempotency.FlowConfig[payment]{Reconcile: func(_ context.Context, u idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
				assert.Equal(t, "charge", u.Phase)
				assert.Equal(t, "k", u.Key.Value)
				assert.Positive(t, u.State.Order)
				if happened {
					return u.Continue(u.State), nil
				}
				return idempotency.DidNotHappen(), nil
			}}
			flow := newFlow(t, newOperation(t, pool, idempotency.Config{WaitMax: 30 * time.Second}), cfg, paymentPhases(b.URL, true))
			for range 3 {
				do(t, flow, "k", idempotency.ErrIndeterminate)
			}
			made, _ := b.counts()
			require.Equal(t, asked, made)
			passes(t, pool, time.Minute)
			reconciles(t, flow, 1)
			require.False(t, do(t, flow, "k", nil).Replayed)
			made, _ = b.counts()
			if happened {
				require.Equal(t, asked, made)
			} else {
				require.Equal(t, asked+1, made)
			}
			reconciles(t, flow, 0)
		})
	}
}
