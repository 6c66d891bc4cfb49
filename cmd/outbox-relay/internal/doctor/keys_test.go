package doctor_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Each kind of problem with requests is found alone, with its remedy. A request that is running, or
// finished within its window, is none.
func TestRequestsThatNobodyEnds(t *testing.T) {
	t.Parallel()
	const insert = `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, created_at, locked_until, retry_at, expires_at)
		VALUES ('t', 'charge', 'k', sha256('x'), $1, now() - interval '3 hours', now() + $2::interval, now() + $3::interval, now() + $4::interval)`
	conn := connect(t, pgtest.Database(t))
	for name, c := range map[string]struct {
		values []any
		want   string // empty: all is well
		remedy string
	}{
		"indeterminate":                 {[]any{"indeterminate", nil, nil, nil}, "1 requests are indeterminate", "outbox-relay keys list --state indeterminate"},
		"abandoned":                     {[]any{"abandoned", nil, nil, nil}, "1 requests are abandoned", "outbox-relay keys list --state abandoned"},
		"stuck":                         {[]any{"running", "-61 min", nil, nil}, "no process has worked on them for 1h", "outbox-relay keys list --state stuck --older-than 1h"},
		"never locked":                  {[]any{"running", nil, nil, nil}, "no process has worked on them", "--state stuck"},
		"over":                          {[]any{"finished", nil, nil, "-2 hours"}, "whose window ended 2h", "outbox-relay keys reap"},
		"locked":                        {[]any{"running", "1 min", nil, nil}, "", ""},
		"its lock has just ended":       {[]any{"running", "-1 min", nil, nil}, "", ""},
		"put off for hours":             {[]any{"running", nil, "1 min", nil}, "are postponed repeatedly", "keys list --state running --older-than 1h"},
		"counts failures":               {[]any{"running", nil, "20 hours", "20 hours"}, "", ""},
		"a count that is not forgotten": {[]any{"running", nil, "-2 hours", "-2 hours"}, "no process has worked on them", "--state stuck"},
		"over for a moment":             {[]any{"finished", nil, nil, "-1 min"}, "", ""},
		"within its window":             {[]any{"finished", nil, nil, "1 hour"}, "", ""},
		"finished, never forgotten":     {[]any{"finished", nil, nil, nil}, "", ""},
	} {
		exec(t, conn, "TRUNCATE effectonce.idempotency_keys")
		exec(t, conn, insert, c.values...)
		f := only(t, doctor.IdempotencyKeys(t.Context(), conn, "effectonce"))
		if c.want == "" {
			assert.Equal(t, doctor.OK, f.Severity, "%s: %s", name, f.Message)
			continue
		}
		assert.Equal(t, doctor.Warn, f.Severity, name)
		assert.Contains(t, f.Message, c.want, name)
		assert.Contains(t, f.Remedy, c.remedy, name)
	}
}

// Counting keys reads the partial indexes, and none of a million finished ones; each kind is
// counted up to its limit.
func TestKeysAreCountedThroughTheirIndexes(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, expires_at)
		SELECT 't', 'charge', n::text, sha256('x'), CASE WHEN n <= 10010 THEN 'indeterminate' WHEN n <= 10020 THEN 'running' ELSE 'finished' END,
			CASE WHEN n > 10020 THEN clock_timestamp() + interval '1 day' END FROM generate_series(1, 30000) n`)
	exec(t, conn, "ANALYZE effectonce.idempotency_keys")
	k, err := doctor.ReadKeys(t.Context(), conn, "effectonce")
	require.NoError(t, err)
	assert.Equal(t, int64(doctor.KeysMax), k.Indeterminate)
	assert.Equal(t, int64(10), k.Running)
	assert.Contains(t, only(t, doctor.IdempotencyKeys(t.Context(), conn, "effectonce")).Message, "10000 or more requests")
	plan := pgtest.Plan(t, conn, doctor.KeysSQL, doctor.KeysMax, "1 hour")
	assert.NotContains(t, plan, "Seq Scan")
	for _, index := range []string{"unfinished", "undecided", "expiry"} {
		assert.Contains(t, plan, "idempotency_keys_"+index)
	}
}
