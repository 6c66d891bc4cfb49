package outbox_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// A buffer sends nothing until it is flushed, then everything in the order in which it was added,
// in one statement, and a second flush sends nothing.
func TestBufferKeepsOrderAndFlushesOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	config := pool.Config().ConnConfig
	statements := &recorder{}
	config.Tracer = statements
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	statements.list = nil

	buffer := outbox.NewBuffer()
	require.NoError(t, buffer.Flush(t.Context(), tx), "an empty buffer")
	for i := range 50 {
		require.NoError(t, buffer.Add(t.Context(),
			outbox.Message{Topic: "orders", Payload: fmt.Append(nil, 2*i)},
			outbox.Message{Topic: "orders", Payload: fmt.Append(nil, 2*i+1)}))
	}
	require.NoError(t, buffer.Add(t.Context()))
	assert.Equal(t, 100, buffer.Len())
	assert.Empty(t, statements.list)
	require.NoError(t, buffer.Flush(t.Context(), tx))
	assert.Zero(t, buffer.Len())
	require.NoError(t, buffer.Flush(t.Context(), tx))
	assert.Len(t, statements.list, 1)
	require.NoError(t, tx.Commit(t.Context()))

	stored := rows(t, pool)
	require.Len(t, stored, 100)
	for i, r := range stored {
		assert.Equal(t, fmt.Sprint(i), string(r.Payload))
	}
}

// A call of Add with one invalid message keeps none of its messages, and all that were kept before.
func TestBufferKeepsAllOfACallOrNothing(t *testing.T) {
	t.Parallel()
	buffer := outbox.NewBuffer()
	require.NoError(t, buffer.Add(t.Context(), outbox.Message{Topic: "orders"}))
	err := buffer.Add(t.Context(), outbox.Message{Topic: "orders"}, outbox.Message{Topic: "?"})
	require.ErrorIs(t, err, outbox.ErrInvalid)
	assert.Equal(t, 1, buffer.Len())
}

// A flush that fails leaves the buffer unchanged, for the next attempt in a new transaction.
func TestBufferSurvivesAFailedFlush(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	buffer := outbox.NewBuffer()
	require.NoError(t, buffer.Add(t.Context(), outbox.Message{Topic: "orders"}, outbox.Message{Topic: "refunds"}))

	tx := begin(t, pool)
	_, err := tx.Exec(t.Context(), "SELECT 1/0")
	require.Error(t, err)
	require.ErrorContains(t, buffer.Flush(t.Context(), tx), "insert 2 outbox rows: ")
	assert.Equal(t, 2, buffer.Len())
	require.NoError(t, tx.Rollback(t.Context()))

	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return buffer.Flush(t.Context(), tx)
	}))
	assert.Len(t, rows(t, pool), 2)
}
