package keys_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

var ana = operator.By{Who: "ana@ops", Why: "asked the bank"}

// key makes a key in a state: locked, free or put off (running), finished, over (finished, its
// window too), indeterminate or abandoned, or work (in one transaction, indeterminate). It is of
// scope t and operation charge, has done "reserve", and has asked for "secret".
func key(t *testing.T, pool *pgxpool.Pool, name, state string) keys.Place {
	t.Helper()
	exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, call, data, request, lock_token,
			locked_until, locked_by, attempts, error, retry_at, status, body, finished_at, expires_at, flow)
		SELECT 't', 'charge', $1, sha256('x'), CASE WHEN $2 IN ('locked', 'free', 'put off') THEN 'running' WHEN $2 = 'over' THEN 'finished' WHEN $2 = 'work' THEN 'indeterminate' ELSE $2 END,
			'{reserve}', CASE WHEN $2 = 'indeterminate' THEN 'pay' END, CASE WHEN $2 = 'indeterminate' THEN 'once' END, '{}', 'secret', 7,
			CASE $2 WHEN 'locked' THEN clock_timestamp() + interval '1 hour' WHEN 'free' THEN clock_timestamp() - interval '1 second' END,
			'worker-1', 3, CASE WHEN $2 NOT IN ('finished', 'over') THEN 'timeout' END,
			CASE $2 WHEN 'put off' THEN clock_timestamp() + interval '1 hour' END,
			CASE WHEN $2 IN ('finished', 'over') THEN 201 END, CASE WHEN $2 IN ('finished', 'over') THEN 'done'::bytea END,
			CASE WHEN $2 IN ('finished', 'over') THEN clock_timestamp() END,
			CASE $2 WHEN 'finished' THEN clock_timestamp() + interval '1 hour' WHEN 'over' THEN clock_timestamp() - interval '1 hour' END,
			CASE WHEN $2 <> 'work' THEN 'charge' END`, name, state)
	return keys.Place{Scope: "t", Operation: "charge", Key: name}
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

func scalar[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&v), sql)
	return v
}

// find returns the one key of a name.
func find(t *testing.T, pool *pgxpool.Pool, name string) keys.Row {
	t.Helper()
	rows, err := keys.Find(t.Context(), pool, schema, keys.Name{Key: name})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	return rows[0]
}

// charge is a flow of two phases: it reserves, which is an effect in the database, and pays, which
// is a foreign call.
func charge(t *testing.T, pool *pgxpool.Pool, cfg idempotency.Config, pay idempotency.Phase[struct{}]) *idempotency.Flow[struct{}] {
	t.Helper()
	cfg.Operation = "charge"
	op, err := idempotency.New(pool, cfg)
	require.NoError(t, err)
	pay.Name = "pay"
	pay.Write = func(_ context.Context, _ pgx.Tx, step *idempotency.Step[struct{}]) error {
		step.Finish(idempotency.Response{Status: 201, Body: []byte("paid")})
		return nil
	}
	flow, err := idempotency.NewFlow(op, idempotency.FlowConfig[struct{}]{StoreRequest: true}, idempotency.Phase[struct{}]{
		Name: "reserve",
		Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[struct{}]) error {
			_, err := tx.Exec(ctx, "INSERT INTO reserved (key) VALUES ($1)", step.Key.Value)
			return err
		},
	}, pay)
	require.NoError(t, err)
	return flow
}

const reservedSQL = "CREATE TABLE reserved (id bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL)"

var named = idempotency.Key{Scope: "t", Value: "k"}
