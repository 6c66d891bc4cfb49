package idempotency

// claimFlowSQL claims a key for work in phases. The token begins at the database's clock, in
// microseconds, so that no later claim of the key has it: a holder may wake up when its row is
// forgotten, or lost by a failover, and the key is claimed again. lookSQL follows.
const claimFlowSQL = `-- idempotency.claim_flow
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, sealed, attempts, lock_token, locked_until, locked_by, request, flow, expires_at)
VALUES ($1::text, $2::text, $3::text, $4::bytea, 'running', $5, 1, (extract(epoch FROM clock_timestamp()) OPERATOR(pg_catalog.*) 1000000::numeric)::bigint,
  clock_timestamp() + $6::interval, $7, $8, $9, CASE WHEN $8::bytea IS NULL THEN clock_timestamp() + $10::interval END) ON CONFLICT DO NOTHING RETURNING lock_token`

// takeFlowSQL takes over the lock of a key that no worker holds. Two workers that read the same token
// race; the UPDATE lets one win. The previous holder still has this token, so request, phases and
// call must be unchanged since the read; the other values are returned as they are now. $12 is how long a
// key without a request is kept.
const takeFlowSQL = `-- idempotency.take_flow
UPDATE effectonce.idempotency_keys SET lock_token = lock_token + 1, attempts = attempts + 1,
  locked_until = clock_timestamp() + $5::interval, locked_by = $6, retry_at = NULL, request = coalesce(request, $11),
  expires_at = CASE WHEN request IS NULL AND $11::bytea IS NULL THEN clock_timestamp() + $12::interval END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND lock_token = $4 AND ` + isRunning + `
  AND (locked_until IS NULL OR locked_until <= clock_timestamp()) AND fingerprint OPERATOR(pg_catalog.=) $7 AND phases OPERATOR(pg_catalog.=) $8 AND calling::text IS NOT DISTINCT FROM $9 AND coalesce(call::text, '') = $13 AND flow OPERATOR(pg_catalog.=) $10
RETURNING data, request, sealed, attempts, extract(epoch FROM clock_timestamp() - calling_since)::float8`

const renewSQL = `-- idempotency.renew
UPDATE effectonce.idempotency_keys SET locked_until = clock_timestamp() + $5::interval,
  expires_at = CASE WHEN expires_at IS NOT NULL THEN greatest(expires_at, clock_timestamp() + $6::interval) END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND lock_token = $4 AND ` + isRunning + ` AND locked_until IS NOT NULL`

// unlockSQL removes the record of the call of phase $7, which was not made, and of no other: after a
// server lost a claim, another call under the same token may be running. It postpones the key as leaveSQL does,
// by the time since its last phase.
const unlockSQL = `-- idempotency.unlock
UPDATE effectonce.idempotency_keys SET locked_until = NULL, error = $5,
  retry_at = clock_timestamp() + least(greatest($6::interval, clock_timestamp() - coalesce(phase_since, created_at)), 100::float8 * $6::interval),
  calling = nullif(calling::text, $7), call = CASE WHEN calling::text = $7 THEN NULL ELSE call END, calling_since = CASE WHEN calling::text = $7 THEN NULL ELSE calling_since END,
  expires_at = CASE WHEN expires_at IS NOT NULL THEN greatest(expires_at, clock_timestamp() + $8::interval) END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND lock_token = $4 AND ` + isRunning

// leaveSQL postpones a key that no worker holds, by its age, but at least $6 and at most a hundred
// times that. So the pause doubles each time, and a version that knows the key's phases has all of
// GiveUpAfter. A key in doubt keeps its error.
const leaveSQL = `-- idempotency.leave
UPDATE effectonce.idempotency_keys SET error = coalesce($5, error), retry_at = clock_timestamp() + least(greatest($6::interval, clock_timestamp() - created_at), 100::float8 * $6::interval),
  phase_since = CASE WHEN state OPERATOR(pg_catalog.=) 'running' THEN clock_timestamp() ELSE phase_since END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND lock_token = $4 AND state::text IN ('running', 'indeterminate')
  AND (locked_until IS NULL OR locked_until <= clock_timestamp())`

// callingSQL records a foreign call, and renews the lock, unless the phase is done: see advance_key.
// $6: whether it may be repeated.
const callingSQL = `-- idempotency.calling
UPDATE effectonce.idempotency_keys SET calling = $5::text, call = $6::text, calling_since = coalesce(calling_since, clock_timestamp()),
  locked_until = clock_timestamp() + $7::interval
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND lock_token = $4 AND ` + isRunning + ` 
  AND (calling IS NULL OR calling::text = $5 AND call OPERATOR(pg_catalog.=) 'repeatable') AND $5 <> ALL (phases)`

// undecidedSQL marks a key for a person, with the error of the last attempt.
const undecidedSQL = `-- idempotency.undecided
UPDATE effectonce.idempotency_keys SET state = $5::text, error = left(pg_catalog.concat_ws('; then: ', error, $6::text), 2000), locked_until = NULL, retry_at = clock_timestamp() + nullif($7::interval, '0')
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND lock_token = $4 AND ` + isRunning

// advanceSQL and finishSQL raise EO003 if the key no longer belongs to the caller.
const (
	advanceSQL = `-- idempotency.advance
SELECT effectonce.advance_key($1, $2, $3, $4, $5, $6)`
	finishSQL = `-- idempotency.finish
SELECT effectonce.finish_key($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`
)

// abandonedSQL finds unfinished keys of a flow that no worker holds. A key with a stored request
// can be continued without its client.
const abandonedSQL = `-- idempotency.abandoned
SELECT scope, key, created_at, coalesce(error, '') FROM effectonce.idempotency_keys
WHERE state OPERATOR(pg_catalog.=) 'running' AND operation OPERATOR(pg_catalog.=) $1 AND request IS NOT NULL AND coalesce(retry_at, created_at) <= (SELECT clock_timestamp())
  AND (locked_until IS NULL OR locked_until <= clock_timestamp()) AND flow OPERATOR(pg_catalog.=) $2
ORDER BY coalesce(retry_at, created_at) LIMIT $3`

// undecidedKeysSQL is the work list of a reconciler: keys of its flow. Work in one transaction that is in
// doubt has no flow, and no phase to continue at.
const undecidedKeysSQL = `-- idempotency.undecided_keys
SELECT scope, key, created_at, coalesce(error, '') FROM effectonce.idempotency_keys
WHERE state OPERATOR(pg_catalog.=) 'indeterminate' AND operation OPERATOR(pg_catalog.=) $1 AND (retry_at IS NULL OR retry_at <= clock_timestamp())
  AND flow OPERATOR(pg_catalog.=) $2 ORDER BY created_at LIMIT $3`

// decidedSQL returns a key to its phases. $5 is the phase whose call happened, with $6 as the state
// behind it.
const decidedSQL = `-- idempotency.decided
UPDATE effectonce.idempotency_keys SET state = 'running', lock_token = lock_token + 1, attempts = 0, phase_since = clock_timestamp(),
  calling = $5::text, call = CASE WHEN $5::text IS NOT NULL THEN 'happened' END, calling_since = NULL, data = CASE WHEN $5::text IS NULL THEN data ELSE $6::bytea END, locked_until = NULL, retry_at = NULL, error = NULL,
  expires_at = CASE WHEN request IS NULL THEN clock_timestamp() + $7::interval END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND lock_token = $4 AND ` + isIndeterminate

// compareSQL lists the keys of an operation: whether each still runs, whether phase $2 is done, and whether it
// was claimed after $3 and last changed before $4.
const compareSQL = `-- idempotency.compare
SELECT scope, key, state OPERATOR(pg_catalog.=) 'running', $2 = ANY (phases), created_at > $3 AND coalesce(finished_at, phase_since, created_at) < $4
FROM effectonce.idempotency_keys WHERE operation OPERATOR(pg_catalog.=) $1`
