package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// committed is work that commits by itself.
func committed(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
	err := effect(ctx, tx, "k")
	if err == nil {
		_, err = tx.Conn().Exec(ctx, "COMMIT")
	}
	return idempotency.Response{Status: 201}, err
}

// Property: a key whose work committed by itself is marked for a person as soon as the library sees
// it, in the list of keys that need a person; and no reaper forgets it, even if no request saw it
// before: the effect would be repeated. Row H16 of guarantees.md.
func TestWorkThatCommittedByItselfWaitsForAPerson(t *testing.T) {
	t.Parallel()
	const waiting = `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'indeterminate' AND expires_at IS NULL AND error LIKE '%of its own%'`
	unseen := `UPDATE effectonce.idempotency_keys SET state = 'finished', error = NULL, expires_at = clock_timestamp() + interval '1 hour'`
	pool := newPool(t)
	o := newOperation(t, pool, idempotency.Config{})
	_, err := o.Once(t.Context(), key("k"), committed)
	require.ErrorContains(t, err, "ended its transaction")
	require.Equal(t, 1, count(t, pool, waiting), "at once")

	_, err = pool.Exec(t.Context(), unseen) // the process died
	require.NoError(t, err)
	_, err = o.Once(t.Context(), key("k"), committed)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.Equal(t, 1, count(t, pool, waiting), "when it is asked for again")

	_, err = pool.Exec(t.Context(), unseen)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() - interval '1 hour'`)
	require.NoError(t, err)
	reaped, err := o.Reap(t.Context())
	require.NoError(t, err)
	require.Zero(t, reaped)
	require.Equal(t, 1, count(t, pool, waiting), "when its window is over")
	_, err = o.Once(t.Context(), key("k"), committed)
	require.ErrorIs(t, err, idempotency.ErrIndeterminate)
	require.Equal(t, 1, effects(t, pool, "k"))
}

// Property: keys that are left to a person do not keep a run from later keys, even if they fill its
// pages, and the log reports that they wait. Row H16 of guarantees.md.
func TestReapGoesOnBehindWhatItLeaves(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var log bytes.Buffer
	o := newOperation(t, pool, idempotency.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, status, expires_at)
		SELECT 't', 'order', n::text, sha256('x'), 'finished', CASE WHEN n > 5 THEN 201 END, clock_timestamp() - interval '1 hour' + n * interval '1 s' FROM generate_series(1, 10) n`)
	require.NoError(t, err)
	reaped, err := o.ReapBy(t.Context(), 2)
	require.NoError(t, err)
	require.EqualValues(t, 5, reaped)
	require.Equal(t, 5, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'indeterminate'`))
	require.Equal(t, 5, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`))
	require.Contains(t, log.String(), "keys need a person")
}

// Property: a row that only counts the failures of work in one transaction is forgotten after a day
// without another failure, and each failure restarts that day; the key of a flow is not forgotten,
// whatever its row contains. Row H16 of guarantees.md.
func TestCountsOfFailuresAreForgotten(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	o := newOperation(t, pool, idempotency.Config{AttemptsMax: 3})
	fail := func(value string) {
		_, err := o.Once(t.Context(), key(value), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{}, errors.Join(effect(ctx, tx, value), errAway)
		})
		require.ErrorIs(t, err, errAway)
	}
	reap := func() (reaped int64) {
		reaped, err := o.Reap(t.Context())
		require.NoError(t, err)
		return reaped
	}
	daysPass := func(hours int) {
		_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET retry_at = retry_at - make_interval(hours => $1),
			expires_at = expires_at - make_interval(hours => $1), created_at = created_at - make_interval(hours => $1)`, hours)
		require.NoError(t, err)
	}
	fail("given up")
	fail("tried again")
	b.refuse = 1
	flow := newFlow(t, o, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{paymentPhases(b.URL, false)[1]})
	_, err := flow.Do(t.Context(), key("flow"), nil)
	require.Error(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET expires_at = retry_at WHERE key = 'flow'`)
	require.NoError(t, err)
	require.Zero(t, reap(), "too early")
	daysPass(23)
	fail("tried again")
	require.Zero(t, reap(), "within the day")
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'tried again' AND least(retry_at, expires_at) > clock_timestamp() + interval '23 hours'`))
	daysPass(2)
	require.Equal(t, int64(1), reap())
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'tried again' AND attempts = 2`))
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'flow'`))
	daysPass(24 * 365)
	require.Equal(t, int64(1), reap())
	require.Equal(t, 1, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = 'flow'`))
	require.Zero(t, count(t, pool, `SELECT count(*) FROM effects`))
	response, err := o.Once(t.Context(), key("given up"), insertOnce("given up"))
	require.NoError(t, err)
	require.False(t, response.Replayed)
}
