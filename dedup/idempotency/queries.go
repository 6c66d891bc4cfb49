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
  coalesce(extract(epoch FROM retry_at - clock_timestamp()), 0)::float8
FROM effectonce.idempotency_keys WHERE scope = $1 AND operation = $2 AND key = $3`

// fresh are the same columns of one that this statement made.
const fresh = `NULL::text, NULL::bytea, NULL::text[], NULL::text, NULL::bytea, NULL::bytea, lock_token, NULL::boolean,
  NULL::float8, NULL::integer, NULL::integer, NULL::jsonb, NULL::bytea, NULL::boolean, NULL::boolean, NULL::boolean, NULL::float8 FROM claimed`

// claimWorkSQL claims a key for work in one transaction, waiting for whoever has it. The row is finished from the start:
// nobody sees it before the work is done, and what the end of the work writes (the response) changes no indexed column.
const claimWorkSQL = `-- idempotency.claim_work
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, sealed, attempts, expires_at)
VALUES ($1::text, $2::text, $3::text, $7::bytea, 'finished', $4, 1, clock_timestamp() + $5::interval)
ON CONFLICT DO NOTHING RETURNING set_config('lock_timeout', $6, true) -- of the work`

// takeWorkSQL takes a key over whose earlier attempts failed, also from a flow: without locked_by no reconciler is asked about it.
const takeWorkSQL = `-- idempotency.take_work
UPDATE effectonce.idempotency_keys SET state = 'finished', lock_token = lock_token + 1, attempts = attempts + 1, error = NULL,
  retry_at = NULL, locked_by = NULL, sealed = $4, expires_at = clock_timestamp() + $5::interval
WHERE scope = $1 AND operation = $2 AND key = $3 AND ` + isRunning + ` AND lock_token = $7 AND fingerprint = $8
  AND (locked_until IS NULL OR locked_until <= clock_timestamp()) AND phases = '{}' AND calling IS NULL
RETURNING set_config('lock_timeout', $6, true)`

// respondSQL is the last statement of the work. Of the window of work that took long, at least a half is still to come. In
// another transaction than the one that claimed it divides by zero, so that the server skips the COMMIT behind it.
const respondSQL = `-- idempotency.respond
WITH stored AS (UPDATE effectonce.idempotency_keys SET status = $4::smallint, headers = $5, body = $6, body_dropped = $7, finished_at = clock_timestamp(),
  expires_at = CASE WHEN expires_at < clock_timestamp() + $8::interval / 2 THEN clock_timestamp() + $8::interval ELSE expires_at END
WHERE scope = $1 AND operation = $2 AND key = $3 AND ` + isFinished + ` AND finished_at IS NULL RETURNING 1)
SELECT 1 / count(*) FROM stored`

// guardSQL opens a cursor in the transaction of a phase that makes a COMMIT of the work's own fail, since the phase would be
// run again; closeGuardSQL takes it away: see consumer.guard. Work in one transaction does without: its key is
// committed with it, and found to have no outcome.
const guardSQL = `-- idempotency.guard
DECLARE ` + guardCursor + ` NO SCROLL CURSOR WITH HOLD FOR SELECT effectonce.refuse_commit()`

const (
	guardCursor   = "effectonce_guard"
	closeGuardSQL = "CLOSE " + guardCursor
)

// failedSQL counts an attempt of work whose transaction was rolled back, and with it the claim. It leaves alone what
// others have made of the key meanwhile. The count is forgotten after a day without another one; retry_at orders it behind what
// is due, and nothing waits for it. What a flow, or anybody else, has ever taken is never forgotten.
const failedSQL = `-- idempotency.failed
INSERT INTO effectonce.idempotency_keys AS k (scope, operation, key, fingerprint, state, sealed, attempts, error, retry_at, expires_at)
VALUES ($1::text, $2::text, $3::text, $4::bytea, 'running', $5, 1, $6, clock_timestamp() + interval '1 day', clock_timestamp() + interval '1 day')
ON CONFLICT (scope, operation, key) DO UPDATE SET attempts = k.attempts + 1, error = excluded.error, sealed = excluded.sealed,
    retry_at = CASE WHEN k.lock_token = 1 AND k.locked_by IS NULL THEN excluded.retry_at ELSE k.retry_at END,
    expires_at = CASE WHEN k.lock_token = 1 AND k.locked_by IS NULL THEN excluded.expires_at ELSE k.expires_at END
  WHERE k.state = 'running' AND k.phases = '{}' AND k.calling IS NULL
    AND k.fingerprint = excluded.fingerprint AND (k.locked_until IS NULL OR k.locked_until <= clock_timestamp())
RETURNING k.attempts`

// claimFlowSQL claims a key for work in phases.
const claimFlowSQL = `-- idempotency.claim_flow
WITH claimed AS (
  INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, sealed, attempts, locked_until, locked_by, request)
  VALUES ($1::text, $2::text, $3::text, $4::bytea, 'running', $5, 1, clock_timestamp() + $6::interval, $7, $8) ON CONFLICT DO NOTHING RETURNING lock_token)
SELECT ` + fresh + ` UNION ALL SELECT ` + found

// lookSQL is what the completer, and whoever only wants the outcome, ask.
const lookSQL = `-- idempotency.look
SELECT ` + found

// takeFlowSQL takes the lock of a key over that nobody holds: the token that was seen decides between two that try. A holder
// whose lock ran out has that token until then, and so may one whose claim a server lost: what the taker decided by, the
// request, what is done and what may be under way, is as it was seen, or no row; the rest is as it is now.
const takeFlowSQL = `-- idempotency.take_flow
UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1, attempts = attempts + 1,
  locked_until = clock_timestamp() + $5::interval, locked_by = $6, retry_at = NULL
WHERE scope = $1 AND operation = $2 AND key = $3 AND lock_token = $4 AND ` + isRunning + `
  AND (locked_until IS NULL OR locked_until <= clock_timestamp()) AND fingerprint = $7 AND phases = $8 AND calling IS NOT DISTINCT FROM $9
RETURNING data, request, sealed, attempts`

const renewSQL = `-- idempotency.renew
UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp() + $5::interval
WHERE scope = $1 AND operation = $2 AND key = $3 AND lock_token = $4 AND ` + isRunning + ` AND locked_until IS NOT NULL`

// unlockSQL takes the note of a call away that was not done, and of no other: one under the same token, where a server lost a claim,
// may be under way.
const unlockSQL = `-- idempotency.unlock
UPDATE effectonce.idempotency_keys SET locked_until = NULL, error = $5, retry_at = clock_timestamp() + $6::interval,
  calling = nullif(calling, $7)
WHERE scope = $1 AND operation = $2 AND key = $3 AND lock_token = $4 AND ` + isRunning

// leaveSQL puts a key off that nobody holds, for as long as it is old, at least $6 and at most a hundred times that: so the
// pause doubles each time, and a version that knows the key's phases finds no attempts used up. One in doubt keeps its error.
const leaveSQL = `-- idempotency.leave
UPDATE effectonce.idempotency_keys SET error = coalesce($5, error), retry_at = clock_timestamp() + least(greatest($6::interval, clock_timestamp() - created_at), 100 * $6::interval)
WHERE scope = $1 AND operation = $2 AND key = $3 AND lock_token = $4 AND state IN ('running', 'indeterminate')
  AND (locked_until IS NULL OR locked_until <= clock_timestamp())`

// callingSQL is written before a foreign call that must not be made twice, and not where the phase is done: see advance_key.
const callingSQL = `-- idempotency.calling
UPDATE effectonce.idempotency_keys SET calling = $5::text
WHERE scope = $1 AND operation = $2 AND key = $3 AND lock_token = $4 AND ` + isRunning + ` AND calling IS NULL AND $5 <> ALL (phases)`

// undecidedSQL hands a key to people, with the error of the last attempt.
const undecidedSQL = `-- idempotency.undecided
UPDATE effectonce.idempotency_keys SET state = $5::text, error = left(concat_ws('; then: ', error, $6::text), 2000), locked_until = NULL, retry_at = clock_timestamp() + nullif($7::interval, '0')
WHERE scope = $1 AND operation = $2 AND key = $3 AND lock_token = $4 AND ` + isRunning

// advanceSQL and finishSQL raise EO003 where the key is not the caller's any more.
const (
	advanceSQL = `-- idempotency.advance
SELECT effectonce.advance_key($1, $2, $3, $4, $5, $6)`
	finishSQL = `-- idempotency.finish
SELECT effectonce.finish_key($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`
)

// abandonedSQL finds unfinished keys that nobody works on. Those with a request can be driven on without their client.
const abandonedSQL = `-- idempotency.abandoned
SELECT scope, key, fingerprint FROM effectonce.idempotency_keys
WHERE state = 'running' AND operation = $1 AND request IS NOT NULL AND coalesce(retry_at, created_at) <= (SELECT clock_timestamp())
  AND (locked_until IS NULL OR locked_until <= clock_timestamp())
ORDER BY coalesce(retry_at, created_at) LIMIT $2`

// reapSQL forgets finished keys whose window is over, and counts of failures that nobody added to for a day: those rows have
// no effect, since nobody ever took them: a flow's have locked_by from the start, and each takeover makes lock_token grow.
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
  UPDATE effectonce.idempotency_keys k SET state = 'indeterminate', expires_at = NULL, error = '` + unansweredText + `'
  FROM old WHERE k.scope = old.scope AND k.operation = old.operation AND k.key = old.key AND old.unanswered RETURNING true
), forgotten AS (
  DELETE FROM effectonce.idempotency_keys k USING (SELECT * FROM old UNION ALL SELECT * FROM counts) gone
  WHERE k.scope = gone.scope AND k.operation = gone.operation AND k.key = gone.key AND NOT gone.unanswered RETURNING true
)
SELECT (SELECT count(*) FROM forgotten), (SELECT count(*) FROM doubted)`

// unansweredSQL hands a key to people whose work committed by itself.
const unansweredSQL = `-- idempotency.unanswered
UPDATE effectonce.idempotency_keys SET state = 'indeterminate', expires_at = NULL, error = '` + unansweredText + `'
WHERE scope = $1 AND operation = $2 AND key = $3 AND ` + isFinished + ` AND finished_at IS NULL AND status IS NULL`

const unansweredText = "its work committed by a statement of its own, and left no outcome"

// doubtSQL hands a key of work in one transaction to people: it is the caller's in this transaction.
const doubtSQL = `-- idempotency.doubt
UPDATE effectonce.idempotency_keys SET state = 'indeterminate', error = $4, expires_at = NULL
WHERE scope = $1 AND operation = $2 AND key = $3`

// undecidedKeysSQL is the work of a reconciler: keys of flows, which alone have locked_by. Work in one transaction is in doubt with
// effects that it committed by itself, or in another system: nothing that a flow knows, and it has no phase to go on at.
const undecidedKeysSQL = `-- idempotency.undecided_keys
SELECT scope, key, fingerprint, lock_token, phases, calling, data, request, sealed, error, created_at FROM effectonce.idempotency_keys
WHERE state = 'indeterminate' AND operation = $1 AND locked_by IS NOT NULL AND (retry_at IS NULL OR retry_at <= clock_timestamp()) AND (created_at, scope, key) > ($2, $3, $4) ORDER BY created_at, scope, key LIMIT $5`

// decidedSQL gives a key back to its phases.
const decidedSQL = `-- idempotency.decided
UPDATE effectonce.idempotency_keys SET state = 'running', lock_token = lock_token + 1, attempts = 0, calling = NULL, locked_until = NULL, retry_at = NULL, error = NULL
WHERE scope = $1 AND operation = $2 AND key = $3 AND lock_token = $4 AND ` + isIndeterminate

type queries struct {
	settings, claimWork, takeWork, respond, failed                                string
	claimFlow, look, takeFlow, renew, unlock, calling, undecided, advance, finish string
	abandoned, leave, guard, doubt, unanswered, reap, undecidedKeys, decided      string
}

func newQueries(schema string) queries {
	in := func(sql string) string { return migrations.InSchema(sql, schema) }
	return queries{
		settings:  settingsSQL,
		claimWork: in(claimWorkSQL), takeWork: in(takeWorkSQL), respond: in(respondSQL), failed: in(failedSQL),
		claimFlow: in(claimFlowSQL), look: in(lookSQL), takeFlow: in(takeFlowSQL), renew: in(renewSQL), unlock: in(unlockSQL),
		calling: in(callingSQL), undecided: in(undecidedSQL), advance: in(advanceSQL), finish: in(finishSQL),
		abandoned: in(abandonedSQL), leave: in(leaveSQL), guard: in(guardSQL), doubt: in(doubtSQL), unanswered: in(unansweredSQL),
		reap: in(reapSQL), undecidedKeys: in(undecidedKeysSQL), decided: in(decidedSQL),
	}
}
