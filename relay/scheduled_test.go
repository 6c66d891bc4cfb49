package relay_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: a message for later gets into the outbox once and never before its time by the
// database's clock, also where two relays of different names look after the same outbox; each of
// them publishes it once, under its ID, with everything that it had. What is never due stays.
func TestMessagesForLaterArePublishedOnceAndNotBefore(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	must(t, pool, `CREATE TABLE moved (id uuid, at timestamptz);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO moved VALUES (NEW.id, clock_timestamp()); RETURN NULL; END';
		CREATE TRIGGER note AFTER INSERT ON effectonce.outbox FOR EACH ROW EXECUTE FUNCTION note();
		CREATE TABLE planned (id uuid, due_at timestamptz)`)
	must(t, pool, `WITH s AS (
		INSERT INTO effectonce.outbox_scheduled (due_at, topic, key, payload, headers)
		SELECT clock_timestamp() + (n - 50) * interval '30 milliseconds', $1, ('k' || n % 5)::bytea, n::text::bytea, '{"a": "1"}' FROM generate_series(1, 150) n
		RETURNING id, due_at) INSERT INTO planned SELECT * FROM s`, topic)
	must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES ('2999-01-01', $1), (clock_timestamp() + interval '1 hour', $1)`, topic)
	running(t, pool, relay.Config{})
	running(t, pool, relay.Config{Name: "other"})
	testwait.True(t, "both publish all", func() bool { return kafkatest.Count(t, topic) >= 300 })

	require.Equal(t, 150, one[int](t, pool, `SELECT count(*) FROM moved`))
	require.Equal(t, 150, one[int](t, pool, `SELECT count(*) FROM moved JOIN planned USING (id) WHERE at >= due_at`))
	require.Equal(t, 2, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_scheduled`))
	copies := map[string]int{}
	for _, record := range kafkatest.ReadAll(t, topic) {
		copies[header(record, "message-id")[0]]++
		require.Equal(t, []string{"1"}, header(record, "a"))
		require.NotEmpty(t, record.Key)
		require.NotEmpty(t, record.Value)
	}
	require.Len(t, copies, 150)
	for id, n := range copies {
		require.Equal(t, 2, n, id)
	}
}

// Property: of "cancelled" and "published" exactly one holds for each message, and the caller learns which, however many cancel, roll back and move at once; a DELETE by plain
// SQL counts as Cancel does.
func TestCancelledOrPublished(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	r := newRelay(t, pool, relay.Config{})
	const messages = 600
	msgs := make([]outbox.Message, messages)
	for i := range msgs {
		msgs[i] = outbox.Message{ID: uuid.New(), Topic: "c", Key: []byte{byte(i)}, DeliverAt: time.Unix(int64(i), 0)}
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Publish(ctx, tx, msgs...) }))

	var cancelled [messages]bool
	var next atomic.Int64
	next.Store(-1)
	undo := errors.New("rolled back")
	var cancelling, moving sync.WaitGroup
	begun := make(chan struct{})
	var meanwhile atomic.Int64
	var over atomic.Bool
	move := func() {
		moved, err := r.PromotePage(ctx, 7)
		if err != nil {
			t.Errorf("move: %v", err)
		}
		meanwhile.Add(int64(moved))
	}
	for range 3 {
		cancelling.Go(func() {
			for i := next.Add(1); i < messages; i = next.Add(1) {
				var found bool
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
					if i%3 == 0 {
						tag, err := tx.Exec(ctx, `DELETE FROM effectonce.outbox_scheduled WHERE id = $1`, msgs[i].ID[:])
						found = tag.RowsAffected() > 0
						return err
					}
					found, err = outbox.Cancel(ctx, tx, msgs[i].ID)
					if err == nil && i%3 == 1 {
						return undo
					}
					return err
				})
				if err != nil && !errors.Is(err, undo) {
					t.Errorf("cancel: %v", err)
				}
				cancelled[i] = found && err == nil
				if i == messages/10 {
					close(begun) // however those that move are scheduled, some are cancelled
				}
				if i%10 == 0 {
					move() // however the others are scheduled, some are moved
				}
			}
		})
	}
	for range 2 {
		moving.Go(func() {
			<-begun
			for !over.Load() {
				move() // few at a time, also from the end at which the cancelling continues
			}
		})
	}
	cancelling.Wait()
	over.Store(true)
	moving.Wait()
	for one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_scheduled`) > 0 {
		require.NoError(t, r.PromoteDue(ctx))
	}
	published := map[uuid.UUID]int{}
	for _, id := range all[[16]byte](t, pool, `SELECT id FROM effectonce.outbox`) {
		published[id]++
	}
	n := 0
	for i, m := range msgs {
		if cancelled[i] {
			n++
			require.Zero(t, published[m.ID], "cancelled and published")
		} else {
			require.Equal(t, 1, published[m.ID], "not cancelled and not published once")
		}
	}
	t.Logf("%d of %d cancelled", n, messages)
	require.NotZero(t, n)
	require.Positive(t, meanwhile.Load(), "nothing was moved meanwhile: the test shows nothing")
}

// Property: while one moves messages, another one moves none, also none behind them: its own could commit
// first. A relay that is killed in the middle of a move has moved nothing, and the next one moves all of it,
// once. What is not due stays, also under the ID of what is.
func TestOneMovesAtATime(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic, payload) SELECT 'epoch'::timestamptz + n * interval '1 second', 'orders', n::text::bytea FROM generate_series(1, 1500) n`)
	must(t, pool, `INSERT INTO effectonce.outbox_scheduled (id, due_at, topic) SELECT id, '2999-01-01', 'tomorrow' FROM effectonce.outbox_scheduled`)
	// A move waits in the middle: it has deleted all its rows.
	must(t, pool, `CREATE FUNCTION halt() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF NEW.payload = ''50'' THEN PERFORM pg_advisory_xact_lock(4711); END IF; RETURN NEW; END';
		CREATE TRIGGER halt BEFORE INSERT ON effectonce.outbox FOR EACH ROW EXECUTE FUNCTION halt()`)
	blocker := opened(t, pool, `SELECT pg_advisory_xact_lock(4711)`)
	count := func(of, topic string) int {
		return one[int](t, pool, `SELECT count(*) FROM effectonce.`+of+` WHERE topic = $1`, topic)
	}
	first, other := newRelay(t, pool, relay.Config{Name: "first"}), newRelay(t, pool, relay.Config{Name: "other"})
	for _, killed := range []bool{true, false} {
		done := make(chan error, 1)
		go func() { done <- first.PromoteDue(ctx) }()
		const waiting = `FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '-- relay.promote%' AND wait_event_type = 'Lock'`
		becomes(t, pool, "it is in the middle of it", `SELECT count(*) = 1 `+waiting)
		limited, cancel := context.WithTimeout(ctx, testwait.Bound)
		defer cancel()
		require.NoError(t, other.PromoteDue(limited), "it does not wait")
		require.Zero(t, count("outbox", "orders"))
		if killed {
			must(t, pool, `SELECT pg_terminate_backend(pid) `+waiting)
			require.Error(t, <-done)
			becomes(t, pool, "the server has undone it", `SELECT NOT EXISTS (SELECT `+waiting+`)`)
			require.Zero(t, count("outbox", "orders"))
			require.Equal(t, 1500, count("outbox_scheduled", "orders"))
			continue
		}
		require.NoError(t, blocker.Rollback(ctx))
		require.NoError(t, <-done)
	}
	require.Equal(t, 1500, count("outbox", "orders"))
	require.Equal(t, 1500, one[int](t, pool, `SELECT count(DISTINCT id) FROM effectonce.outbox`))
	require.Equal(t, 1500, count("outbox_scheduled", "tomorrow"))
}

// Property: what is not due costs nothing: both statements go into the index at the time of now,
// whatever waits behind it.
func TestLookForMessagesForLaterIsCheap(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic) SELECT now() + n * interval '1 hour', 'orders' FROM generate_series(1, 20000) n; ANALYZE effectonce.outbox_scheduled`)
	must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic) SELECT now() - n * interval '1 hour', 'orders' FROM generate_series(1, 3) n`)
	conn := pgtest.Connect(t, pool.Config().ConnString())
	for _, sql := range []string{relay.NextDueSQL, strings.NewReplacer("$1", "1000", "$2", "NULL").Replace(relay.PromoteSQL)} {
		plan := pgtest.Plan(t, conn, sql)
		require.Contains(t, plan, "outbox_scheduled_due", plan)
		require.NotContains(t, plan, "Seq Scan", plan)
		require.NotRegexp(t, `Index Scan[^\n]*\n([^\n]*(Cond|Filter): [^\n]*\n)*[^\n]*Rows Removed by Filter`, plan)
	}
}

// Property: the order of the outbox is the order of the times, and of one time the order in which the
// messages were inserted, however many moves that takes and whatever their IDs and their times of creation are.
func TestMovedInTheOrderOfTheTimes(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	const messages = 2*relay.PromoteRowsMax + 500
	var msgs []outbox.Message
	for i := range messages {
		// A thousand of each time; the last thousand comes first.
		at, place := time.Unix(int64(5-i/1000), 0), fmt.Append(nil, -i/1000*1000+i%1000)
		msgs = append(msgs, outbox.Message{ID: uuid.New(), Topic: "orders", Key: []byte("k"), Payload: place, DeliverAt: at})
	}
	for some := range slices.Chunk(msgs, 700) {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Publish(ctx, tx, some...) }))
	}
	must(t, pool, `UPDATE effectonce.outbox_scheduled SET created_at = clock_timestamp() - random() * interval '1 day'`) // other clocks; and the rows move in the table
	require.NoError(t, newRelay(t, pool, relay.Config{}).PromoteDue(ctx))
	came := all[int](t, pool, `SELECT convert_from(payload, 'UTF8')::int FROM effectonce.outbox ORDER BY seq`)
	require.Len(t, came, messages)
	require.True(t, slices.IsSorted(came))
}

const laterSQL = `SELECT count(*) FROM effectonce.outbox_scheduled`

// Property: a message for later that the outbox refuses stays with the reason, and delays no message behind it; it is moved when the cause is gone and an operator clears the
// reason.
func TestRefusedMessageForLaterDelaysNoOthers(t *testing.T) {
	t.Parallel()
	each(t, map[string]string{
		"a CHECK": `convert_to(repeat('x', 2000), 'UTF8')`, "a trigger": `convert_to('raise', 'UTF8')`,
	}, func(t *testing.T, bad string) {
		t.Helper()
		pool := pgtest.Pool(t)
		must(t, pool, `ALTER TABLE effectonce.outbox ADD CONSTRAINT small CHECK (octet_length(payload) < 1000) NOT VALID;
			CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF NEW.payload = ''raise'' THEN RAISE EXCEPTION ''no''; END IF; RETURN NEW; END';
			CREATE TRIGGER refuse BEFORE INSERT ON effectonce.outbox FOR EACH ROW EXECUTE FUNCTION refuse()`)
		must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic, payload) SELECT '2000-01-01', 'orders', CASE n WHEN 1 THEN `+bad+` WHEN 700 THEN `+bad+` ELSE 'good' END FROM generate_series(1, 2500) n`)
		r := newRelay(t, pool, relay.Config{})
		require.NoError(t, r.PromoteDue(t.Context()))
		require.Equal(t, 2498, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`))
		require.Equal(t, 2, one[int](t, pool, laterSQL+` WHERE refused LIKE '%(SQLSTATE %'`))
		must(t, pool, `DROP TRIGGER refuse ON effectonce.outbox; ALTER TABLE effectonce.outbox DROP CONSTRAINT small; UPDATE effectonce.outbox_scheduled SET refused = NULL`)
		require.NoError(t, r.PromoteDue(t.Context()))
		require.Zero(t, one[int](t, pool, laterSQL))
	})
}

// Property: a session that has locked many messages for later delays no others. When it ends, its own are
// moved.
func TestLockedMessagesForLaterDelayNoOthers(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic) SELECT '2000-01-01', 'locked' FROM generate_series(1, 2500)`)
	tx := opened(t, pool, `DELETE FROM effectonce.outbox_scheduled`)
	must(t, pool, `INSERT INTO effectonce.outbox_scheduled (due_at, topic) SELECT '2001-01-01', 'others' FROM generate_series(1, 1500)`)
	r := newRelay(t, pool, relay.Config{})
	require.NoError(t, r.PromoteDue(ctx))
	require.Equal(t, 1500, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox WHERE topic = 'others'`))
	require.Equal(t, 2500, one[int](t, pool, laterSQL))
	require.NoError(t, tx.Rollback(ctx))
	require.NoError(t, r.PromoteDue(ctx))
	require.Zero(t, one[int](t, pool, laterSQL))
	require.Equal(t, 4000, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`))
}
