package idempotency

// claimWorkSQL claims a key for work in one transaction, waiting for whoever has it. The row is finished from the start:
// nobody sees it before the work is done, and what the end of the work writes (the response) changes no indexed column.
const claimWorkSQL = `-- idempotency.claim_work
INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, sealed, attempts, expires_at)
VALUES ($1::text, $2::text, $3::text, $7::bytea, 'finished', $4, 1, clock_timestamp() + $5::interval)
ON CONFLICT DO NOTHING RETURNING attempts, set_config('lock_timeout', $6, true) -- of the work`

// takeWorkSQL takes a key over whose earlier attempts failed, also from a flow. What a failure of the work leaves as it was, the
// end of the work changes: the row's lock keeps others away.
const takeWorkSQL = `-- idempotency.take_work
UPDATE effectonce.idempotency_keys SET state = 'finished', attempts = attempts + 1, error = NULL, sealed = $4, expires_at = clock_timestamp() + $5::interval
WHERE scope = $1 AND operation = $2 AND key = $3 AND ` + isRunning + ` AND lock_token = $7 AND fingerprint = $8
  AND (locked_until IS NULL OR locked_until <= clock_timestamp()) AND phases = '{}' AND calling IS NULL
RETURNING attempts, set_config('lock_timeout', $6, true)`

// Between a claim and the work stands a savepoint: what is stored in place of the work's effects, is stored by the transaction
// of the claim.
const (
	savepointSQL = `SAVEPOINT effectonce_work`
	undoSQL      = `ROLLBACK TO SAVEPOINT effectonce_work`
)

// respondSQL is the last statement of the work. Of the window of work that took long, at least a half is still to come. In
// another transaction than the one that claimed it divides by zero, so that the server skips the COMMIT behind it.
const respondSQL = `-- idempotency.respond
WITH stored AS (UPDATE effectonce.idempotency_keys SET status = $4::smallint, headers = $5, body = $6, body_dropped = $7, finished_at = clock_timestamp(), locked_by = NULL, retry_at = NULL,
  expires_at = CASE WHEN expires_at < clock_timestamp() + $8::interval / 2 THEN clock_timestamp() + $8::interval ELSE expires_at END
WHERE scope = $1 AND operation = $2 AND key = $3 AND ` + isFinished + ` AND finished_at IS NULL RETURNING 1)
SELECT 1 / count(*) FROM stored`

// failedSQL makes a count of the claim of an attempt that failed. The count is forgotten after a day without another one; retry_at
// orders it behind what is due, and nothing waits for it. What a flow, or anybody else, has ever taken is never forgotten.
const failedSQL = `-- idempotency.failed
UPDATE effectonce.idempotency_keys SET state = 'running', error = $4,
  retry_at = CASE WHEN lock_token = 1 AND locked_by IS NULL THEN clock_timestamp() + interval '1 day' ELSE retry_at END,
  expires_at = CASE WHEN lock_token = 1 AND locked_by IS NULL THEN clock_timestamp() + interval '1 day' END
WHERE scope = $1 AND operation = $2 AND key = $3 AND ` + isFinished + ` AND finished_at IS NULL`

// doubtSQL hands a key of work in one transaction to people: it is the caller's in this transaction. Without locked_by no
// reconciler is asked about it.
const doubtSQL = `-- idempotency.doubt
UPDATE effectonce.idempotency_keys SET state = 'indeterminate', error = $4, expires_at = NULL, locked_by = NULL, retry_at = NULL
WHERE scope = $1 AND operation = $2 AND key = $3`

type workQueries struct{ claim, take, respond, failed, doubt string }

func newWorkQueries(in func(string) string) workQueries {
	return workQueries{claim: in(claimWorkSQL), take: in(takeWorkSQL), respond: in(respondSQL), failed: in(failedSQL), doubt: in(doubtSQL)}
}
