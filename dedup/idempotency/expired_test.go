package idempotency_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: a client that retries after the window gets the expired outcome only if no foreign
// system was called again; if one may have acted twice, a person decides. Row H33 of guarantees.md.
func TestExpiredBehindACallIsInDoubt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		inserts string // the phase that inserts under its child ID
		state   string
		asked   int
	}{
		"in front of the call": {"reserve", "finished", 1},
		"with the call":        {"charge", "indeterminate", 2},
		"behind the call":      {"ship", "indeterminate", 2},
	} {
		bothModes(t, name+", at most once", func(t *testing.T, once bool) {
			t.Helper()
			pool := newPool(t)
			_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id uuid PRIMARY KEY)`)
			require.NoError(t, err)
			write := func(phase string) func(ctx context.Context, tx pgx.Tx, s *step) error {
				return func(ctx context.Context, tx pgx.Tx, s *step) error {
					if phase == "ship" {
						s.Finish(idempotency.Response{Status: 201})
					}
					if phase != c.inserts {
						return nil
					}
					_, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1)`, s.ChildID())
					return err
				}
			}
			asked := 0
			flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
				{Name: "reserve", Write: write("reserve")},
				{Name: "charge", AtMostOnce: once, Call: func(context.Context, *step) error { asked++; return nil }, Write: write("charge")},
				{Name: "ship", Write: write("ship")},
			})
			_, err = flow.Do(t.Context(), key("k"), nil)
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys`) // the window is over
			require.NoError(t, err)
			response, err := flow.Do(t.Context(), key("k"), nil)
			require.Equal(t, c.asked, asked)
			require.Equal(t, c.state, stateOf(t, pool, "k"))
			if c.state == "finished" {
				require.NoError(t, err)
				require.Equal(t, 410, response.Status)
			} else {
				require.ErrorIs(t, err, idempotency.ErrIndeterminate)
			}
		})
	}
}

// Property: of two holders of one token, after a failover that lost a claim, the one that finds its
// phase done by the other stores no outcome: it has lost its lock.
func TestRowOfTheOtherHolderIsNoEarlierExecution(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id uuid PRIMARY KEY)`)
	require.NoError(t, err)
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
			if _, err := pool.Exec(ctx, `WITH other AS (INSERT INTO orders VALUES ($1)) SELECT effectonce.advance_key('tenant', 'order', 'k', 1, 'reserve', '{}')`, s.ChildID()); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `INSERT INTO orders VALUES ($1)`, s.ChildID())
			return err
		}}, ends("ship"),
	})
	_, err = flow.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, idempotency.ErrLockLost)
	require.Equal(t, "running", stateOf(t, pool, "k"))
}
