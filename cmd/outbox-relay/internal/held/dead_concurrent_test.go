package held_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

const (
	deadKeys = 20
	rowsAKey = 30
)

// writeSQL publishes a row; some have headers that no relay understands, and some no key.
const writeSQL = `INSERT INTO effectonce.outbox (topic, key, payload, headers)
	SELECT $1, convert_to(nullif('key ' || $2::int, 'key 0'), 'UTF8'), convert_to('key ' || $2::int || '/' || $3::int, 'UTF8'),
		CASE WHEN random() < 0.2 THEN '{"trace": {"nested": 1}}' ELSE '{}' END::jsonb`

// mendDeadSQL is an operator with psql, who fixes a row in its place and hands it back.
const mendDeadSQL = `UPDATE effectonce.outbox_dead SET headers = '{}', state = 'retry'
	WHERE (relay, seq) IN (SELECT relay, seq FROM effectonce.outbox_dead WHERE state = 'held' ORDER BY random() LIMIT $1 FOR UPDATE)`

// fate is what became of a row.
type fate struct{ published, discarded bool }

// Rows O10, O12 of guarantees.md: operators retry, fix and discard at once, by command and by plain
// SQL, while two relays take turns and writers continue. No row is lost, none is both published and
// discarded, and the order of each key is kept.
func TestNoDeadRowIsLostDoubledOrStranded(t *testing.T) {
	longtest.Only(t, "a hammer")
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 2)
	conn := connect(t, address)
	// The workers stop between two transactions: after a cut connection the outcome of a COMMIT
	// would be unknown.
	var stopped, failed atomic.Bool
	defer stopped.Store(true)
	var group errgroup.Group
	repeat := func(work func() error) {
		group.Go(func() error {
			for !stopped.Load() {
				if err := work(); err != nil {
					failed.Store(true)
					return err
				}
			}
			return nil
		})
	}
	begun := time.Now()
	for replica := range 2 {
		publisher, random := newRelay(t, address, fmt.Sprint("replica ", replica)), rand.New(rand.NewPCG(2, uint64(replica)))
		repeat(func() error {
			// Short lives: each begins with a look at the dead rows. They grow, since where others
			// keep the processors busy a short one ends before it has published anything.
			life, end := context.WithTimeout(t.Context(), time.Duration(20+random.IntN(200))*time.Millisecond+time.Since(begun)/20)
			defer end()
			return publisher.Run(life)
		})
	}
	for worker := range 4 {
		own, random := connect(t, address), rand.New(rand.NewPCG(1, uint64(worker)))
		repeat(func() error { return operateDead(t.Context(), own, random) })
	}
	for n := range rowsAKey {
		for key := range deadKeys {
			exec(t, conn, writeSQL, topic, key, n)
		}
	}
	testwait.True(t, "no row is stranded", func() bool {
		_, err := conn.Exec(t.Context(), mendDeadSQL, 1)
		require.NoError(t, ignoreDeadlock(err)) // one who uses psql would try again
		return failed.Load() || len(dead.left(t, conn)) == 0 && drained(t, conn)
	})
	stopped.Store(true)
	require.NoError(t, group.Wait())
	judge(t, conn, topic)
}

// drained reports whether the relay has read everything that was written.
func drained(t *testing.T, conn *pgx.Conn) (is bool) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT coalesce(bool_and(o.seq <= p.floor OR pg_visible_in_snapshot(o.txid, t.snapshot)
			OR (n.tick IS NOT NULL AND o.seq <= p.seq AND pg_visible_in_snapshot(o.txid, n.snapshot))), false)
		FROM effectonce.outbox o CROSS JOIN effectonce.outbox_progress_now p
		JOIN effectonce.outbox_ticks t ON t.tick = p.tick LEFT JOIN effectonce.outbox_ticks n ON n.tick = p.next_tick`).Scan(&is))
	return is
}

func newRelay(t *testing.T, address, owner string) *relay.Relay {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{Owner: owner, PageRowsMax: 20})
	require.NoError(t, err)
	return r
}

func operateDead(ctx context.Context, conn *pgx.Conn, random *rand.Rand) error {
	if random.IntN(3) == 0 {
		_, err := conn.Exec(ctx, mendDeadSQL, 1+random.IntN(3))
		return ignoreDeadlock(err)
	}
	places, err := dead.Targets(ctx, conn, schema, held.Filter{}, 1+random.IntN(8))
	if err != nil {
		return err
	}
	random.Shuffle(len(places), func(i, j int) { places[i], places[j] = places[j], places[i] })
	if random.IntN(2) == 0 {
		_, err = dead.Act(ctx, conn, schema, retry, places)
		return err
	}
	_, err = dead.Act(ctx, conn, schema, held.Order{By: ana, Discard: true, WholeKeys: random.IntN(20) == 0}, places[:min(len(places), 2)])
	return err
}

// judge compares what was written with what Kafka has and with what is recorded as discarded.
func judge(t *testing.T, conn *pgx.Conn, topic string) {
	t.Helper()
	fates := map[string]*fate{}
	for key := range deadKeys {
		for n := range rowsAKey {
			fates[fmt.Sprintf("key %d/%d", key, n)] = &fate{}
		}
	}
	last := map[string]int{}
	for _, record := range kafkatest.ReadAll(t, topic) {
		name := string(record.Value)
		require.Contains(t, fates, name)
		if record.Key != nil && !fates[name].published {
			var key, n int
			_, err := fmt.Sscanf(name, "key %d/%d", &key, &n)
			require.NoError(t, err)
			assert.GreaterOrEqual(t, n, last[string(record.Key)], "INVARIANT: order of %s", record.Key)
			last[string(record.Key)] = n
		}
		fates[name].published = true
	}
	rows, err := conn.Query(t.Context(), `SELECT convert_from(o.payload, 'UTF8') FROM effectonce.operator_actions a
		JOIN effectonce.outbox o ON o.seq = (a.subject->>'seq')::bigint WHERE a.what = 'dead.discard'`)
	require.NoError(t, err)
	discarded, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	for _, name := range discarded {
		assert.False(t, fates[name].discarded, "INVARIANT: %s was discarded twice", name)
		fates[name].discarded = true
	}
	published := 0
	for name, f := range fates {
		assert.NotEqual(t, f.published, f.discarded, "%s: published %v, discarded %v", name, f.published, f.discarded)
		if f.published {
			published++
		}
	}
	assert.Positive(t, published)
	assert.NotEmpty(t, discarded)
	actions, err := operator.Actions(t.Context(), conn, schema, operator.ActionFilter{}, 10_000)
	require.NoError(t, err)
	assert.Greater(t, len(actions), len(discarded), "retries")
}

// ignoreDeadlock leaves out what is simply tried again.
func ignoreDeadlock(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "40P01" {
		return nil
	}
	return err
}
