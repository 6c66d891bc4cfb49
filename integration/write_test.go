package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
)

// writers is a workload of transactions that lock a key, raise its version and publish it.
type writers struct {
	goroutines, transactions, keys int
	topic                          string
	seed                           uint64
	pauses                         bool // inside transactions, with savepoints: the order of commits is not that of ids
}

var errRollback = errors.New("rolled back on purpose")

// run is write in a test that waits for it.
func (w writers) run(ctx context.Context, t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, w.write(ctx, pool))
}

// write returns when all transactions are committed; one in ten is rolled back and not repeated.
func (w writers) write(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `INSERT INTO versions SELECT 'k' || n, 0 FROM generate_series(0, $1 - 1) n ON CONFLICT DO NOTHING`, w.keys)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for g := range w.goroutines {
		random := rand.New(rand.NewPCG(w.seed, uint64(g)))
		group.Go(func() error {
			for range w.transactions / w.goroutines {
				err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return w.one(ctx, tx, random) })
				if err != nil && !errors.Is(err, errRollback) {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// one transaction. With pauses it gets its transaction id early or late, waits with and without the
// key's lock and rolls savepoints back, so that neither transaction ids nor seqs are in commit
// order.
func (w writers) one(ctx context.Context, tx pgx.Tx, random *rand.Rand) error {
	if w.pauses && random.IntN(2) == 0 {
		if _, err := tx.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
			return err
		}
		if err := w.pause(ctx, tx, random); err != nil {
			return err
		}
	}
	e := event{Key: fmt.Sprintf("k%d", random.IntN(w.keys))}
	if err := tx.QueryRow(ctx, `UPDATE versions SET version = version + 1 WHERE key = $1 RETURNING version`, e.Key).Scan(&e.Version); err != nil {
		return err
	}
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	message := outbox.Message{Topic: w.topic, Key: []byte(e.Key), Payload: body}
	if w.pauses && random.IntN(4) == 0 {
		// Published inside a savepoint that is rolled back, and again.
		err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
			if err := outbox.Publish(ctx, nested, message); err != nil {
				return err
			}
			return errRollback
		})
		if !errors.Is(err, errRollback) {
			return err
		}
	}
	if err := outbox.Publish(ctx, tx, message); err != nil {
		return err
	}
	if w.pauses && random.IntN(4) == 0 {
		if err := w.pause(ctx, tx, random); err != nil {
			return err
		}
	}
	if random.IntN(10) == 0 {
		return errRollback
	}
	return nil
}

// pause keeps the transaction open: the database waits, so no sleep of the test hides anything.
func (w writers) pause(ctx context.Context, tx pgx.Tx, random *rand.Rand) error {
	_, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, random.Float64()*0.03)
	return err
}

// eventually waits for a condition, and fails the test with its last answer.
func eventually(t *testing.T, what string, condition func() (bool, any)) {
	t.Helper()
	testwait.For(t, what, func() (any, bool) {
		ok, last := condition()
		return last, ok
	})
}

// count runs a query that returns one number.
func count(ctx context.Context, t *testing.T, pool *pgxpool.Pool, sql string) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(ctx, sql).Scan(&n))
	return n
}
