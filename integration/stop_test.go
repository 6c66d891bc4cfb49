package integration_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
)

// Property: consumers that are stopped with SIGTERM, at whatever moment, leave nothing behind that
// has to come again: over all rounds each message is handled once and none is redelivered, also
// where a second member of the group gets the partitions. Row C42 of guarantees.md.
func TestCleanStopsRedeliverNothing(t *testing.T) {
	longtest.Only(t, "20 rounds of stops at random moments")
	t.Parallel()
	rounds := 20
	for _, protocol := range []string{cooperative, eager, serverSide} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			c, pool := consuming(t, child{Protocol: protocol, BatchMax: 7, SessionTimeout: 30 * time.Second}, 4)
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			random := rand.New(rand.NewPCG(seed, 0))
			versions := 100 * rounds
			producedAt(t, c.Brokers, pool, c.Topic, "k", 8, versions, 0)
			var stopped, members []*process
			for range rounds {
				members = append(members, start(t, c))
				enough := min(count(ctx, t, pool, `SELECT count(*) FROM effects`)+random.IntN(400), 8*versions)
				eventually(t, "effects go on", func() (bool, any) {
					n := count(ctx, t, pool, `SELECT count(*) FROM effects`)
					return n >= enough, fmt.Sprint(n, enough)
				})
				if len(members) > 1 || random.IntN(2) == 0 {
					require.NoError(t, members[0].terminate())
					stopped, members = append(stopped, members[0]), members[1:]
				}
			}
			members = append(members, start(t, c))
			handled(ctx, t, pool)
			for _, m := range members {
				require.NoError(t, m.terminate())
			}
			fresh, duplicates := totals(t, append(stopped, members...))
			require.Equal(t, 8*versions, fresh)
			require.Zero(t, duplicates, "redelivered")
		})
	}
}

// totals sums up what consumers said at their ends.
func totals(t *testing.T, stopped []*process) (fresh, duplicates int) {
	t.Helper()
	for _, p := range stopped {
		log := p.log.String()
		at := strings.Index(log, childTotals)
		if at < 0 {
			require.NotContains(t, log, "partition assigned") // stopped before it began
			continue
		}
		var f, d int
		_, err := fmt.Sscanf(log[at+len(childTotals)+1:], " fresh=%d duplicates=%d", &f, &d)
		require.NoError(t, err, log[at:])
		fresh, duplicates = fresh+f, duplicates+d
	}
	return fresh, duplicates
}

// Property: DrainMax bounds a clean stop: a handler that the database keeps busy for longer is cut
// off, its transaction is rolled back, and its message has its effect later, once. Row C42 of
// guarantees.md.
func TestDrainMaxBoundsTheStop(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, pool := consuming(t, child{Pause: time.Hour, DrainMax: 100 * time.Millisecond, HandlerTimeout: 10 * time.Minute}, 1)
	producedAt(t, c.Brokers, pool, c.Topic, "k", 1, 5, 0)
	slow := start(t, c)
	sleeping := `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'`
	eventually(t, "a handler is at work", func() (bool, any) { return count(ctx, t, pool, sleeping) == 1, slow.log })
	slow.signal(syscall.SIGTERM)
	eventually(t, "the consumer stops", func() (bool, any) { return slow.ended(), slow.log })
	require.NoError(t, slow.err)
	require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effects`))
	c.Pause = 0
	next := start(t, c)
	handled(ctx, t, pool)
	require.NoError(t, next.terminate())
}

// Property: SIGTERM before the consumer has joined, or while its database is away, ends it cleanly,
// too.
func TestStopBeforeItBegan(t *testing.T) {
	t.Parallel()
	c, _ := consuming(t, child{}, 1)
	var group sync.WaitGroup
	for _, url := range []string{c.URL, "postgres://postgres@127.0.0.1:1/nobody"} {
		c.URL = url
		p := start(t, c)
		group.Go(func() { _ = p.terminate() })
		eventually(t, "it stops", func() (bool, any) { return p.ended(), p.log })
		require.NoError(t, p.err, p.log)
	}
	group.Wait()
}
