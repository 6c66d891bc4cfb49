package idempotency

import (
	"github.com/effectonce/effectonce/internal/handlertx"
	"github.com/effectonce/effectonce/migrations"
)

// settingsSQL makes a transaction independent of the defaults of the role: see consumer.settings. A
// value is set only where necessary: each costs the server as much as reading a row.
const settingsSQL = `-- idempotency.settings
SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true), set_config('idle_in_transaction_session_timeout', $3, true),
  CASE WHEN pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN set_config('synchronous_commit', 'on', true) END,
  pg_catalog.current_setting('role')`

// The state of a key that is found by its name. They are written so that the planner uses the
// primary key: if few keys are unfinished, or the table was empty when the plan was made, a partial
// index over all unfinished keys looks cheaper.
const (
	isRunning       = `coalesce(state, '') OPERATOR(pg_catalog.=) 'running'`
	isFinished      = `coalesce(state, '') OPERATOR(pg_catalog.=) 'finished'`
	isIndeterminate = `coalesce(state, '') OPERATOR(pg_catalog.=) 'indeterminate'`
)

// lookSQL reads an existing key.
const lookSQL = `-- idempotency.look
SELECT state, fingerprint, phases, calling, data, request, lock_token, coalesce(locked_until > clock_timestamp(), false),
  coalesce(extract(epoch FROM locked_until - clock_timestamp()), 0)::float8, attempts, status, headers, body, body_dropped, sealed,
  coalesce(extract(epoch FROM retry_at - clock_timestamp()), 0)::float8, coalesce(flow::text, ''), coalesce(call::text, ''), extract(epoch FROM clock_timestamp() - coalesce(phase_since, created_at))::float8
FROM effectonce.idempotency_keys WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3`

// reapSQL forgets keys at their expires_at: finished ones, and running ones of which nothing happened.
// A running one of which something did, or may have, is left to a person. Locked rows are skipped. It
// returns how many rows were forgotten, and how many were left to a person: both count towards the page.
const reapSQL = `-- idempotency.reap
WITH old AS (
  SELECT scope, operation, key, state OPERATOR(pg_catalog.=) 'running' AND (pg_catalog.cardinality(phases) > 0 OR calling IS NOT NULL) AS begun
  FROM effectonce.idempotency_keys
  WHERE expires_at <= (SELECT clock_timestamp()) AND state::text IN ('finished', 'running') AND (locked_until IS NULL OR locked_until <= clock_timestamp())
  ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
), left_to_a_person AS (
  UPDATE effectonce.idempotency_keys k SET expires_at = NULL,
    state = CASE WHEN k.call OPERATOR(pg_catalog.=) 'once' THEN 'indeterminate' ELSE 'abandoned' END, error = left(pg_catalog.concat_ws('; then: ', error, 'no request came for long, and none is stored'), 2000)
  FROM old WHERE k.scope OPERATOR(pg_catalog.=) old.scope AND k.operation OPERATOR(pg_catalog.=) old.operation AND k.key OPERATOR(pg_catalog.=) old.key AND old.begun RETURNING true
), forgotten AS (
  DELETE FROM effectonce.idempotency_keys k USING old
  WHERE k.scope OPERATOR(pg_catalog.=) old.scope AND k.operation OPERATOR(pg_catalog.=) old.operation AND k.key OPERATOR(pg_catalog.=) old.key AND NOT old.begun RETURNING true
)
SELECT (SELECT count(*) FROM forgotten), (SELECT count(*) FROM left_to_a_person)`

const forgetScopeSQL = `-- idempotency.forget_scope
DELETE FROM effectonce.idempotency_keys k USING (
  SELECT operation, key FROM effectonce.idempotency_keys
  WHERE scope OPERATOR(pg_catalog.=) $1 AND state OPERATOR(pg_catalog.=) 'finished' LIMIT $2) gone
WHERE k.scope OPERATOR(pg_catalog.=) $1 AND k.operation OPERATOR(pg_catalog.=) gone.operation AND k.key OPERATOR(pg_catalog.=) gone.key`

// claimWorkSQL claims a key for work in one transaction, and waits for other claims. The row says
// finished from the start: no other transaction sees it before the work is done, and the update at
// the end of the work (the response) changes no indexed column.
const claimWorkSQL = `-- idempotency.claim_work
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, sealed, attempts, expires_at)
VALUES ($1::text, $2::text, $3::text, $7::bytea, 'finished', $4, 1, clock_timestamp() + $5::interval)
ON CONFLICT DO NOTHING RETURNING set_config('lock_timeout', $6, true) -- of the work`

// A savepoint separates the claim from the work, so that the transaction of the claim can store a
// verdict in place of the work's effects.
const (
	savepointSQL = `SAVEPOINT effectonce_work`
	undoSQL      = `ROLLBACK TO SAVEPOINT effectonce_work`
)

// respondSQL is the last statement of the work. If the work took long, at least half of the window
// still remains afterwards. In another transaction than the one that claimed the key it divides by
// zero, so that the server skips the COMMIT after it.
const respondSQL = `-- idempotency.respond
WITH stored AS (UPDATE effectonce.idempotency_keys SET status = $4::smallint, headers = $5, body = $6, body_dropped = $7, finished_at = clock_timestamp(),
  expires_at = CASE WHEN expires_at < clock_timestamp() + $8::interval / 2::float8 THEN clock_timestamp() + $8::interval ELSE expires_at END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND ` + isFinished + ` AND finished_at IS NULL RETURNING 1)
SELECT 1 / count(*) FROM stored`

// doubtSQL marks a key of work in one transaction for a person: the caller's transaction holds it, or lost
// it. It changes no row if another request has an outcome.
const doubtSQL = `-- idempotency.doubt
INSERT INTO effectonce.idempotency_keys AS k (scope, operation, key, fingerprint, state, sealed, attempts, error)
VALUES ($1::text, $2::text, $3::text, $4::bytea, 'indeterminate', $5, 1, $6)
ON CONFLICT (scope, operation, key) DO UPDATE SET state = 'indeterminate', error = excluded.error, expires_at = NULL
WHERE coalesce(k.state, '') OPERATOR(pg_catalog.<>) 'running' AND coalesce(k.state, '') OPERATOR(pg_catalog.<>) 'abandoned' AND k.finished_at IS NULL`

// newQueries returns each statement for a schema.
func newQueries(schema string) map[string]string {
	queries := map[string]string{}
	for _, sql := range []string{
		settingsSQL, handlertx.GuardSQL, lookSQL, forgetScopeSQL, claimWorkSQL, respondSQL, doubtSQL,
		claimFlowSQL, takeFlowSQL, renewSQL, unlockSQL, leaveSQL, callingSQL, undecidedSQL, advanceSQL, finishSQL,
		abandonedSQL, undecidedKeysSQL, decidedSQL, compareSQL,
	} {
		queries[sql] = migrations.InSchema(sql, schema)
	}
	return queries
}
