package queue

// deadSameKey reports that rows n and d belong to one queue. It compares the hash, because the
// index has the hash: keys may be longer than an index entry. Null is equal to nothing, so a row
// without a key has no queue.
const deadSameKey = `n.relay = d.relay AND n.topic = d.topic AND sha256(n.key) = sha256(d.key)`

// deadIsHead reports a row that is behind none, also a row whose head was deleted by hand.
const deadIsHead = `(d.state <> 'behind' OR NOT EXISTS (SELECT FROM effectonce.outbox_dead n WHERE ` + deadSameKey + ` AND n.seq < d.seq))`

// deadMatching is a DeadFilter, $1 to $10. A null parameter does not filter; the planner sees the
// values and removes its condition.
const deadMatching = `
FROM effectonce.outbox_dead d
WHERE ($1::bigint[] IS NULL OR d.seq = ANY ($1)) AND ($2::uuid IS NULL OR d.id = $2) AND ($3::bytea IS NULL OR d.key = $3)
  AND ($4::text IS NULL OR d.topic = $4) AND ($5::text IS NULL OR d.relay = $5) AND ($6::text IS NULL OR d.reason = $6) AND ($7::text IS NULL OR d.state = $7)
  AND ($8::interval IS NULL OR d.died_at < clock_timestamp() - $8) AND ($9::interval IS NULL OR d.died_at > clock_timestamp() - $9)
  AND ($10::bool OR ` + deadIsHead + `)`

// deadColumns are those of a DeadRow. The index of keys counts the rows behind a row. Queues do not
// overlap, so all counts together read the table at most once.
const deadColumns = `d.relay, d.seq, d.id, d.topic, d.key, d.reason, d.state, d.error, d.attempts,
  d.created_at, d.died_at, extract(epoch FROM clock_timestamp() - greatest(least(d.died_at, '2200-01-01'), '1970-01-01'))::float8, octet_length(d.payload),
  (SELECT count(*) FROM effectonce.outbox_dead n WHERE ` + deadSameKey + ` AND n.seq > d.seq AND n.state = 'behind'),
  CASE WHEN d.state = 'behind' THEN (SELECT n.id FROM effectonce.outbox_dead n WHERE ` + deadSameKey + ` AND n.seq < d.seq ORDER BY n.seq LIMIT 1) END`

// deadListSQL returns the newest first: an operator who was just paged looks for those.
const deadListSQL = `-- dead.list
SELECT ` + deadColumns + deadMatching + `
ORDER BY d.seq DESC, d.relay LIMIT $11`

// deadTotalsSQL reads all rows that the filter selects, including those behind others.
const deadTotalsSQL = `-- dead.totals
SELECT d.relay, d.reason, count(*), count(*) FILTER (WHERE d.state = 'retry'),
  pg_catalog.count(DISTINCT (d.topic, sha256(d.key))) FILTER (WHERE d.state = 'held' AND d.key IS NOT NULL)` + deadMatching + `
GROUP BY d.relay, d.reason ORDER BY d.relay, d.reason`

// deadTargetsSQL returns the oldest first, in the order in which the relay would have published
// them.
const deadTargetsSQL = `-- dead.targets
SELECT d.relay, d.seq` + deadMatching + `
ORDER BY d.seq, d.relay LIMIT $11`

const deadDetailSQL = `-- dead.detail
SELECT d.headers::text, substring(d.payload FROM 1 FOR $3) FROM effectonce.outbox_dead d WHERE d.relay = $1 AND d.seq = $2`

const deadNextSQL = `-- dead.next
SELECT ` + deadColumns + `
FROM effectonce.outbox_dead o JOIN effectonce.outbox_dead d
  ON o.relay = d.relay AND o.topic = d.topic AND sha256(o.key) = sha256(d.key) AND d.seq > o.seq
WHERE o.relay = $1 AND o.seq = $2 AND d.state = 'behind' ORDER BY d.seq LIMIT $3`

const deadLockedColumns = `d.relay, d.seq, d.id, d.topic, d.key, d.reason, d.error, d.attempts, d.state, d.created_at`

// deadLockSQL locks the rows in the order of seq.
const deadLockSQL = `-- dead.lock
SELECT ` + deadLockedColumns + `
FROM effectonce.outbox_dead d
WHERE (d.relay, d.seq) IN (SELECT t.relay, t.seq FROM unnest($1::text[], $2::bigint[]) AS t (relay, seq))
ORDER BY d.seq, d.relay FOR UPDATE OF d`

// deadLockQueuesSQL locks all rows of the queues to which the rows belong. It uses UNION instead of
// OR, so that each half is read by its index.
const deadLockQueuesSQL = `-- dead.lock_queues
SELECT ` + deadLockedColumns + `
FROM effectonce.outbox_dead d
WHERE (d.relay, d.seq) IN (
  SELECT t.relay, t.seq FROM unnest($1::text[], $2::bigint[]) AS t (relay, seq)
  UNION
  SELECT n.relay, n.seq FROM unnest($1::text[], $2::bigint[]) AS t (relay, seq)
  JOIN effectonce.outbox_dead d ON d.relay = t.relay AND d.seq = t.seq
  JOIN effectonce.outbox_dead n ON ` + deadSameKey + `)
ORDER BY d.seq, d.relay FOR UPDATE OF d`

// deadRetrySQL hands locked rows back. It checks again, under the lock, whether a row is the head.
// It also returns the last row behind each, which is how far the key continues.
const deadRetrySQL = `-- dead.retry
WITH handed AS (
  UPDATE effectonce.outbox_dead d SET state = 'retry'
  FROM unnest($1::text[], $2::bigint[], $3::jsonb[]) AS s (relay, seq, subject)
  WHERE d.relay = s.relay AND d.seq = s.seq AND d.state <> 'retry' AND ` + deadIsHead + `
  RETURNING d.relay, d.seq, s.subject,
    coalesce((SELECT pg_catalog.max(n.seq) FROM effectonce.outbox_dead n WHERE ` + deadSameKey + ` AND n.seq > d.seq AND n.state = 'behind'), d.seq) AS last
), logged AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $4, 'dead.retry', $5, subject FROM handed ORDER BY seq, relay
)
SELECT relay, seq, last FROM handed ORDER BY seq, relay`

// deadDiscardSQL deletes locked rows that no relay can be publishing: held ones and, with $6, those
// behind a held one. The relay reads neither, and the held row is locked, so it stays held until
// the transaction ends.
const deadDiscardSQL = `-- dead.discard
WITH gone AS (
  DELETE FROM effectonce.outbox_dead d USING unnest($1::text[], $2::bigint[], $3::jsonb[]) AS s (relay, seq, subject)
  WHERE d.relay = s.relay AND d.seq = s.seq AND (d.state = 'held' OR ($6::bool AND EXISTS (
    SELECT FROM effectonce.outbox_dead n WHERE ` + deadSameKey + ` AND n.seq < d.seq AND n.state = 'held')))
  RETURNING d.relay, d.seq, s.subject
), logged AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $4, 'dead.discard', $5, subject FROM gone ORDER BY seq, relay
)
SELECT relay, seq, seq FROM gone ORDER BY seq, relay`

// deadPromoteSQL makes the first row of each queue of which the rest only waited the relay's next.
// It has a snapshot of its own, in which the deleted rows are gone. A row that the relay adds to a
// queue at the same time needs no head: the relay itself releases a row that has no held one before
// it.
const deadPromoteSQL = `-- dead.promote
UPDATE effectonce.outbox_dead d SET state = 'retry'
FROM (SELECT DISTINCT relay, topic, hash FROM unnest($1::text[], $2::text[], $3::bytea[]) AS q (relay, topic, hash)) AS q
CROSS JOIN LATERAL (SELECT n.seq FROM effectonce.outbox_dead n
  WHERE n.relay = q.relay AND n.topic = q.topic AND sha256(n.key) = q.hash ORDER BY n.seq LIMIT 1) AS first
WHERE d.relay = q.relay AND d.seq = first.seq AND d.state = 'behind'`

// deadOutcomesSQL reads the relay's progress: for each row, the first one that remains, up to the
// last row that was behind it. Null: all of them are published. $4 to $6 identify the queue,
// including the relay again.
const deadOutcomesSQL = `-- dead.outcomes
SELECT t.relay, t.seq, d.id, d.state, d.reason, d.error
FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::bytea[]) AS t (relay, seq, last, queue, topic, hash)
LEFT JOIN LATERAL (
  (SELECT n.seq FROM effectonce.outbox_dead n WHERE t.hash IS NULL AND n.relay = t.relay AND n.seq = t.seq)
  UNION ALL
  (SELECT n.seq FROM effectonce.outbox_dead n
   WHERE n.relay = t.queue AND n.topic = t.topic AND sha256(n.key) = t.hash AND n.seq >= t.seq AND n.seq <= t.last
   ORDER BY n.seq LIMIT 1)
) AS left_over ON true
LEFT JOIN effectonce.outbox_dead d ON d.relay = t.relay AND d.seq = left_over.seq
ORDER BY t.seq, t.relay`

// deadDiscardedSQL returns the missing rows that an operator discarded since an action.
const deadDiscardedSQL = `-- dead.discarded
SELECT t.relay, t.seq FROM unnest($1::text[], $2::bigint[]) AS t (relay, seq)
WHERE EXISTS (SELECT FROM effectonce.operator_actions a
  WHERE a.what = 'dead.discard' AND a."when" >= $3 AND a.subject->>'seq' = t.seq::text AND a.subject->>'relay' = t.relay)`
