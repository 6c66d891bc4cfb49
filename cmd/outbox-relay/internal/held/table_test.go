package held_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
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

// Every retry and discard is recorded with who, why and what it was, in the same transaction, and
// without payload or headers.
func TestActionsAreWrittenDown(t *testing.T) {
	t.Parallel()
	subjects := map[kind]map[string]any{
		dead: {
			"relay": "default", "seq": 1.0, "message_id": "00000000-0000-0000-0000-000000000001", "topic": "orders", "key": "a",
			"reason": "refused", "error": "error 1", "attempts": 1.0, "state": "held", "created_at": "2026-01-02T03:04:05Z",
		},
		parked: {
			"seq": 1.0, "consumer": "billing/orders", "message_id": "00000000-0000-0000-0000-000000000001", "topic": "orders",
			"partition": 0.0, "offset": 1.0, "key": "a", "reason": "failed", "error": "error 1", "attempts": 10.0, "state": "parked",
		},
	}
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		conn := connect(t, pgtest.Database(t))
		places := k.insert(t, conn, "a own held", "a behind behind", "- own held", "b own held", "c own held")
		exec(t, conn, `UPDATE `+k.relation+` SET key = '\x00ff' WHERE key = 'b'`)
		k.act(t, conn, retry, places[4], places[2])
		k.act(t, conn, discard, places[3])
		k.act(t, conn, discard, places[3])
		k.act(t, conn, whole, places[0])

		actions, err := operator.Actions(t.Context(), conn, schema, operator.ActionFilter{}, 100)
		require.NoError(t, err)
		var said []string
		for _, a := range actions {
			said = append(said, strings.TrimPrefix(a.What, string(k.Kind))+" "+a.Object()[35:])
			assert.Equal(t, ana.Who, *a.Stated)
			assert.Equal(t, conn.Config().User, a.Who)
			assert.Equal(t, ana.Why, a.Why)
			assert.NotEmpty(t, a.Role)
			assert.NotContains(t, string(a.Subject), "payload")
			assert.NotContains(t, string(a.Subject), "headers")
		}
		require.Equal(t, []string{".discard 2", ".discard 1", ".discard 4", ".retry 5", ".retry 3"}, said)
		var subject map[string]any
		require.NoError(t, json.Unmarshal(actions[1].Subject, &subject))
		if text, is := subject["created_at"].(string); is { // in the program's time zone
			created, err := time.Parse(time.RFC3339, text)
			require.NoError(t, err)
			subject["created_at"] = created.UTC().Format(time.RFC3339)
		}
		assert.Equal(t, subjects[k], subject)
		assert.Contains(t, string(actions[4].Subject), `"key": null`)
		assert.Contains(t, string(actions[2].Subject), `"key": "base64:AP8="`)

		// An action that cannot be recorded is not done.
		exec(t, conn, "ALTER TABLE effectonce.operator_actions ADD CHECK (stated <> 'ana@ops') NOT VALID")
		exec(t, conn, "UPDATE "+k.relation+" SET state = $1 WHERE state <> 'discard'", k.held)
		before := k.left(t, conn)
		require.Len(t, before, 2)
		for _, order := range []held.Decision{retry, discard, whole} {
			_, err = k.Act(t.Context(), conn, schema, order, places)
			require.Error(t, err)
		}
		assert.Equal(t, before, k.left(t, conn))
	})
}

// A deadlock with a transaction of the program costs another try, not the action.
func TestDeadlockIsTriedAgain(t *testing.T) {
	t.Parallel()
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		address := pgtest.Database(t)
		first, program, command, look := connect(t, address), connect(t, address), connect(t, address), connect(t, address)
		exec(t, program, "SET deadlock_timeout = '1h'") // the command is the one that looks for it
		places := k.insert(t, look, "a own held", "b own held", "c own held")
		exec(t, first, "BEGIN; SELECT FROM "+k.relation+" WHERE key = 'b' FOR UPDATE")
		exec(t, program, "BEGIN; SELECT FROM "+k.relation+" WHERE key = 'c' FOR UPDATE")
		order, after := retry, []string{"1 " + k.own + " retry", "2 " + k.own + " retry", "3 " + k.own + " retry"}
		if k == parked {
			order, after = discard, nil
		}
		var result *held.Result
		done := make(chan error, 1)
		go func() {
			var err error
			result, err = k.Act(t.Context(), command, schema, order, places)
			done <- err
		}()
		pgtest.Blocked(t, look, first) // the command, which has locked a
		waits := make(chan error, 1)
		go func() {
			_, err := program.Exec(t.Context(), "SELECT FROM "+k.relation+" WHERE key = 'a' FOR UPDATE")
			waits <- err
		}()
		pgtest.Blocked(t, look, command)
		exec(t, first, "COMMIT") // now the command waits for c
		require.NoError(t, testwait.Chan(t, "the program's lock", waits))
		exec(t, program, "COMMIT")
		require.NoError(t, testwait.Chan(t, "the command's end", done))
		assert.Len(t, result.Done, 3)
		assert.ElementsMatch(t, after, k.left(t, look))
	})
}

// A row counts as finished when it and the rows behind it are gone. Rows that are held again, also
// those behind it, are named. Rows that an operator discarded since then do not count as finished.
// Rows that come later are not waited for.
func TestWaitTellsWhatBecameOfEach(t *testing.T) {
	t.Parallel()
	laterSQL := map[kind]string{
		dead: `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
			VALUES ('default', 99, gen_random_uuid(), 'orders', 'a', '{}', now(), 'behind', '', 'behind')`,
		parked: `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
			SELECT consumer, gen_random_uuid(), topic, partition, 99, key, 'behind', '', 'behind' FROM effectonce.parked_messages WHERE seq = 1`,
	}
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		conn := connect(t, pgtest.Database(t))
		places := k.insert(t, conn, "a own held", "a behind behind", "b own held", "c own held", "c behind behind", "- own held", "e own held")
		wait := &held.Wait{}
		look := func() held.Progress {
			report, err := k.Look(t.Context(), conn, schema, wait)
			require.NoError(t, err)
			return report
		}
		finish := func(n int) { exec(t, conn, "DELETE FROM "+k.relation+" WHERE seq = $1", n) }
		hold := func(n int) {
			exec(t, conn, "UPDATE "+k.relation+" SET state = $2, reason = $3, error = 'again' WHERE seq = $1", n, k.held, k.own)
		}
		assert.Equal(t, held.Progress{Failed: []held.Failure{}}, look())
		wait.Add(k.act(t, conn, retry, places...).Done)
		exec(t, conn, laterSQL[k])
		assert.Equal(t, 5, look().Pending)
		finish(1) // one is behind it
		assert.Equal(t, 5, look().Pending)
		finish(2) // and now only what came later
		report := look()
		assert.Equal(t, 4, report.Pending)
		assert.Equal(t, 1, report.Finished)
		hold(3)
		finish(4)
		hold(5) // what is behind 4
		report = look()
		assert.Equal(t, 2, report.Pending)
		require.Len(t, report.Failed, 2)
		assert.Equal(t, held.Failure{ID: report.Failed[0].ID, Reason: k.own, Error: "again"}, report.Failed[0])
		assert.Equal(t, byte(3), report.Failed[0].ID[15])
		assert.Equal(t, byte(5), report.Failed[1].ID[15])
		if k == dead {
			hold(6) // else the relay may be publishing it
		}
		k.act(t, conn, discard, places[5])
		report = look()
		assert.Equal(t, 1, report.Discarded)
		assert.Equal(t, 1, report.Finished)
		finish(7)
		report = look()
		assert.Equal(t, 1, report.Discarded)
		assert.Equal(t, 2, report.Finished)
		assert.Zero(t, report.Pending)
		assert.Equal(t, report, look())
	})
}

// Every reason and state that the schema knows is known here, and each reason has advice of its
// own.
func TestEveryReasonHasAdvice(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	known := func(constraint string) (all []string) {
		var check string
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = $1 AND connamespace = 'effectonce'::regnamespace",
			constraint).Scan(&check))
		for _, quoted := range regexp.MustCompile(`'\w+'`).FindAllString(check, -1) {
			all = append(all, strings.Trim(quoted, "'"))
		}
		return all
	}
	assert.ElementsMatch(t, known("outbox_dead_state_check"), append(dead.States(), "discard", "discarded"))
	assert.ElementsMatch(t, known("parked_messages_state_is_unknown"), parked.States())
	for constraint, table := range map[string]kind{"outbox_dead_reason_check": dead, "parked_messages_reason_is_unknown": parked} {
		assert.ElementsMatch(t, known(constraint), table.Reasons())
		said := map[held.Advice]string{table.Advice("no such reason"): "no such reason"}
		for _, reason := range table.Reasons() {
			advice := table.Advice(reason)
			assert.Empty(t, said[advice], "%s has the advice of another", reason)
			said[advice] = reason
		}
	}
}

// Statements that run for every action, or at every look of a waiting operator, read only the rows
// that they need, however many wait.
func TestStatementsDoNotReadTheWholeTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
		SELECT 'default', 1 + n, gen_random_uuid(), 'orders', convert_to('key ' || n % 1000, 'UTF8'), '{}', now(),
			CASE WHEN n < 1000 THEN 'refused' ELSE 'behind' END, 'e', CASE WHEN n < 1000 THEN 'held' ELSE 'behind' END
		FROM generate_series(0, 19999) n`)
	exec(t, conn, "ANALYZE effectonce.outbox_dead")
	parked.insert(t, conn, "a failed parked")
	exec(t, conn, `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
		SELECT id, gen_random_uuid(), 'orders', 0, 100 + n, convert_to('key ' || n % 1000, 'UTF8'),
			CASE WHEN n < 1000 THEN 'failed' ELSE 'behind' END, 'e', CASE WHEN n < 1000 THEN 'parked' ELSE 'behind' END
		FROM effectonce.consumers, generate_series(0, 19999) n`)
	exec(t, conn, "ANALYZE effectonce.parked_messages")
	refs, err := parked.Targets(t.Context(), conn, schema, held.Filter{Key: []byte("key 7")}, 10)
	require.NoError(t, err)
	require.Len(t, refs, 1)
	for _, plan := range append(held.Plans(t, conn, held.Dead, held.Ref{Relay: "default", Seq: 8}), held.Plans(t, conn, held.Parked, refs[0])...) {
		assert.NotContains(t, plan, "Seq Scan on outbox_dead", plan)
		assert.NotContains(t, plan, "Seq Scan on parked_messages", plan)
		assert.NotRegexp(t, `(?s)^-- \w+\.next.*Aggregate`, plan)
		for _, touched := range regexp.MustCompile(`actual rows=(\d+)`).FindAllStringSubmatch(plan, -1) {
			var rows int
			_, err := fmt.Sscan(touched[1], &rows)
			require.NoError(t, err)
			assert.LessOrEqual(t, rows, 25, plan)
		}
	}
}

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
	_, err = dead.Act(ctx, conn, schema, held.Decision{By: ana, Discard: true, WholeKeys: random.IntN(20) == 0}, places[:min(len(places), 2)])
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
