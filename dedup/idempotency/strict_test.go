package idempotency_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: a failure that shows only at COMMIT is a failure of the work: it is stored with Strict,
// and counted with AttemptsMax. Row H20 of guarantees.md.
func TestFailureAtCommitIsOfTheWork(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE owned (id bigint REFERENCES effectonce.consumers DEFERRABLE INITIALLY DEFERRED)`)
	require.NoError(t, err)
	for value, cfg := range map[string]idempotency.Config{"strict": {Strict: true}, "bounded": {AttemptsMax: 2}} {
		o, ran := newOperation(t, pool, cfg), 0
		ask := func() (idempotency.Response, error) {
			return o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				ran++
				_, err := tx.Exec(ctx, `INSERT INTO owned VALUES (4711)`)
				return idempotency.Response{Status: 201}, err
			})
		}
		if value == "bounded" {
			_, err = ask()
			var refusal *pgconn.PgError
			require.ErrorAs(t, err, &refusal)
			require.Equal(t, "23503", refusal.Code)
		}
		for replayed, runs := range []int{1 + cfg.AttemptsMax/2, 1 + cfg.AttemptsMax/2} {
			response, err := ask()
			require.NoError(t, err, value)
			require.Equal(t, 500, response.Status)
			require.Equal(t, replayed == 1, response.Replayed)
			require.Equal(t, runs, ran)
		}
	}
	require.Zero(t, count(t, pool, `SELECT count(*) FROM owned`))
}

// Property: a database that fails during the work does not decide about the request: it is no
// outcome, neither of work in one transaction nor of a phase. Row H18 of guarantees.md.
func TestOutageIsNoOutcome(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, fail := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"connection": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return errors.New("hidden by the handler: " + err.Error())
		},
		"resources": func(context.Context, pgx.Tx) error { return &pgconn.PgError{Code: "53100"} },
	} {
		away := true
		work := func(ctx context.Context, tx pgx.Tx) error {
			if away {
				return fail(ctx, tx)
			}
			return effect(ctx, tx, name)
		}
		for kind, cfg := range map[string]idempotency.Config{"strict": {Strict: true}, "bounded": {AttemptsMax: 1}} {
			away = true
			o, value := newOperation(t, pool, cfg), name+kind
			once := func() (idempotency.Response, error) {
				return o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					return idempotency.Response{Status: 201}, work(ctx, tx)
				})
			}
			flow := newFlow(t, newOperation(t, pool, idempotency.Config{Strict: cfg.Strict}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "all", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
				s.Finish(idempotency.Response{Status: 201})
				return work(ctx, tx)
			}}})
			_, err := once()
			require.Error(t, err, value)
			_, err = flow.Do(t.Context(), key("flow "+value), nil)
			require.Error(t, err, value)
			away = false
			response, err := once()
			require.NoError(t, err, value)
			require.Equal(t, idempotency.Response{Status: 201}, response)
			response, err = flow.Do(t.Context(), key("flow "+value), nil)
			require.NoError(t, err, value)
			require.Equal(t, idempotency.Response{Status: 201}, response)
		}
	}
}

// Property: a request that may wait as long as its statements may take gets ErrInProgress, and not
// a failure of the database. Row H7 of guarantees.md.
func TestWaitAsLongAsAStatement(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{StatementTimeout: 2 * time.Second, WaitMax: 2 * time.Second})
	_, err := newOperation(t, pool, idempotency.Config{}).Once(t.Context(), key("k"), func(ctx context.Context, _ pgx.Tx) (idempotency.Response, error) {
		_, err := o.Once(ctx, key("k"), insertOnce("k"))
		require.ErrorIs(t, err, idempotency.ErrInProgress)
		return idempotency.Response{Status: 201}, nil
	})
	require.NoError(t, err)
}
