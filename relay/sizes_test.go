package relay_test

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: a row of before schema version 8 whose payload is beyond the bound of new ones becomes
// a dead row, whole, without passing through the relay's memory, also when it is retried; what lies
// behind it is published, in order for its key.
func TestPayloadBeyondTheBoundIsNotRead(t *testing.T) { //nolint:paralleltest // it measures the memory of the process
	longtest.Only(t, "it measures the heap")
	for _, exactly := range []bool{false, true} { //nolint:paralleltest // see above
		t.Run(fmt.Sprint("exactly once ", exactly), func(t *testing.T) {
			const size = 300 << 20
			ctx, address, topic := t.Context(), pgtest.EmptyDatabase(t), kafkatest.Topic(t, 1)
			conn := pgtest.Connect(t, address)
			require.NoError(t, migrations.To(ctx, conn, migrations.Options{}, 7))
			pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', 'first'), ($1, 'k', convert_to(repeat('x', $2), 'UTF8')), ($1, 'k', 'behind'), ($1, 'l', 'other')`, topic, size)
			require.NoError(t, migrations.Up(ctx, conn, migrations.Options{}))
			pool, err := pgxpool.New(ctx, address)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
			drain(t, r)
			retrySQL := `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'too_large'`
			must(t, pool, retrySQL)
			drain(t, r)
			runtime.ReadMemStats(&after)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(size/2), "of what was allocated in all")
			require.Equal(t, []string{"first", "other"}, values(t, topic))
			require.Equal(t, size, one[int](t, pool, `SELECT octet_length(payload) FROM effectonce.outbox_dead WHERE reason = 'too_large' AND error LIKE '%reads none above 100000000%'`))
			require.Equal(t, 1, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE reason = 'behind'`))
		})
	}
}

// Property: the database bounds what a publisher inserts, also if it comes compressed from a table
// of the publisher's own, and outbox.Publish checks the bounds before.
func TestRowsAreBounded(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	must(t, pool, `CREATE TABLE source (payload bytea, key bytea, headers jsonb);
		INSERT INTO source VALUES (convert_to(repeat('x', 100000001), 'UTF8'), convert_to(repeat('x', 1048577), 'UTF8'), jsonb_build_object('h', repeat('x', 9000000)))`)
	require.Less(t, one[int](t, pool, `SELECT pg_column_size(headers) FROM source`), 2<<20, "the test's own premise")
	for _, columns := range []string{"payload", "key", "headers"} {
		_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, `+columns+`) SELECT 't', `+columns+` FROM source`)
		require.ErrorContains(t, err, "outbox_row_is_out_of_bounds", columns)
		_, err = pool.Exec(t.Context(), `INSERT INTO effectonce.outbox_scheduled (due_at, topic, `+columns+`) SELECT now(), 't', `+columns+` FROM source`)
		require.ErrorContains(t, err, "outbox_scheduled_row_is_out_of_bounds", columns)
	}
	large, err := outbox.New(outbox.Config{RecordBytesMax: 100_000_000})
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
	err = large.Publish(t.Context(), tx, outbox.Message{Topic: "t", Key: make([]byte, 1<<20+1), Headers: []outbox.Header{{Name: "h", Value: make([]byte, 1<<20)}}})
	require.ErrorIs(t, err, outbox.ErrInvalid)
	require.ErrorContains(t, err, "Key has 1048577 bytes: want at most 1048576")
	require.ErrorContains(t, err, "Headers take 1048587 bytes: want at most 1048576")
	require.NoError(t, large.Publish(t.Context(), tx, outbox.Message{Topic: "t", Key: make([]byte, 1<<20), Headers: []outbox.Header{{Name: "h", Value: make([]byte, 1<<20-11)}}}))
}
