package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const (
	seedVariable   = "EFFECTONCE_TEST_SEED"   // of the schedule: the failed run's
	faultsVariable = "EFFECTONCE_TEST_FAULTS" // how many there are, for longer runs
)

// fault is one thing that happens to a replica, until it is healed.
type fault struct{ kind, side string }

func (f fault) String() string { return strings.TrimSpace(f.kind + " " + f.side) }

const (
	kill    = "killed"
	stopped = "frozen"
	refusal = "refused" // connections are closed and not made again
	// Toxics, by Toxiproxy's names.
	reset     = "reset_peer"
	blackHole = "timeout"    // bytes vanish
	cutShort  = "limit_data" // closed after some bytes, in the middle of a message or of its answer
	latency   = "latency"
	bandwidth = "bandwidth"
	lingering = "slow_close" // the server hears late of the end of a process
)

// deck has each cut once. A kill has to hit between two steps, so there are more.
func deck() []fault {
	var all []fault
	for _, side := range []string{"postgres", "kafka"} {
		for _, kind := range []string{refusal, reset, blackHole, cutShort, latency, bandwidth, lingering} {
			all = append(all, fault{kind, side})
		}
		all = append(all, fault{stopped, ""}, fault{kill, ""}, fault{kill, ""}, fault{kill, ""})
	}
	return all
}

// replica is a relay's process behind proxies of its own.
type replica struct {
	*process
	child    child
	database string // without a proxy
	ways     *proxies
	suffers  []fault
}

func newReplica(t *testing.T, c child) *replica {
	t.Helper()
	r := &replica{child: c, database: c.URL}
	r.connect(t)
	return r
}

// connect starts the replica behind new proxies.
func (r *replica) connect(t *testing.T) {
	t.Helper()
	r.ways = newProxies(t, r.database)
	r.child.URL, r.child.Brokers, r.child.Through = r.ways.url, r.ways.seeds(), r.ways.through
	r.process = start(t, r.child)
}

func (r *replica) restart(t *testing.T) {
	t.Helper()
	r.kill()
	r.process = start(t, r.child)
}

func (r *replica) side(f fault) []*proxy {
	if f.side == "kafka" {
		return r.ways.kafka
	}
	return r.ways.postgres
}

// ready reports whether another fault can be added. Toxiproxy 2.5 reads in limit_data what it changes in bandwidth.
func (r *replica) ready(f fault) bool {
	races := []string{cutShort, bandwidth}
	return !slices.ContainsFunc(r.suffers, func(s fault) bool {
		return s == f || s.side == "" || s.side == f.side && slices.Contains(races, s.kind) && slices.Contains(races, f.kind)
	})
}

func (r *replica) strike(t *testing.T, f fault, random *rand.Rand) {
	t.Helper()
	r.suffers = append(r.suffers, f)
	way := []string{"upstream", "downstream"}[random.IntN(2)]
	severity := random.IntN(1000)
	attributes := fmt.Sprintf(map[string]string{
		reset: `{"timeout": %d}`, cutShort: `{"bytes": %d}`, latency: `{"latency": %[1]d, "jitter": %[1]d}`, lingering: `{"delay": 1%03d}`,
		bandwidth: `{"rate": 1, "of": %d}`, blackHole: `{"timeout": 0, "of": %d}`, // KB/s; forever
	}[f.kind], severity)
	var err error
	switch f.kind {
	case kill:
		r.kill()
	case stopped:
		r.signal(syscall.SIGSTOP)
	case refusal:
		err = refuse(r.side(f))
	case lingering: // at the end of a process
		if err = toxic(r.side(f), f.kind, "upstream", attributes); err == nil {
			r.restart(t)
		}
	default:
		err = toxic(r.side(f), f.kind, way, attributes)
	}
	r.unless(t, err)
}

// heal ends what the replica suffers from, sometimes with another process.
func (r *replica) heal(t *testing.T, random *rand.Rand) {
	t.Helper()
	gone := slices.Contains(r.suffers, fault{kill, ""})
	if !gone {
		require.False(t, r.ended(), "%v ended a relay: %v", r.suffers, r.err)
	}
	if anew := random.IntN(3) == 0; anew || gone {
		r.restart(t)
	}
	r.signal(syscall.SIGCONT)
	r.suffers = nil
	r.unless(t, letThrough(t.Context(), append(slices.Clone(r.ways.postgres), r.ways.kafka...)))
}

// unless continues with new proxies where the old ones are stuck, or another program took a port.
func (r *replica) unless(t *testing.T, stuck error) {
	t.Helper()
	if stuck == nil {
		return
	}
	var taken *net.OpError
	require.True(t, errors.Is(stuck, errStuck) || errors.As(stuck, &taken), stuck)
	t.Logf("new proxies: %v", stuck)
	r.kill()
	r.connect(t)
	r.suffers = nil
}

// Property: three replicas of a relay share an outbox of several shards while transactions commit
// out of order and are rolled back, slots are emptied, and each replica is killed, frozen and
// resumed, and cut off from PostgreSQL or from Kafka in seven ways, several of them at once.
// Nothing is lost, versions of a key are first seen in order, no fault but SIGKILL ends a replica;
// with exactly-once a reader of committed records sees each row once. Rows O1, O2, O3, O5 of
// guarantees.md, O8, O9, O13, O28, O30.
func TestReplicasKilledFrozenAndCutOff(t *testing.T) {
	longtest.Only(t, "kills at random moments")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		cutOff(t, child{Role: "relay", Shards: 5, Lease: time.Second, Keep: time.Second, ExactlyOnce: exactly})
	})
}

func cutOff(t *testing.T, c child) {
	t.Helper()
	ctx := t.Context()
	c.URL = pgtest.Database(t)
	pool := openWorkload(t, c.URL)
	topic := kafkatest.Topic(t, 4)
	seed, faults := schedule(t)
	random := rand.New(rand.NewPCG(seed, 0))
	replicas := []*replica{newReplica(t, c), newReplica(t, c), newReplica(t, c)}

	writing, stop := context.WithCancel(ctx)
	defer stop()
	written := make(chan error, 1)
	go func() {
		w := writers{goroutines: 6, transactions: 60, keys: 40, topic: topic, seed: seed, pauses: true}
		var err error
		for ; err == nil && writing.Err() == nil; w.seed++ {
			err = w.write(ctx, pool)
		}
		written <- err
	}()
	seen := map[string]int{}
	for len(faults) > 0 {
		r := replicas[random.IntN(len(replicas))]
		length := 50*time.Millisecond + time.Duration(random.IntN(300))*time.Millisecond
		if f := faults[0]; r.ready(f) && (r.suffers == nil || random.IntN(2) == 0) {
			seen[f.String()]++
			r.strike(t, f, random)
			faults = faults[1:]
			if f.kind == stopped {
				length *= 5 // often longer than the lease
			}
		} else {
			r.heal(t, random)
		}
		elapse(t, pool, length)
	}
	stop()
	require.NoError(t, <-written)
	for _, r := range replicas {
		r.heal(t, random)
	}
	requirePublished(t, pool, topic)
	for _, r := range replicas {
		require.NoError(t, r.terminate())
	}
	s := requirePublished(t, pool, topic)
	t.Logf("%d records, %d of them duplicates; %v", s.records, s.duplicates, seen)
	require.Len(t, s.last, 40, "the test's own premise: each key is written")
	if c.ExactlyOnce {
		require.Zero(t, s.duplicates)
	}
}

// schedule says what is to happen, and how it is repeated.
func schedule(t *testing.T) (seed uint64, faults []fault) {
	t.Helper()
	number := func(name string, otherwise uint64) uint64 {
		text := os.Getenv(name)
		if text == "" {
			return otherwise
		}
		n, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, name)
		return n
	}
	n := len(deck())
	n = int(number(faultsVariable, uint64(n)))
	seed = number(seedVariable, uint64(time.Now().UnixNano()))
	t.Logf("%s=%d %s=%d", seedVariable, seed, faultsVariable, n)
	random := rand.New(rand.NewPCG(seed, 1))
	for len(faults) < n {
		cards := deck()
		random.Shuffle(len(cards), func(i, j int) { cards[i], cards[j] = cards[j], cards[i] })
		faults = append(faults, cards...)
	}
	return seed, faults[:n]
}

// elapse lets time pass on the clock of the database, which leases run on.
func elapse(t *testing.T, pool *pgxpool.Pool, d time.Duration) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `SELECT pg_sleep($1)`, d.Seconds())
	require.NoError(t, err)
}
