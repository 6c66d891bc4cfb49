package outbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
)

// later is a message for later as it is stored.
type later struct {
	Due     time.Time
	ID      uuid.UUID
	Topic   string
	Key     []byte
	Payload []byte
	Headers string
}

func scheduled(t *testing.T, db querier) []later {
	t.Helper()
	result, err := db.Query(t.Context(), `SELECT due_at, id, topic, key, payload, headers::text AS headers FROM effectonce.outbox_scheduled ORDER BY due_at, topic`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(result, pgx.RowToStructByPos[later])
	require.NoError(t, err)
	return all
}

// A message with a time waits in outbox_scheduled, however it is published, in the transaction of
// the call; the others are stored in the outbox in the order of the call. The stored time is never
// before the requested one.
func TestMessagesForLaterWait(t *testing.T) {
	t.Parallel()
	at := dbNow(t).Add(time.Hour).Truncate(time.Microsecond).Add(time.Nanosecond)
	msgs := []outbox.Message{
		{Topic: "orders", Payload: []byte("1")},
		{Topic: "orders", Key: []byte{0, 0xff}, Payload: []byte{}, Headers: []outbox.Header{{Name: "a", Value: []byte("1")}}, DeliverAt: at},
		{Topic: "orders", Payload: []byte("2")},
		{Topic: "orders", DeliverAt: time.Date(-9000, 1, 1, 0, 0, 0, 0, time.UTC)},
		{Topic: "orders", Payload: []byte("3")},
	}
	o := newOutbox(t, outbox.Config{})
	for name, publish := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Publish": func(ctx context.Context, tx pgx.Tx) error { return o.Publish(ctx, tx, msgs...) },
		"Queue": func(ctx context.Context, tx pgx.Tx) error {
			batch := &pgx.Batch{}
			return errors.Join(o.Queue(ctx, batch, msgs...), tx.SendBatch(ctx, batch).Close())
		},
		"Buffer": func(ctx context.Context, tx pgx.Tx) error {
			buffer := o.Buffer()
			return errors.Join(buffer.Add(ctx, msgs...), buffer.Flush(ctx, tx))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			tx := begin(t, pool)
			require.NoError(t, publish(t.Context(), tx))
			require.NoError(t, tx.Rollback(t.Context()))
			assert.Empty(t, scheduled(t, pool))

			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return publish(t.Context(), tx) }))
			var now string
			for _, r := range rows(t, pool) {
				now += string(r.Payload)
			}
			assert.Equal(t, "123", now)
			waiting := scheduled(t, pool)
			require.Len(t, waiting, 2)
			past, future := waiting[0], waiting[1]
			assert.False(t, future.Due.Before(at))
			assert.Less(t, future.Due.Sub(at), time.Microsecond)
			assert.Equal(t, []byte{0, 0xff}, future.Key)
			assert.Equal(t, []byte{}, future.Payload)
			assert.JSONEq(t, `{"a": "1"}`, future.Headers)
			assert.Nil(t, past.Key)
			assert.Nil(t, past.Payload)
			assert.True(t, past.Due.Before(dbNow(t)))
			// Consumers use the time in an ID as the message's age.
			assert.Equal(t, uuid.Version(7), future.ID.Version())
			assert.WithinDuration(t, at, time.Unix(future.ID.Time().UnixTime()), 2*time.Millisecond)
			assert.WithinDuration(t, dbNow(t), time.Unix(past.ID.Time().UnixTime()), time.Hour/2, "what is past is as old as the call")
		})
	}
}

// Times that can only be mistakes are refused.
func TestMistakenTimesAreRefused(t *testing.T) {
	t.Parallel()
	err := outbox.NewBuffer().Add(
		t.Context(),
		outbox.Message{Topic: "a", DeliverAt: time.Unix(dbNow(t).UnixMilli(), 0)},
		outbox.Message{Topic: "a", DeliverAt: time.Now().AddDate(10, 0, -1)},
	)
	require.ErrorIs(t, err, outbox.ErrInvalid)
	require.ErrorContains(t, err, "message 0: DeliverAt is in the year 5")
	require.ErrorContains(t, err, "want at most 10 years ahead")
	assert.NotContains(t, err.Error(), "message 1")
}

// Cancel removes a message, from all its topics, if and when its transaction commits, and reports
// whether there was one. Publishing the ID of a waiting message again does not change it; once
// cancelled, it may be published again.
func TestCancel(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	id, at := uuid.New(), dbNow(t).Add(time.Hour)
	cancel := func(commit bool) (found bool) {
		tx := begin(t, pool)
		var err error
		found, err = outbox.Cancel(t.Context(), tx, id)
		require.NoError(t, err)
		if commit {
			require.NoError(t, tx.Commit(t.Context()))
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
		}
		return found
	}
	message := outbox.Message{ID: id, Topic: "a", Payload: []byte("1"), DeliverAt: at}
	again := func(payload string) outbox.Message {
		return outbox.Message{ID: id, Topic: "b", Payload: []byte(payload), DeliverAt: at}
	}
	assert.False(t, cancel(true))
	publishAlone(t, pool, message, again("1"), outbox.Message{Topic: "a", DeliverAt: at})
	message.Payload = []byte("2")
	publishAlone(t, pool, message, again("2"))
	assert.True(t, cancel(false))
	require.Len(t, scheduled(t, pool), 3)
	assert.Equal(t, 2, payloads(t, pool, "1"), "it is as it was")
	assert.True(t, cancel(true))
	assert.False(t, cancel(true))
	require.Len(t, scheduled(t, pool), 1)
	publishAlone(t, pool, message, again("2"))
	assert.Equal(t, 2, payloads(t, pool, "2"))
}

func payloads(t *testing.T, pool *pgxpool.Pool, payload string) (n int) {
	t.Helper()
	for _, m := range scheduled(t, pool) {
		if string(m.Payload) == payload {
			n++
		}
	}
	return n
}

// A configured schema is also used for messages for later, and the search path does not change that
// (row S8).
func TestMessagesForLaterInAnotherSchema(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	plain := newPool(t, address)
	conn, err := plain.Acquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), conn.Conn(), migrations.Options{Schema: "money"}))
	conn.Release()
	_, err = plain.Exec(t.Context(), `
CREATE SCHEMA evil;
CREATE TABLE evil.outbox_scheduled (LIKE money.outbox_scheduled);
CREATE FUNCTION evil.unnest(uuid[]) RETURNS SETOF uuid LANGUAGE sql AS $$ SELECT null::uuid WHERE false $$;
CREATE FUNCTION evil.unnest(text[]) RETURNS SETOF text LANGUAGE sql AS $$ SELECT 'evil' $$;
CREATE FUNCTION evil.unnest(timestamptz[]) RETURNS SETOF timestamptz LANGUAGE sql AS $$ SELECT 'epoch'::timestamptz $$;
CREATE FUNCTION evil.uuid_floor(timestamptz) RETURNS uuid LANGUAGE sql AS $$ SELECT null::uuid $$;`)
	require.NoError(t, err)
	pool := newPool(t, address, "search_path", "evil, public")
	o := newOutbox(t, outbox.Config{Schema: "money"})
	id := uuid.New()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return o.Publish(t.Context(), tx, outbox.Message{ID: id, Topic: "a", DeliverAt: dbNow(t).Add(time.Hour)}, outbox.Message{Topic: "a"})
	}))
	var now, waiting int
	count := `SELECT (SELECT count(*) FROM money.outbox WHERE topic IN ('a', 'b')), (SELECT count(*) FROM money.outbox_scheduled WHERE due_at > now())`
	require.NoError(t, pool.QueryRow(t.Context(), count).Scan(&now, &waiting))
	assert.Equal(t, 1, now)
	assert.Equal(t, 1, waiting)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		found, err := o.Cancel(t.Context(), tx, id)
		assert.True(t, found)
		return err
	}))
}

// dbNow returns the time of the database's clock, which decides when a message is due.
func dbNow(t *testing.T) time.Time {
	t.Helper()
	offset, err := pgtest.ClockOffset()
	require.NoError(t, err)
	return time.Now().Add(offset)
}
