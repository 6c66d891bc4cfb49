package idempotency_test

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// deployed leaves a flow behind that a newer program began: its second phase failed. It returns the
// flows of the older program, whose first phase has another name, and of the newer one.
func deployed(t *testing.T, pool *pgxpool.Pool, logger *slog.Logger) (older, newer *idempotency.Flow[payment], b *bank) {
	t.Helper()
	b = newBank(t)
	cfg := idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: 5 * time.Second}
	program := func() *idempotency.Operation {
		return newOperation(t, pool, idempotency.Config{AttemptsMax: 3, Logger: logger})
	}
	newer = newFlow(t, program(), cfg, paymentPhases(b.URL, false))
	phases := paymentPhases(b.URL, false)
	phases[0].Name = "begin"
	older = newFlow(t, program(), cfg, phases)
	b.refuse = 1
	_, err := newer.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, errAway)
	return older, newer, b
}

// passes makes time pass for all keys.
func passes(t *testing.T, pool *pgxpool.Pool, d time.Duration) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET created_at = created_at - $1::interval, retry_at = retry_at - $1::interval, phase_since = phase_since - $1::interval`, d)
	require.NoError(t, err)
}

// Property: a completer that does not know the phases that are done runs nothing, gives nothing up
// and uses up no attempts, however long it meets the key; it reports each time, and returns after
// pauses that grow up to a limit. A program that knows the phases continues. Row H17 of
// guarantees.md.
func TestUnknownPhasesWaitForTheirProgram(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	older, newer, b := deployed(t, pool, nil)
	passes(t, pool, time.Minute)
	looked, last := 0, time.Duration(0)
	for elapsed := time.Duration(0); elapsed < 2*time.Hour; {
		_, err := older.Complete(t.Context())
		require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
		finished, err := older.Complete(t.Context())
		require.NoError(t, err, "it is put off")
		require.Zero(t, finished)
		looked++
		var off time.Duration
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT retry_at - clock_timestamp() FROM effectonce.idempotency_keys WHERE state = 'running' AND attempts = 1
			AND error LIKE '%["reserve"]%' AND locked_until IS NULL AND phases = '{reserve}'`).Scan(&off))
		require.Greater(t, off, last-5*time.Second)
		require.LessOrEqual(t, off, 500*time.Second, "a hundred times RetryAfter")
		passes(t, pool, off)
		elapsed, last = elapsed+off, off
	}
	require.Less(t, looked, 25, "not every five seconds")
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effects`))
	_, err := older.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
	finished, err := newer.Complete(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, finished)
	requirePaidOnce(t, pool, b)
}

// Property: a program that does not know the phase in doubt decides nothing about it: its
// reconciler is not called, the key is postponed, and a program that knows the phase decides. Row
// H17.
func TestDoubtWaitsForAProgramThatKnowsItsPhase(t *testing.T) {
	t.Parallel()
	pool, asked := newPool(t), []string(nil)
	cfg := idempotency.FlowConfig[payment]{Reconcile: func(_ context.Context, undecided idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
		asked = append(asked, undecided.Phase)
		return idempotency.DidNotHappen(), nil
	}}
	program := func(names ...string) *idempotency.Flow[payment] {
		var phases []idempotency.Phase[payment]
		for _, name := range names {
			phase := calls(true, func(*step) error { return errAway })
			if phase.Name = name; name != "ship" {
				phase = idempotency.Phase[payment]{Name: name, Write: func(context.Context, pgx.Tx, *step) error { return nil }}
			}
			phases = append(phases, phase)
		}
		return newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases)
	}
	newer := program("reserve", "charge", "ship", "book")
	_, err := newer.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	for _, calling := range []string{`NULL`, `'ship'`} { // where it is not stored, the phases that are done show which one is in doubt
		_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET calling = `+calling)
		require.NoError(t, err)
		for _, older := range []*idempotency.Flow[payment]{program("reserve", "charge"), program("begin", "charge", "ship")} {
			passes(t, pool, time.Hour)
			decided, err := older.Reconcile(t.Context())
			require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
			require.Zero(t, decided)
			_, err = older.Reconcile(t.Context())
			require.NoError(t, err, "it is put off")
		}
	}
	require.Empty(t, asked)
	require.Equal(t, "indeterminate", stateOf(t, pool, "k"))
	passes(t, pool, time.Hour)
	decided, err := newer.Reconcile(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, decided)
	require.Equal(t, []string{"ship"}, asked)
}

// Property: the documented comparison with a provider's list finds what is only here, only there,
// or not known here, and nothing else, whatever is in a key's name. Row H5 of guarantees.md.
func TestDocumentedComparison(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/how-to/http-keys.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Comparing requests with a provider's list\n")
	require.True(t, found)
	_, sql, found := strings.Cut(section, "```sql\n")
	require.True(t, found)
	sql, _, _ = strings.Cut(sql, ";\n```")

	pool := pgtest.PoolWith(t, `CREATE TABLE effects (name text); CREATE TABLE provider (reference uuid); INSERT INTO provider VALUES (gen_random_uuid())`)
	op, err := idempotency.New(pool, idempotency.Config{Operation: "create-order"})
	require.NoError(t, err)
	flow := newFlow(t, op, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{calls(false, func(s *step) error {
		if s.Key.Value == "did not act" {
			return nil
		}
		_, err := pool.Exec(t.Context(), `INSERT INTO provider VALUES ($1)`, s.ChildID())
		if s.Key.Value == "acted, not done here" {
			err = idempotency.Indeterminate(errAway)
		}
		return err
	}), ends("ship")})
	for _, value := range []string{"agrees", "Ümläut 'x'", "did not act", "acted, not done here"} {
		_, err := flow.Do(t.Context(), key(value), nil)
		require.Equal(t, value == "acted, not done here", err != nil)
	}
	rows, err := pool.Query(t.Context(), `SELECT provider || '/' || coalesce(key, provider) || '/' || coalesce(state, 'none') FROM (`+sql+`) q ORDER BY 1`)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"acted for no key/acted for no key/none", "acted, not done here/acted, not done here/indeterminate", "did not act/did not act/finished"}, got)
}

// Property: an operation has one flow in a program. Flows of other programs for the same operation,
// with other names, do not touch each other's keys, even before a phase is done: neither client,
// completer nor reconciler does. Row H17.
func TestFlowsLeaveEachOthersKeysAlone(t *testing.T) {
	t.Parallel()
	pool, away, asked := newPool(t), errAway, 0
	program := func(name string, phases ...idempotency.Phase[payment]) *idempotency.Flow[payment] {
		op := newOperation(t, pool, idempotency.Config{})
		cfg := idempotency.FlowConfig[payment]{Name: name, StoreRequest: true, RetryAfter: time.Second, Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			asked++
			return idempotency.DidNotHappen(), nil
		}}
		flow := newFlow(t, op, cfg, phases)
		_, err := idempotency.NewFlow(op, cfg, phases...)
		require.ErrorContains(t, err, `operation "order" has a flow already`)
		return flow
	}
	charges := program("", calls(false, func(*step) error { return away }), ends("ship"))
	refunds := program("refunds", ends("refund"))
	finishes := func(want int, run func(context.Context) (int, error)) {
		passes(t, pool, time.Hour)
		n, err := run(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	_, err := charges.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, errAway)
	finishes(0, refunds.Complete)
	_, err = refunds.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
	require.ErrorContains(t, err, `of flow "order", and not of "refunds"`)
	away = idempotency.Indeterminate(errAway)
	_, err = charges.Do(t.Context(), key("k"), []byte("100"))
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	finishes(0, refunds.Reconcile)
	require.Zero(t, asked)
	finishes(1, charges.Reconcile)
	require.Zero(t, effects(t, pool, "refund"))
}
