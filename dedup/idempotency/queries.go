package idempotency

import "github.com/effectonce/effectonce/migrations"

// settingsSQL makes a transaction safe whatever the defaults of the role are: see consumer.settings. A value is only set
// where it has to be: each costs the server as much as a look at a row.
const settingsSQL = `-- idempotency.settings
SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true), set_config('idle_in_transaction_session_timeout', $3, true),
  CASE WHEN current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN set_config('synchronous_commit', 'on', true) END`

// The state of a key that is found by its name. Written so that the planner takes the primary key: where few keys are
// unfinished, or the table was empty when the plan was made, a partial index of all of them looks cheaper.
const (
	isRunning       = `coalesce(state, '') = 'running'`
	isFinished      = `coalesce(state, '') = 'finished'`
	isIndeterminate = `coalesce(state, '') = 'indeterminate'`
)

// found are the columns of a key that exists.
const found = `state, fingerprint, phases, calling, data, request, lock_token, locked_until > clock_timestamp(),
  coalesce(extract(epoch FROM locked_until - clock_timestamp()), 0)::float8, attempts, status, headers, body, body_dropped, sealed, finished_at IS NULL AND status IS NULL,
  coalesce(extract(epoch FROM retry_at - clock_timestamp()), 0)::float8, flow
FROM effectonce.idempotency_keys WHERE scope = $1 AND operation = $2 AND key = $3`

// lookSQL is what the completer, and whoever only wants the outcome, ask.
const lookSQL = `-- idempotency.look
SELECT ` + found

// reapSQL forgets finished keys whose window is over, and counts of failures that nobody added to for a day: those rows have
// no effect, since nobody ever took them: a flow's have locked_by from the start, and a takeover by one makes lock_token grow.
// Where work committed by itself, its effect is there and its outcome is not: that is left to a person. Rows that somebody else
// works on are left to them. It says how many were forgotten, and how many are left to a person: both fill a page.
const reapSQL = `-- idempotency.reap
WITH old AS (
  SELECT scope, operation, key, finished_at IS NULL AND status IS NULL AS unanswered FROM effectonce.idempotency_keys
  WHERE state = 'finished' AND expires_at <= (SELECT clock_timestamp()) ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
), counts AS (
  SELECT scope, operation, key, false FROM effectonce.idempotency_keys
  WHERE state = 'running' AND coalesce(retry_at, created_at) <= (SELECT clock_timestamp()) AND expires_at <= (SELECT clock_timestamp())
    AND phases = '{}' AND calling IS NULL AND request IS NULL AND data IS NULL AND lock_token = 1 AND locked_by IS NULL AND locked_until IS NULL
  ORDER BY coalesce(retry_at, created_at) LIMIT $1 FOR UPDATE SKIP LOCKED
), doubted AS (
  UPDATE effectonce.idempotency_keys k SET state = 'indeterminate', expires_at = NULL, locked_by = NULL, error = '` + unansweredText + `'
  FROM old WHERE k.scope = old.scope AND k.operation = old.operation AND k.key = old.key AND old.unanswered RETURNING true
), forgotten AS (
  DELETE FROM effectonce.idempotency_keys k USING (SELECT * FROM old UNION ALL SELECT * FROM counts) gone
  WHERE k.scope = gone.scope AND k.operation = gone.operation AND k.key = gone.key AND NOT gone.unanswered RETURNING true
)
SELECT (SELECT count(*) FROM forgotten), (SELECT count(*) FROM doubted)`

// unansweredSQL hands a key to people whose work committed by itself.
const unansweredSQL = `-- idempotency.unanswered
UPDATE effectonce.idempotency_keys SET state = 'indeterminate', expires_at = NULL, locked_by = NULL, error = '` + unansweredText + `'
WHERE scope = $1 AND operation = $2 AND key = $3 AND ` + isFinished + ` AND finished_at IS NULL AND status IS NULL`

const unansweredText = "its work committed by a statement of its own, and left no outcome"

// storedSQL counts the keys of a scope, as far as it has to, by the primary key.
const storedSQL = `-- idempotency.stored
SELECT count(*) FROM (SELECT FROM effectonce.idempotency_keys WHERE scope = $1 AND operation = $2 LIMIT $3) k`

type queries struct {
	settings, look, stored, unanswered, reap string
	work                                     workQueries
	flow                                     flowQueries
}

func newQueries(schema string) queries {
	in := func(sql string) string { return migrations.InSchema(sql, schema) }
	return queries{
		settings: settingsSQL, look: in(lookSQL), stored: in(storedSQL), unanswered: in(unansweredSQL), reap: in(reapSQL),
		work: newWorkQueries(in), flow: newFlowQueries(in),
	}
}
