package idempotency

// claimWorkSQL claims a key for work in one transaction, and waits for other claims. The row says
// finished from the start: no other transaction sees it before the work is done, and the update at
// the end of the work (the response) changes no indexed column.
const claimWorkSQL = `-- idempotency.claim_work
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, sealed, attempts, expires_at)
VALUES ($1::text, $2::text, $3::text, $7::bytea, 'finished', $4, 1, clock_timestamp() + $5::interval)
ON CONFLICT DO NOTHING RETURNING attempts, set_config('lock_timeout', $6, true) -- of the work`

// takeWorkSQL takes a key that is counted as failed, also from a flow. On another failure the other
// columns keep their values.
const takeWorkSQL = `-- idempotency.take_work
UPDATE effectonce.idempotency_keys SET state = 'finished', attempts = attempts + 1, error = NULL, sealed = $4, expires_at = clock_timestamp() + $5::interval
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND ` + isRunning + ` AND lock_token = $7 AND fingerprint OPERATOR(pg_catalog.=) $8
  AND (locked_until IS NULL OR locked_until <= clock_timestamp()) AND phases OPERATOR(pg_catalog.=) '{}' AND calling IS NULL
RETURNING attempts, set_config('lock_timeout', $6, true)`

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
WITH stored AS (UPDATE effectonce.idempotency_keys SET status = $4::smallint, headers = $5, body = $6, body_dropped = $7, finished_at = clock_timestamp(), locked_by = NULL, retry_at = NULL,
  expires_at = CASE WHEN expires_at < clock_timestamp() + $8::interval / 2::float8 THEN clock_timestamp() + $8::interval ELSE expires_at END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND ` + isFinished + ` AND finished_at IS NULL RETURNING 1)
SELECT 1 / count(*) FROM stored`

// failedSQL turns the claim of a failed attempt into a failure count. The count is forgotten after
// a day without another failure; retry_at orders it after the keys that are due, and nothing waits
// for it. A key that was ever taken over, by a flow or otherwise, stays.
const failedSQL = `-- idempotency.failed
UPDATE effectonce.idempotency_keys SET state = 'running', error = $4,
  retry_at = CASE WHEN lock_token = 1 AND locked_by IS NULL THEN clock_timestamp() + interval '1 day' ELSE retry_at END,
  expires_at = CASE WHEN lock_token = 1 AND locked_by IS NULL THEN clock_timestamp() + interval '1 day' END
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3 AND ` + isFinished + ` AND finished_at IS NULL`

// doubtSQL marks a key of work in one transaction for a person: the caller's transaction holds it.
// Without locked_by no reconciler is called for it.
const doubtSQL = `-- idempotency.doubt
UPDATE effectonce.idempotency_keys SET state = 'indeterminate', error = $4, expires_at = NULL, locked_by = NULL, retry_at = NULL
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3`

type workQueries struct{ claim, take, respond, failed, doubt string }

func newWorkQueries(in func(string) string) workQueries {
	return workQueries{claim: in(claimWorkSQL), take: in(takeWorkSQL), respond: in(respondSQL), failed: in(failedSQL), doubt: in(doubtSQL)}
}
