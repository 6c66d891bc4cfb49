package idempotency_test

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
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
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET created_at = created_at - $1::interval, retry_at = retry_at - $1::interval, phase_since = phase_since - $1::interval, retried_at = retried_at - $1::interval`, d)
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

// Property: an operation has one flow in a program. Flows of other programs for the same operation,
// with other names, do not touch each other's keys, even before a phase is done: neither client,
// completer nor reconciler does. A key of a release that stored no name belongs to any flow. Row
// H17.
func TestFlowsLeaveEachOthersKeysAlone(t *testing.T) {
	t.Parallel()
	ctx, pool, away, asked := t.Context(), newPool(t), errAway, 0
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
	_, err := charges.Do(ctx, key("k"), []byte("100"))
	require.ErrorIs(t, err, errAway)
	passes(t, pool, time.Hour)
	finished, err := refunds.Complete(ctx)
	require.NoError(t, err)
	require.Zero(t, finished)
	_, err = refunds.Do(ctx, key("k"), []byte("100"))
	require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
	require.ErrorContains(t, err, `of flow "order", and not of "refunds"`)

	away = idempotency.Indeterminate(errAway)
	_, err = charges.Do(ctx, key("k"), []byte("100"))
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	passes(t, pool, time.Hour)
	decided, err := refunds.Reconcile(ctx)
	require.NoError(t, err)
	require.Zero(t, decided+asked)
	decided, err = charges.Reconcile(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, decided)
	require.Zero(t, count(t, pool, `SELECT count(*) FROM effects`))

	_, err = pool.Exec(ctx, `UPDATE effectonce.idempotency_keys SET flow = NULL`)
	require.NoError(t, err)
	finished, err = refunds.Complete(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, finished)
	require.Equal(t, 1, effects(t, pool, "refund"))
}

// Property: a key whose phases are unknown is postponed by its age, at least by RetryAfter, also
// when no attempt is counted because a person or a reconciler returned it. Row H17 of
// guarantees.md.
func TestUnknownPhasesOfAKeyThatWasGivenBack(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]time.Duration{0: 5 * time.Second, time.Minute: time.Minute, 30 * 24 * time.Hour: 500 * time.Second} {
		pool := newPool(t)
		older, _, _ := deployed(t, pool, nil)
		_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET attempts = 0, retry_at = NULL, created_at = clock_timestamp() - $1::interval`, age)
		require.NoError(t, err)
		_, err = older.Complete(t.Context())
		require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
		var off time.Duration
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT retry_at - clock_timestamp() FROM effectonce.idempotency_keys`).Scan(&off))
		assert.InDelta(t, want.Seconds(), off.Seconds(), 4, age)
	}
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
			phase := ends(name)
			if name == "ship" {
				phase = calls(true, func(*step) error { return errAway })
				phase.Name = name
			} else if name != "book" {
				phase.Write = func(context.Context, pgx.Tx, *step) error { return nil }
			}
			phases = append(phases, phase)
		}
		return newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, phases)
	}
	newer := program("reserve", "charge", "ship", "book")
	_, err := newer.Do(t.Context(), key("k"), nil)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	const undecided = `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'indeterminate' AND phases = '{reserve,charge}' AND error LIKE '%bank is away'`
	for name, older := range map[string]*idempotency.Flow[payment]{
		"without it": program("reserve", "charge"), "another one there": program("reserve", "charge", "book"), "others before it": program("begin", "charge", "ship"),
		"later": program("reserve", "charge", "check", "ship"),
	} {
		for _, calling := range []string{`'ship'`, `NULL`} {
			if calling == `NULL` && name != "without it" && name != "others before it" {
				continue // only the phases that are done show which one is in doubt
			}
			passes(t, pool, time.Hour)
			_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET calling = `+calling)
			require.NoError(t, err)
			decided, err := older.Reconcile(t.Context())
			require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint, name)
			require.Zero(t, decided, name)
			_, err = older.Reconcile(t.Context())
			require.NoError(t, err, "it is put off")
			require.Empty(t, asked, name)
			require.Equal(t, 1, count(t, pool, undecided), name)
		}
	}
	passes(t, pool, time.Hour)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET calling = 'ship'`)
	require.NoError(t, err)
	decided, err := newer.Reconcile(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, decided)
	require.Equal(t, []string{"ship"}, asked)
}

// meanwhile runs a function when a line is logged.
type meanwhile struct {
	slog.Handler

	do func()
}

func (m meanwhile) Handle(context.Context, slog.Record) error {
	m.do()
	return nil
}

// Property: a key that another worker holds again when it is postponed is left to that worker. Row
// H17.
func TestUnknownPhasesOfAKeyThatIsHeldAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	const renewed = `UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp() + interval '1 hour', retry_at = NULL, error = NULL`
	older, _, _ := deployed(t, pool, slog.New(meanwhile{slog.NewTextHandler(io.Discard, nil), func() {
		_, err := pool.Exec(t.Context(), renewed)
		assert.NoError(t, err)
	}}))
	passes(t, pool, time.Minute)
	_, err := older.Complete(t.Context())
	require.ErrorIs(t, err, idempotency.ErrUnknownRecoveryPoint)
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE locked_until > clock_timestamp() AND retry_at IS NULL AND error IS NULL`))
}

// Property: a takeover stores what the release that claimed the key did not: the name of the flow,
// which keeps other flows away from then on, and the request, with which the completer finishes it.
func TestTakeoverStoresWhatIsMissing(t *testing.T) {
	t.Parallel()
	for name, seal := range map[string]bool{"plain": false, "sealed": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, away := newPool(t), errAway
			cfg := idempotency.Config{}
			if seal {
				sealer, err := idempotency.NewAESSealer(map[string][]byte{"1": []byte("0123456789abcdef0123456789ABCDEF")}, "1")
				require.NoError(t, err)
				cfg.Seal = sealer
			}
			phases := func(asked *string) []idempotency.Phase[payment] {
				return []idempotency.Phase[payment]{calls(false, func(s *step) error { *asked = string(s.Request); return away }), ends("ship")}
			}
			var before, behind string
			earlier := newFlow(t, newOperation(t, pool, cfg), idempotency.FlowConfig[payment]{}, phases(&before))
			_, err := earlier.Do(t.Context(), key("k"), []byte("100"))
			require.ErrorIs(t, err, errAway)
			_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET flow = NULL`)
			require.NoError(t, err)
			flow := newFlow(t, newOperation(t, pool, cfg), idempotency.FlowConfig[payment]{StoreRequest: true, RetryAfter: time.Second}, phases(&behind))
			_, err = flow.Do(t.Context(), key("k"), []byte("100"))
			require.ErrorIs(t, err, errAway)
			require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE flow = 'order'`))
			passes(t, pool, time.Hour)
			away, behind = nil, ""
			finished, err := flow.Complete(t.Context())
			require.NoError(t, err)
			require.Equal(t, []any{1, "100"}, []any{finished, behind})
		})
	}
}
