package relay_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

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
