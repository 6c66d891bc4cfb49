package idempotency

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

// doubtSQL marks a key of work in one transaction for a person: the caller's transaction holds it.
const doubtSQL = `-- idempotency.doubt
UPDATE effectonce.idempotency_keys SET state = 'indeterminate', error = $4, expires_at = NULL
WHERE scope OPERATOR(pg_catalog.=) $1 AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3`

type workQueries struct{ claim, respond, doubt string }
