package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// tables of the workload. effects has no unique constraint on purpose: a second effect must become
// visible instead of being refused.
const workload = `
CREATE TABLE versions (key text PRIMARY KEY, version int NOT NULL);
CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, message_id uuid NOT NULL, key text NOT NULL, version int NOT NULL, worker int NOT NULL);`

// openWorkload opens a database and makes its tables of the workload.
func openWorkload(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool := open(t, url)
	_, err := pool.Exec(t.Context(), workload)
	require.NoError(t, err)
	return pool
}

// written is what the writers committed: the last version of each key. Versions have no gaps, since
// a version that is rolled back is given again.
func written(ctx context.Context, t *testing.T, pool *pgxpool.Pool) map[string]int {
	t.Helper()
	rows, err := pool.Query(ctx, `SELECT key, version FROM versions WHERE version > 0`)
	require.NoError(t, err)
	found := map[string]int{}
	var key string
	var version int
	_, err = pgx.ForEachRow(rows, []any{&key, &version}, func() error { found[key] = version; return nil })
	require.NoError(t, err)
	return found
}

// stream is what a topic holds, judged.
type stream struct {
	records, duplicates, inversions int
	last                            map[string]int // of each key: versions 1 to this are all there
	missing                         []string
}

// judge reads a topic's records as a consumer that drops duplicates would: first occurrences per
// key must be 1, 2, 3 and so on.
func judge(t *testing.T, records []*kgo.Record) stream {
	t.Helper()
	s := stream{last: map[string]int{}}
	seen := map[string]bool{}
	versions := map[string]map[int]bool{}
	for _, record := range records {
		s.records++
		id := ""
		for _, h := range record.Headers {
			if h.Key == "message-id" {
				id = string(h.Value)
			}
		}
		require.NotEmpty(t, id, "record without message-id at offset %d", record.Offset)
		if seen[id] {
			s.duplicates++
			continue
		}
		seen[id] = true
		var e event
		require.NoError(t, json.Unmarshal(record.Value, &e))
		if versions[e.Key] == nil {
			versions[e.Key] = map[int]bool{}
		}
		if e.Version != s.last[e.Key]+1 {
			s.inversions++
		}
		require.False(t, versions[e.Key][e.Version], "INVARIANT: two messages carry %s version %d", e.Key, e.Version)
		versions[e.Key][e.Version] = true
		s.last[e.Key] = max(s.last[e.Key], e.Version)
	}
	for key, last := range s.last {
		for v := 1; v <= last; v++ {
			if !versions[key][v] {
				s.missing = append(s.missing, fmt.Sprintf("%s/%d", key, v))
			}
		}
	}
	return s
}

// requireEffects proves the whole promise by plain SQL: one effect for each version of each key, in
// order.
func requireEffects(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	requireOnce(ctx, t, pool)
	require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM (SELECT version - lag(version, 1, 0) OVER (PARTITION BY key ORDER BY n) AS step FROM effects) g
		WHERE step <> 1`), "INVARIANT: effects out of order")
}

// requireOnce is requireEffects without the order.
func requireOnce(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	var lost, doubled int
	require.NoError(t, pool.QueryRow(ctx, `SELECT count(*) FROM versions v CROSS JOIN LATERAL generate_series(1, v.version) AS s (version)
		WHERE NOT EXISTS (SELECT FROM effects e WHERE e.key = v.key AND e.version = s.version)`).Scan(&lost))
	require.NoError(t, pool.QueryRow(ctx, `SELECT coalesce(sum(n - 1), 0) FROM (SELECT count(*) AS n FROM effects GROUP BY key, version) g`).Scan(&doubled))
	require.Zero(t, lost, "INVARIANT: lost effects")
	require.Zero(t, doubled, "INVARIANT: doubled effects")
}

// processState returns the state letter of a process on Linux: T is stopped by a signal.
func processState(pid int) (byte, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	end := bytes.LastIndexByte(stat, ')') // the name may contain anything
	if end < 0 || end+2 >= len(stat) {
		return 0, errors.New("unexpected /proc/PID/stat")
	}
	return stat[end+2], nil
}

// writers is a workload of transactions that lock a key, raise its version and publish it.
type writers struct {
	goroutines, transactions, keys int
	topic                          string
	seed                           uint64
	pauses                         bool // inside transactions, with savepoints: the order of commits is not that of ids
}

var errRollback = errors.New("rolled back on purpose")

// run is write in a test that waits for it.
func (w writers) run(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, w.write(ctx, pool))
}

// write returns when all transactions are committed; one in ten is rolled back and not repeated.
func (w writers) write(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `INSERT INTO versions SELECT 'k' || n, 0 FROM generate_series(0, $1 - 1) n ON CONFLICT DO NOTHING`, w.keys)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for g := range w.goroutines {
		random := rand.New(rand.NewPCG(w.seed, uint64(g)))
		group.Go(func() error {
			for range w.transactions / w.goroutines {
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return w.one(ctx, tx, random) })
				if err != nil && !errors.Is(err, errRollback) {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// one transaction. With pauses it gets its transaction id early or late, waits with and without the
// key's lock and rolls savepoints back, so that neither transaction ids nor seqs are in commit
// order.
func (w writers) one(ctx context.Context, tx pgx.Tx, random *rand.Rand) error {
	if w.pauses && random.IntN(2) == 0 {
		if _, err := tx.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
			return err
		}
		if err := w.pause(ctx, tx, random); err != nil {
			return err
		}
	}
	e := event{Key: fmt.Sprintf("k%d", random.IntN(w.keys))}
	if err := tx.QueryRow(ctx, `UPDATE versions SET version = version + 1 WHERE key = $1 RETURNING version`, e.Key).Scan(&e.Version); err != nil {
		return err
	}
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	message := outbox.Message{Topic: w.topic, Key: []byte(e.Key), Payload: body}
	if w.pauses && random.IntN(4) == 0 {
		// Published inside a savepoint that is rolled back, and again.
		err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
			if err := outbox.Publish(ctx, nested, message); err != nil {
				return err
			}
			return errRollback
		})
		if !errors.Is(err, errRollback) {
			return err
		}
	}
	if err := outbox.Publish(ctx, tx, message); err != nil {
		return err
	}
	if w.pauses && random.IntN(4) == 0 {
		if err := w.pause(ctx, tx, random); err != nil {
			return err
		}
	}
	if random.IntN(10) == 0 {
		return errRollback
	}
	return nil
}

// pause keeps the transaction open: the database waits, so no sleep of the test hides anything.
func (w writers) pause(ctx context.Context, tx pgx.Tx, random *rand.Rand) error {
	_, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, random.Float64()*0.03)
	return err
}

// eventually waits for a condition, and fails the test with its last answer.
func eventually(t *testing.T, what string, condition func() (bool, any)) {
	t.Helper()
	testwait.For(t, what, func() (any, bool) {
		ok, last := condition()
		return last, ok
	})
}

// count runs a query that returns one number.
func count(ctx context.Context, t *testing.T, pool *pgxpool.Pool, sql string) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(ctx, sql).Scan(&n))
	return n
}

// both runs a test at least once and exactly once.
func both(t *testing.T, test func(t *testing.T, exactly bool)) {
	t.Helper()
	either(t, guarantee(false), guarantee(true), test)
}

// either runs a test for both answers to a question, each under its name.
func either(t *testing.T, no, yes string, test func(t *testing.T, answer bool)) {
	t.Helper()
	for name, answer := range map[string]bool{no: false, yes: true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, answer)
		})
	}
}

// maybe returns null, nothing, or some random bytes.
func maybe(random *rand.Rand) []byte {
	switch random.IntN(4) {
	case 0:
		return nil
	case 1:
		return []byte{}
	}
	b := make([]byte, 1+random.IntN(60))
	for i := range b {
		b[i] = byte(random.IntN(256))
	}
	return b
}

// Property: whatever is published, the record has key, value and headers byte for byte. Null and
// empty stay different, each header of a repeated name is there, and those of one name are in their
// order. Row O36 of guarantees.md.
func TestEveryRecordIsItsRow(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 3)
	random := rand.New(rand.NewPCG(36, 36))
	sent := map[string]outbox.Message{}
	var all []outbox.Message
	for range 500 {
		m := outbox.Message{ID: uuid.Must(uuid.NewV7()), Topic: topic, Key: maybe(random), Payload: maybe(random)}
		for range random.IntN(6) {
			m.Headers = append(m.Headers, outbox.Header{Name: string(rune('a' + random.IntN(3))), Value: maybe(random)})
		}
		sent[m.ID.String()] = m
		all = append(all, m)
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Publish(ctx, tx, all...) }))
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(ctx)
	require.NoError(t, err)

	records := kafkatest.ReadAll(t, topic)
	require.Len(t, records, len(all))
	for _, record := range records {
		var own []outbox.Header
		var id string
		for _, h := range record.Headers {
			switch h.Key {
			case outbox.HeaderMessageID:
				id = string(h.Value)
			case outbox.HeaderOccurredAt:
			default:
				own = append(own, outbox.Header{Name: h.Key, Value: h.Value})
			}
		}
		m, known := sent[id]
		require.True(t, known, "published once: %s", id)
		delete(sent, id)
		same := func(what string, want, got []byte) {
			assert.True(t, bytes.Equal(want, got) && (want == nil) == (got == nil), "%s of %s: %#v became %#v", what, id, want, got)
		}
		same("key", m.Key, record.Key)
		same("value", m.Payload, record.Value)
		// The order across names is not kept.
		byName := func(a, b outbox.Header) int { return int(a.Name[0]) - int(b.Name[0]) }
		slices.SortStableFunc(m.Headers, byName)
		slices.SortStableFunc(own, byName)
		require.Len(t, own, len(m.Headers), id)
		for i, h := range m.Headers {
			assert.Equal(t, h.Name, own[i].Name)
			same("header "+h.Name, h.Value, own[i].Value)
		}
	}
}

// Property: a row that waited for a month is neither refused nor deleted by a topic that keeps a
// day and takes no older timestamps: its record has the time of publishing, and a header has the
// row's. Row O35 of guarantees.md.
func TestOldRowIsKeptByTheTopic(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	topic := kafkatest.Topic(t, 1, "retention.ms", "86400000", "message.timestamp.before.max.ms", "3600000")
	old := time.Now().Add(-30 * 24 * time.Hour).UTC().Truncate(time.Microsecond)
	_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload, created_at) VALUES ($1, 'k', 'old', $2)`, topic, old)
	require.NoError(t, err)
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(ctx)
	require.NoError(t, err)
	records := kafkatest.ReadAll(t, topic)
	require.Len(t, records, 1)
	assert.WithinDuration(t, time.Now(), records[0].Timestamp, time.Hour)
	assert.Contains(t, records[0].Headers, kgo.RecordHeader{Key: outbox.HeaderOccurredAt, Value: []byte(old.Format("2006-01-02T15:04:05.000000Z"))})
	assert.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_dead`))
}
