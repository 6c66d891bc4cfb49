package outbox_test

import (
	"context"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newOutbox(tb testing.TB, cfg outbox.Config) *outbox.Outbox {
	tb.Helper()
	o, err := outbox.New(cfg)
	require.NoError(tb, err)
	return o
}

// row is an outbox row as it is stored.
type row struct {
	Seq      int64
	ID       uuid.UUID
	Topic    string
	Key      []byte // nil if null
	Payload  []byte // nil if null
	Headers  string
	Shard    int16
	TxidIsIt bool // txid is the transaction that made the row
}

// rows returns the stored rows, in the order of seq.
func rows(t *testing.T, db pgtest.Querier) []row {
	t.Helper()
	return pgtest.Rows(t, db, pgx.RowToStructByPos[row], `SELECT seq, id, topic, key, payload, headers::text AS headers, shard,
		txid::text::bigint & 4294967295 = xmin::text::bigint AS txid_is_it FROM effectonce.outbox ORDER BY seq`)
}

// begin opens a transaction that ends with the test.
func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// publishAlone publishes in its own transaction, which commits.
func publishAlone(t *testing.T, pool *pgxpool.Pool, msgs ...outbox.Message) {
	t.Helper()
	publishOf(t, newOutbox(t, outbox.Config{}), pool, msgs...)
}

func publishOf(t *testing.T, o *outbox.Outbox, pool *pgxpool.Pool, msgs ...outbox.Message) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return o.Publish(t.Context(), tx, msgs...)
	}))
}

// traced begins a transaction whose statements are kept.
func traced(t *testing.T, config *pgx.ConnConfig) (tx pgx.Tx, statements *[]string) {
	t.Helper()
	statements = &[]string{}
	config.Tracer = pgtest.Statements(func(sql string) { *statements = append(*statements, sql) })
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	tx, err = conn.Begin(t.Context())
	require.NoError(t, err)
	*statements = nil
	return tx, statements
}

// newPool returns a pool with settings of the session.
func newPool(t *testing.T, address string, settings ...string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	config.MaxConns = 2
	for pair := range slices.Chunk(settings, 2) {
		config.ConnConfig.RuntimeParams[pair[0]] = pair[1]
	}
	return pgtest.PoolOf(t, config)
}

// waitUntilBlocked returns once a process waits for a lock.
func waitUntilBlocked(t *testing.T, pool *pgxpool.Pool, waiter uint32) {
	t.Helper()
	testwait.True(t, "the process waits for a lock", func() bool {
		return pgtest.Value[bool](t, pool, "SELECT cardinality(pg_blocking_pids($1)) > 0", int32(waiter))
	})
}
