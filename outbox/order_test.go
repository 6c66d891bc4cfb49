package outbox_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
)

// accounts creates the rows whose locks order the writers of a key, and a log of the writers that
// changed them. Both get their order from the lock itself: version grows under it.
const accounts = `CREATE TABLE account (key text PRIMARY KEY, version int NOT NULL DEFAULT 0);
	CREATE TABLE change (key text, version int, message uuid, PRIMARY KEY (key, version));
	INSERT INTO account (key) SELECT n::text FROM generate_series(0, 2) n`

// change takes the key's lock and records the version that it then had.
func change(ctx context.Context, tx pgx.Tx, key string, message uuid.UUID) error {
	_, err := tx.Exec(ctx, `WITH changed AS (UPDATE account SET version = version + 1 WHERE key = $1 RETURNING version)
		INSERT INTO change SELECT $1, version, $2 FROM changed`, key, message)
	return err
}

// inversions counts messages whose seq contradicts the order of commits of their key, and compares
// the two sets.
func inversions(t *testing.T, pool *pgxpool.Pool) (inverted, messages int) {
	t.Helper()
	var lost int
	err := pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE seq < earlier), count(seq), count(*) - count(seq) FROM (
		SELECT o.seq, max(o.seq) OVER (PARTITION BY c.key ORDER BY c.version ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS earlier
		FROM change c LEFT JOIN effectonce.outbox o ON o.id = c.message) ordered`).Scan(&inverted, &messages, &lost)
	require.NoError(t, err)
	assert.Zero(t, lost)
	phantoms := `SELECT count(*) FROM effectonce.outbox o WHERE NOT EXISTS (SELECT FROM change WHERE message = o.id)`
	assert.Zero(t, pgtest.Count(t, pool, phantoms))
	return inverted, messages
}

// O6, the other way round: what the documentation of Publish warns of does happen. A message that
// is published before its key is locked has a seq from before the lock, and precedes the message of
// a transaction that had the lock first. No relay can repair that, because nothing in the rows
// shows it.
func TestPublishingBeforeTheLockInvertsTheOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, accounts)
	hasty := outbox.Message{ID: uuid.New(), Topic: "accounts", Key: []byte("0")}
	correct := outbox.Message{ID: uuid.New(), Topic: "accounts", Key: []byte("0")}

	first, second := begin(t, pool), begin(t, pool)
	require.NoError(t, change(t.Context(), first, "0", correct.ID))
	require.NoError(t, outbox.Publish(t.Context(), second, hasty))
	pid := second.Conn().PgConn().PID()
	changed := make(chan error, 1)
	go func() { changed <- change(t.Context(), second, "0", hasty.ID) }()
	waitUntilBlocked(t, pool, pid)
	require.NoError(t, outbox.Publish(t.Context(), first, correct))
	require.NoError(t, first.Commit(t.Context()))
	require.NoError(t, <-changed)
	require.NoError(t, second.Commit(t.Context()))

	inverted, messages := inversions(t, pool)
	assert.Equal(t, 2, messages)
	assert.Equal(t, 1, inverted, "if this became 0, the warning in the documentation can go")
}

// later is a message for later as it is stored.
type later struct {
	Due     time.Time
	ID      uuid.UUID
	Topic   string
	Key     []byte
	Payload []byte
	Headers string
}

func scheduled(t *testing.T, db pgtest.Querier) []later {
	t.Helper()
	return pgtest.Rows(t, db, pgx.RowToStructByPos[later], `SELECT due_at, id, topic, key, payload, headers::text AS headers FROM effectonce.outbox_scheduled ORDER BY due_at, topic`)
}

// A message with a time waits in outbox_scheduled, however it is published, in the transaction of
// the call; the others are stored in the outbox in the order of the call. The stored time is never
// before the requested one.
func TestMessagesForLaterWait(t *testing.T) {
	t.Parallel()
	at := pgtest.Now(t).Add(time.Hour).Truncate(time.Microsecond).Add(time.Nanosecond)
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
			assert.True(t, past.Due.Before(pgtest.Now(t)))
			// Consumers use the time in an ID as the message's age.
			assert.Equal(t, uuid.Version(7), future.ID.Version())
			assert.WithinDuration(t, at, time.Unix(future.ID.Time().UnixTime()), 2*time.Millisecond)
			assert.WithinDuration(t, pgtest.Now(t), time.Unix(past.ID.Time().UnixTime()), time.Hour/2, "what is past is as old as the call")
		})
	}
}

// Times that can only be mistakes are refused.
func TestMistakenTimesAreRefused(t *testing.T) {
	t.Parallel()
	err := outbox.NewBuffer().Add(
		t.Context(),
		outbox.Message{Topic: "a", DeliverAt: time.Unix(pgtest.Now(t).UnixMilli(), 0)},
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
	id, at := uuid.New(), pgtest.Now(t).Add(time.Hour)
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
	publishOf(t, o, pool, outbox.Message{ID: id, Topic: "a", DeliverAt: pgtest.Now(t).Add(time.Hour)}, outbox.Message{Topic: "a"})
	assert.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM money.outbox WHERE topic IN ('a', 'b')`))
	assert.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM money.outbox_scheduled WHERE due_at > now()`))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		found, err := o.Cancel(t.Context(), tx, id)
		assert.True(t, found)
		return err
	}))
}

// An INSERT of topic, key and payload, as any program can send it, is a complete publish: the
// omitted columns have the values that Publish gives them.
func TestPlainInsertIsACompletePublish(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	before := pgtest.Now(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', 'k', 'p'), ('orders', NULL, NULL)`)
	require.NoError(t, err)
	after := pgtest.Now(t)

	stored := rows(t, pool)
	require.Len(t, stored, 2)
	assert.Equal(t, []byte("k"), stored[0].Key)
	assert.Equal(t, []byte("p"), stored[0].Payload)
	assert.Equal(t, int16(sha256.Sum256([]byte("k"))[0]), stored[0].Shard)
	assert.Nil(t, stored[1].Key)
	assert.Nil(t, stored[1].Payload)
	assert.Equal(t, int16(sha256.Sum256(stored[1].ID[:])[0]), stored[1].Shard, "without a key the ID decides")
	assert.NotEqual(t, stored[0].ID, stored[1].ID)
	for _, r := range stored {
		assert.Equal(t, "orders", r.Topic)
		assert.Equal(t, "{}", r.Headers)
		assert.True(t, r.TxidIsIt)
		assert.Equal(t, uuid.Version(7), r.ID.Version())
		assert.Equal(t, uuid.RFC4122, r.ID.Variant())
		at := time.Unix(r.ID.Time().UnixTime())
		assert.WithinRange(t, at, before.Add(-time.Millisecond), after.Add(time.Millisecond), "the time in the ID is the database's")
	}

	publishAlone(t, pool, outbox.Message{Topic: "orders", Key: []byte("k"), Payload: []byte("p")})
	published := rows(t, pool)[2]
	published.ID, published.Seq = stored[0].ID, stored[0].Seq
	assert.Equal(t, stored[0], published)
}

// A row that no consumer could ever read is refused at the INSERT, by a constraint whose name says
// why.
func TestPlainInsertOfNonsenseIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const badTopic, badHeaders = "outbox_topic_is_no_kafka_topic_name", "outbox_headers_are_no_json_object"
	for _, tc := range []struct{ name, columns, values, code, constraint string }{
		{"no topic", "payload", "'p'", "23502", ""},
		{"empty topic", "topic", "''", "23514", badTopic},
		{"topic of 250 letters", "topic", "repeat('a', 250)", "23514", badTopic},
		{"topic is a dot", "topic", "'.'", "23514", badTopic},
		{"topic is two dots", "topic", "'..'", "23514", badTopic},
		{"topic with a space", "topic", "'or ders'", "23514", badTopic},
		{"topic beyond ASCII", "topic", "'aufträge'", "23514", badTopic},
		{"topic with a newline", "topic", "E'orders\\n'", "23514", badTopic},
		{"headers are a list", "topic, headers", "'orders', '[]'", "23514", badHeaders},
		{"headers are text", "topic, headers", `'orders', '"a"'`, "23514", badHeaders},
		{"headers are a JSON null", "topic, headers", "'orders', 'null'", "23514", badHeaders},
		{"headers are null", "topic, headers", "'orders', NULL", "23502", ""},
		{"headers are no JSON", "topic, headers", "'orders', '{'", "22P02", ""},
		{"a seq of one's own would break the order", "topic, seq", "'orders', 1", "428C9", ""},
		{"a shard of one's own too", "topic, shard", "'orders', 1", "428C9", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := pool.Exec(t.Context(), "INSERT INTO effectonce.outbox ("+tc.columns+") VALUES ("+tc.values+")")
			var pgErr *pgconn.PgError
			require.ErrorAs(t, err, &pgErr)
			assert.Equal(t, tc.code, pgErr.Code, err)
			assert.Equal(t, tc.constraint, pgErr.ConstraintName)
		})
	}
}

// The relay's floor relies on two things that a test of behaviour cannot observe: a row gets its
// transaction ID before its seq (defaults are computed in the order of the columns), and no session
// caches numbers of the sequence.
func TestTransactionIDComesBeforeSeq(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	assert.True(t, pgtest.Value[bool](t, pool, `SELECT txid.attnum < seq.attnum FROM pg_attribute txid, pg_attribute seq
		WHERE txid.attrelid = 'effectonce.outbox'::regclass AND txid.attname = 'txid'
		AND seq.attrelid = txid.attrelid AND seq.attname = 'seq'`))

	var cache, increment int64
	var cycles bool
	err := pool.QueryRow(t.Context(), `SELECT seqcache, seqincrement, seqcycle FROM pg_sequence
		WHERE seqrelid = pg_get_serial_sequence('effectonce.outbox', 'seq')::regclass`).Scan(&cache, &increment, &cycles)
	require.NoError(t, err)
	assert.Equal(t, int64(1), cache)
	assert.Equal(t, int64(1), increment)
	assert.False(t, cycles)
}
