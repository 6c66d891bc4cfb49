package keys

// markSQL is what idempotency.Key.String has instead of the key.
const markSQL = `encode(substr(sha256('\x0000000000000004'::bytea || 'show'::bytea || int8send(octet_length(convert_to(k.key, 'UTF8'))::bigint)
  || convert_to(k.key, 'UTF8')), 1, 4), 'hex')`

// stuckSQL: it runs, nobody has it, and it is not put off.
const stuckSQL = `(k.state = 'running' AND (k.locked_until IS NULL OR k.locked_until <= clock_timestamp()) AND coalesce(k.retry_at, k.created_at) <= clock_timestamp())`

// unansweredSQL: its work committed by a statement of its own, and left no outcome. The library answers that it is
// indeterminate, and makes it so when it meets it.
const unansweredSQL = `(k.state = 'finished' AND k.finished_at IS NULL AND k.status IS NULL)`

// countsSQL: it has no effect, and counts the failures of work in one transaction until expires_at. Nobody
// ever took it: a flow has locked_by from the start, and a takeover by one makes lock_token grow.
const countsSQL = `(k.state = 'running' AND k.expires_at IS NOT NULL AND k.phases = '{}' AND k.calling IS NULL AND k.request IS NULL AND k.data IS NULL
  AND k.lock_token = 1 AND k.locked_by IS NULL AND k.locked_until IS NULL)`

const columns = `k.scope, k.operation, k.key, ` + markSQL + ` AS mark,
  CASE WHEN ` + unansweredSQL + ` THEN 'indeterminate' ELSE k.state END AS state, ` + unansweredSQL + ` AS unanswered, ` + countsSQL + ` AS counts, ` + stuckSQL + ` AS stuck, k.flow, k.phases, k.calling,
  k.state = 'running' AND coalesce(k.locked_until > clock_timestamp(), false) AS locked, k.locked_by, k.locked_until, k.lock_token,
  k.attempts, k.error, k.retry_at, k.status, k.body_dropped, k.sealed,
  octet_length(k.request)::bigint AS request_bytes, octet_length(k.data)::bigint AS data_bytes, octet_length(k.body)::bigint AS body_bytes,
  k.created_at, extract(epoch FROM clock_timestamp() - k.created_at)::float8 AS age, k.finished_at, k.expires_at
FROM effectonce.idempotency_keys k`

const filters = ` AND (NOT $2::bool OR ` + stuckSQL + `) AND ($3::text IS NULL OR k.scope = $3) AND ($4::text IS NULL OR k.operation = $4)
  AND ($5::interval IS NULL OR k.created_at <= clock_timestamp() - $5)
  AND ($6::timestamptz IS NULL OR (k.created_at, k.scope, k.operation, k.key) < ($6, $7::text, $8::text, $9::text))`

// listSQL: each branch is one state or two, so that what is not finished is found by the partial indexes.
const listSQL = `-- keys.list
SELECT * FROM (
  SELECT ` + columns + ` WHERE k.state = 'running' AND 'running' = ANY ($1::text[])` + filters + `
  UNION ALL
  SELECT ` + columns + ` WHERE k.state IN ('indeterminate', 'abandoned') AND k.state = ANY ($1::text[])` + filters + `
  UNION ALL
  SELECT ` + columns + ` WHERE k.state = 'finished' AND 'finished' = ANY ($1::text[])` + filters + `
) found ORDER BY created_at DESC, scope DESC, operation DESC, key DESC LIMIT $10`

const named = ` AND ($2::text IS NULL OR k.scope = $2) AND ($3::text IS NULL OR k.operation = $3)`

// findSQL looks for marks only where few rows are.
const findSQL = `-- keys.find
SELECT * FROM (
  SELECT ` + columns + ` WHERE k.key = $1::text` + named + `
  UNION ALL
  SELECT ` + columns + ` WHERE k.state = 'running' AND k.key <> $1 AND ` + markSQL + ` = $1` + named + `
  UNION ALL
  SELECT ` + columns + ` WHERE k.state IN ('indeterminate', 'abandoned') AND k.key <> $1 AND ` + markSQL + ` = $1` + named + `
) found ORDER BY created_at DESC, scope DESC, operation DESC LIMIT $4`

// detailSQL reads up to $4 bytes of what was asked and answered, and nothing that is encrypted: of a key that a person
// finished, request and data may be, whatever sealed says of the outcome.
const detailSQL = `-- keys.detail
SELECT encode(k.fingerprint, 'hex'), CASE jsonb_typeof(k.headers) WHEN 'object' THEN k.headers ELSE '{}' END::text,
  CASE WHEN NOT k.sealed AND k.state <> 'finished' THEN substring(k.request FROM 1 FOR $4::int) END,
  CASE WHEN NOT k.sealed AND k.state <> 'finished' THEN substring(k.data FROM 1 FOR $4::int) END,
  CASE WHEN NOT k.sealed THEN substring(k.body FROM 1 FOR $4::int) END
FROM effectonce.idempotency_keys k WHERE k.scope = $1 AND k.operation = $2 AND k.key = $3`

// actionsSQL: a key is written down by its hash, since actions are kept for ever and keys are not.
const actionsSQL = `-- keys.actions
SELECT id, who, what, why, "when", db_role, subject::text FROM effectonce.operator_actions
WHERE what LIKE 'key.%' AND subject->>'scope' = $1 AND subject->>'operation' = $2
  AND subject->>'key_sha256' = encode(sha256(convert_to($3::text, 'UTF8')), 'hex')
ORDER BY id DESC LIMIT $4`

const this = `WHERE k.scope = $1 AND k.operation = $2 AND k.key = $3`

// lockSQL: the transaction of a phase, or of work that is under way, is waited for, and then the row is looked at as it
// is.
const lockSQL = `-- keys.lock
SELECT ` + columns + ` ` + this + ` FOR UPDATE`

// unlockSQL ends the lock. Whoever takes the key next finds a call that must not be made twice, if one was under way.
const unlockSQL = `-- keys.unlock
UPDATE effectonce.idempotency_keys k SET lock_token = k.lock_token + 1, locked_until = NULL, retry_at = NULL
` + this + ` AND k.state = 'running' AND k.locked_until > clock_timestamp()`

// retrySQL gives a key back to its phases. $4: no call of the phase under way was made: then one that must not be made twice may be, and
// the age of one that may be begins anew.
const retrySQL = `-- keys.retry
UPDATE effectonce.idempotency_keys k SET state = 'running', lock_token = k.lock_token + 1, attempts = 0, calling = NULL, uncalled = CASE WHEN $4::bool THEN k.lock_token + 1 END,
  locked_until = NULL, retry_at = NULL, error = NULL, expires_at = NULL
` + this + ` AND (k.state IN ('indeterminate', 'abandoned') OR ` + unansweredSQL + `) AND (k.calling IS NULL OR $4::bool)`

// finishSQL says what the outcome is. Nobody here can encrypt it. What was asked for, and what phases handed on, stay
// until the key is forgotten: a role that may take them away may change them, too.
const finishSQL = `-- keys.finish
UPDATE effectonce.idempotency_keys k SET state = 'finished', lock_token = k.lock_token + 1, status = $4, headers = $5, body = $6,
  body_dropped = false, sealed = false, calling = NULL, locked_until = NULL, retry_at = NULL, error = NULL,
  finished_at = clock_timestamp(), expires_at = clock_timestamp() + $7::interval
` + this + ` AND (k.state IN ('indeterminate', 'abandoned') OR ` + unansweredSQL + `
  OR k.state = 'running' AND (k.locked_until IS NULL OR k.locked_until <= clock_timestamp()))`

const noteSQL = `-- keys.note
INSERT INTO effectonce.operator_actions (who, what, why, subject)
VALUES ($4, $5, $6, $7::jsonb || jsonb_build_object('scope', $1::text, 'operation', $2::text, 'key_sha256', encode(sha256(convert_to($3::text, 'UTF8')), 'hex')))`

// reapSQL is that of package idempotency. It says how many were forgotten, and how many are left to a person: with both a full page
// is told from the last one.
const reapSQL = `-- keys.reap
WITH old AS (
  SELECT scope, operation, key, finished_at IS NULL AND status IS NULL AS unanswered FROM effectonce.idempotency_keys
  WHERE state = 'finished' AND expires_at <= (SELECT clock_timestamp()) ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
), counts AS (
  SELECT scope, operation, key, false FROM effectonce.idempotency_keys k
  WHERE ` + countsSQL + ` AND coalesce(k.retry_at, k.created_at) <= (SELECT clock_timestamp()) AND k.expires_at <= (SELECT clock_timestamp())
  ORDER BY coalesce(k.retry_at, k.created_at) LIMIT $1 FOR UPDATE SKIP LOCKED
), doubted AS (
  UPDATE effectonce.idempotency_keys k SET state = 'indeterminate', expires_at = NULL, error = 'its work committed by a statement of its own, and left no outcome'
  FROM old WHERE k.scope = old.scope AND k.operation = old.operation AND k.key = old.key AND old.unanswered RETURNING true
), forgotten AS (
  DELETE FROM effectonce.idempotency_keys k USING (SELECT * FROM old UNION ALL SELECT * FROM counts) gone
  WHERE k.scope = gone.scope AND k.operation = gone.operation AND k.key = gone.key AND NOT gone.unanswered RETURNING true
)
SELECT (SELECT count(*) FROM forgotten), (SELECT count(*) FROM doubted)`

const expiredSQL = `-- keys.expired
SELECT (SELECT count(*) FROM (
    SELECT FROM effectonce.idempotency_keys k WHERE k.state = 'finished' AND k.expires_at <= (SELECT clock_timestamp()) AND NOT ` + unansweredSQL + ` LIMIT $1) bounded)
  + (SELECT count(*) FROM (
    SELECT FROM effectonce.idempotency_keys k WHERE ` + countsSQL + ` AND k.expires_at <= (SELECT clock_timestamp()) LIMIT $1) bounded)`
