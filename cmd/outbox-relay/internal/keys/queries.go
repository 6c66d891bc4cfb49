package keys

// markSQL is what idempotency.Key.String shows instead of the key.
const markSQL = `pg_catalog.encode(pg_catalog.substr(sha256('\x0000000000000004'::bytea || 'show'::bytea || int8send(octet_length(pg_catalog.convert_to(k.key, 'UTF8'))::bigint)
  || pg_catalog.convert_to(k.key, 'UTF8')), 1, 4), 'hex')`

// stuckSQL: it is running, no worker holds it, and it is not postponed.
const stuckSQL = `(k.state OPERATOR(pg_catalog.=) 'running' AND (k.locked_until IS NULL OR k.locked_until <= clock_timestamp()) AND coalesce(k.retry_at, k.created_at) <= clock_timestamp())`

const columns = `k.scope, k.operation, k.key, ` + markSQL + ` AS mark,
  k.state, ` + stuckSQL + ` AS stuck, k.flow, k.phases, k.calling, coalesce(k.call::text, '') AS call,
  k.state OPERATOR(pg_catalog.=) 'running' AND coalesce(k.locked_until > clock_timestamp(), false) AS locked, k.locked_by, k.locked_until, k.lock_token,
  k.attempts, k.error, k.retry_at, k.status, k.body_dropped, k.sealed,
  octet_length(k.request)::bigint AS request_bytes, octet_length(k.data)::bigint AS data_bytes, octet_length(k.body)::bigint AS body_bytes,
  k.created_at, extract(epoch FROM clock_timestamp() - greatest(least(k.created_at, '2200-01-01'), '1970-01-01'))::float8 AS age, k.finished_at, k.expires_at
FROM effectonce.idempotency_keys k`

const filters = ` AND (NOT $2::bool OR ` + stuckSQL + `) AND ($3::text IS NULL OR k.scope OPERATOR(pg_catalog.=) $3) AND ($4::text IS NULL OR k.operation OPERATOR(pg_catalog.=) $4)
  AND ($5::interval IS NULL OR k.created_at <= clock_timestamp() - $5)`

const (
	name   = `k.scope, k.operation, k.key FROM effectonce.idempotency_keys k`
	newest = ` ORDER BY k.created_at DESC, k.scope DESC, k.operation DESC, k.key DESC LIMIT $6`
)

// listSQL has a branch for each state or two, so that the partial indexes find keys that are not
// finished. Finished keys are all read, but only those that are listed are looked at closely.
const listSQL = `-- keys.list
SELECT ` + columns + ` JOIN (
  (SELECT ` + name + ` WHERE k.state OPERATOR(pg_catalog.=) 'running' AND 'running' = ANY ($1::text[])` + filters + newest + `)
  UNION ALL
  (SELECT ` + name + ` WHERE k.state::text IN ('indeterminate', 'abandoned') AND k.state OPERATOR(pg_catalog.=) ANY ($1::text[])` + filters + newest + `)
  UNION ALL
  (SELECT ` + name + ` WHERE k.state OPERATOR(pg_catalog.=) 'finished' AND 'finished' = ANY ($1::text[])` + filters + newest + `)
) found ON found.scope OPERATOR(pg_catalog.=) k.scope AND found.operation OPERATOR(pg_catalog.=) k.operation AND found.key OPERATOR(pg_catalog.=) k.key` + newest

const named = ` AND ($2::text IS NULL OR k.scope OPERATOR(pg_catalog.=) $2) AND ($3::text IS NULL OR k.operation OPERATOR(pg_catalog.=) $3)`

// findSQL compares marks only among keys that are not finished: they are few.
const findSQL = `-- keys.find
SELECT * FROM (
  SELECT ` + columns + ` WHERE k.key OPERATOR(pg_catalog.=) $1::text` + named + `
  UNION ALL
  SELECT ` + columns + ` WHERE k.state OPERATOR(pg_catalog.=) 'running' AND k.key OPERATOR(pg_catalog.<>) $1 AND ` + markSQL + ` = $1` + named + `
  UNION ALL
  SELECT ` + columns + ` WHERE k.state::text IN ('indeterminate', 'abandoned') AND k.key OPERATOR(pg_catalog.<>) $1 AND ` + markSQL + ` = $1` + named + `
) found ORDER BY created_at DESC, scope DESC, operation DESC LIMIT $4`

// detailSQL reads up to $4 bytes of the request and the answer, and nothing that is encrypted. If a
// person finished a key, its request and data may be encrypted, whatever sealed says about the
// outcome.
const detailSQL = `-- keys.detail
SELECT pg_catalog.encode(k.fingerprint, 'hex'), CASE pg_catalog.jsonb_typeof(k.headers) WHEN 'object' THEN k.headers ELSE '{}' END::text,
  CASE WHEN NOT k.sealed AND k.state OPERATOR(pg_catalog.<>) 'finished' THEN substring(k.request FROM 1 FOR $4::int) END,
  CASE WHEN NOT k.sealed AND k.state OPERATOR(pg_catalog.<>) 'finished' THEN substring(k.data FROM 1 FOR $4::int) END,
  CASE WHEN NOT k.sealed THEN substring(k.body FROM 1 FOR $4::int) END
FROM effectonce.idempotency_keys k WHERE k.scope OPERATOR(pg_catalog.=) $1 AND k.operation OPERATOR(pg_catalog.=) $2 AND k.key OPERATOR(pg_catalog.=) $3`

// actionsSQL finds a key by its hash: actions are kept forever and keys are not, so actions record
// only the hash.
const actionsSQL = `-- keys.actions
SELECT id, who, stated, what, why, "when", db_role, subject::text FROM effectonce.operator_actions
WHERE what LIKE 'key.%' AND subject->>'scope' = $1 AND subject->>'operation' = $2
  AND subject->>'key_sha256' = pg_catalog.encode(sha256(pg_catalog.convert_to($3::text, 'UTF8')), 'hex')
ORDER BY id DESC LIMIT $4`

const this = `WHERE k.scope OPERATOR(pg_catalog.=) $1 AND k.operation OPERATOR(pg_catalog.=) $2 AND k.key OPERATOR(pg_catalog.=) $3`

// lockSQL waits for a transaction that is working on the key, and then reads the row as it is.
const lockSQL = `-- keys.lock
SELECT ` + columns + ` ` + this + ` FOR UPDATE`

// unlockSQL ends the lock. If a call that must not be made twice was in progress, the next worker
// that takes the key finds it.
const unlockSQL = `-- keys.unlock
UPDATE effectonce.idempotency_keys k SET lock_token = k.lock_token + 1, locked_until = NULL, retry_at = NULL
` + this + ` AND k.state OPERATOR(pg_catalog.=) 'running' AND k.locked_until > clock_timestamp()`

// retrySQL returns a key to its phases. $4: no call of the current phase was made, so it may be made; an
// earlier decision that it happened is taken back. $5: the call happened, and the Write of its phase comes
// next. One of them is needed for a key in doubt, and for a call that must not be made twice.
const retrySQL = `-- keys.retry
UPDATE effectonce.idempotency_keys k SET state = 'running', lock_token = k.lock_token + 1, attempts = 0, calling = CASE WHEN NOT $4::bool THEN k.calling END,
  call = CASE WHEN $5::bool THEN 'happened' WHEN NOT $4::bool THEN k.call END, calling_since = CASE WHEN NOT $4::bool AND NOT $5::bool THEN k.calling_since END, phase_since = clock_timestamp(),
  locked_until = NULL, retry_at = NULL, error = NULL,
  expires_at = CASE WHEN k.request IS NULL THEN clock_timestamp() + coalesce(greatest(k.expires_at - k.created_at, interval '1 minute'), interval '1 day') END
` + this + ` AND k.state::text IN ('indeterminate', 'abandoned') AND (NOT $5::bool OR k.calling IS NOT NULL)
  AND ($4::bool OR $5::bool OR k.state OPERATOR(pg_catalog.=) 'abandoned' AND coalesce(k.call::text, '') <> 'once')`

// finishSQL sets the outcome. This program cannot encrypt it. The request, and what phases passed
// on, remain until the key is deleted: a role with the right to remove them could change them, too.
const finishSQL = `-- keys.finish
UPDATE effectonce.idempotency_keys k SET state = 'finished', lock_token = k.lock_token + 1, status = $4, headers = $5, body = $6,
  body_dropped = false, sealed = false, calling = NULL, call = NULL, calling_since = NULL, locked_until = NULL, retry_at = NULL, error = NULL,
  finished_at = clock_timestamp(), expires_at = clock_timestamp() + $7::interval
` + this + ` AND (k.state::text IN ('indeterminate', 'abandoned')
  OR k.state OPERATOR(pg_catalog.=) 'running' AND (k.locked_until IS NULL OR k.locked_until <= clock_timestamp()))`

// forgetSQL is retrySQL for work in one transaction, which is in doubt: the next request executes it from
// the start.
const forgetSQL = `-- keys.forget
DELETE FROM effectonce.idempotency_keys k ` + this + ` AND $4::bool AND k.flow IS NULL AND k.state OPERATOR(pg_catalog.=) 'indeterminate'`
