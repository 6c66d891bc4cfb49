package outbox_test

import (
	"crypto/sha256"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// An INSERT of topic, key and payload, as any program can send it, is a complete publish: the
// omitted columns have the values that Publish gives them.
func TestPlainInsertIsACompletePublish(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var before, after time.Time
	const now = "SELECT clock_timestamp()"
	require.NoError(t, pool.QueryRow(t.Context(), now).Scan(&before))
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('orders', 'k', 'p'), ('orders', NULL, NULL)`)
	require.NoError(t, err)
	require.NoError(t, pool.QueryRow(t.Context(), now).Scan(&after))

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
	var before bool
	err := pool.QueryRow(t.Context(), `SELECT txid.attnum < seq.attnum FROM pg_attribute txid, pg_attribute seq
		WHERE txid.attrelid = 'effectonce.outbox'::regclass AND txid.attname = 'txid'
		AND seq.attrelid = txid.attrelid AND seq.attname = 'seq'`).Scan(&before)
	require.NoError(t, err)
	assert.True(t, before)

	var cache, increment int64
	var cycles bool
	err = pool.QueryRow(t.Context(), `SELECT seqcache, seqincrement, seqcycle FROM pg_sequence
		WHERE seqrelid = pg_get_serial_sequence('effectonce.outbox', 'seq')::regclass`).Scan(&cache, &increment, &cycles)
	require.NoError(t, err)
	assert.Equal(t, int64(1), cache)
	assert.Equal(t, int64(1), increment)
	assert.False(t, cycles)
}
