package idempotency

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

// doubtSQL hands a key of work in one transaction to people: it is the caller's in this transaction.
const doubtSQL = `-- idempotency.doubt
UPDATE effectonce.idempotency_keys SET state = 'indeterminate', error = $4, expires_at = NULL
WHERE scope = $1 AND operation = $2 AND key = $3`

type workQueries struct{ claim, take, respond, failed, doubt string }

func newWorkQueries(in func(string) string) workQueries {
	return workQueries{claim: in(claimWorkSQL), take: in(takeWorkSQL), respond: in(respondSQL), failed: in(failedSQL), doubt: in(doubtSQL)}
}
