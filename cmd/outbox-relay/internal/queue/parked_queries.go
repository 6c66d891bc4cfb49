package queue

// parkedSameQueue reports that rows n and p belong to one queue. It compares the hash, because the
// index has the hash: keys may be longer than an index entry. Null is equal to nothing, so a row
// without a key has no queue.
const parkedSameQueue = `n.consumer = p.consumer AND n.topic = p.topic AND n.partition = p.partition AND sha256(n.key) = sha256(p.key)`

// parkedIsHead reports a row that is behind none, also a row whose head was deleted by hand.
const parkedIsHead = `(p.state <> 'behind' OR NOT EXISTS (SELECT FROM effectonce.parked_messages n WHERE ` + parkedSameQueue + ` AND n.seq < p.seq))`

// parkedMatching is a ParkedFilter, $1 to $9. A null parameter does not filter; the planner sees
// the values and removes its condition.
const parkedMatching = `
FROM effectonce.parked_messages p JOIN effectonce.consumers c ON c.id = p.consumer
WHERE ($1::bigint[] IS NULL OR p.seq = ANY ($1)) AND ($2::bytea IS NULL OR p.key = $2)
  AND ($3::text IS NULL OR p.topic = $3) AND ($4::text IS NULL OR c.name = $4) AND ($5::text IS NULL OR c.consumer_group = $5)
  AND ($6::text IS NULL OR p.reason = $6)
  AND ($7::interval IS NULL OR p.parked_at < clock_timestamp() - $7) AND ($8::interval IS NULL OR p.parked_at > clock_timestamp() - $8)
  AND ($9::bool OR ` + parkedIsHead + `)`

// parkedColumns are those of a ParkedMessage. The index of keys counts the rows behind a row.
// Queues do not overlap, so all counts together read the table at most once.
const parkedColumns = `p.seq, p.message_id, c.name, c.consumer_group, p.topic, p.partition, p."offset", p.key, p.reason, p.state, p.error, p.attempts,
  p.parked_at, extract(epoch FROM clock_timestamp() - greatest(least(p.parked_at, '2200-01-01'), '1970-01-01'))::float8,
  CASE WHEN p.state = 'retry' THEN greatest(extract(epoch FROM least(p.retry_at, '2200-01-01') - clock_timestamp()), 0)::float8 END,
  p.record_time, octet_length(p.payload),
  (SELECT count(*) FROM effectonce.parked_messages n WHERE ` + parkedSameQueue + ` AND n.seq > p.seq AND n.state = 'behind'),
  CASE WHEN p.state = 'behind' THEN (SELECT n.message_id FROM effectonce.parked_messages n WHERE ` + parkedSameQueue + ` AND n.seq < p.seq ORDER BY n.seq LIMIT 1) END`

// parkedListSQL returns the newest first: an operator who was just paged looks for those.
const parkedListSQL = `-- parked.list
SELECT ` + parkedColumns + parkedMatching + `
ORDER BY p.seq DESC LIMIT $10`

// parkedTotalsSQL reads all rows that the filter selects, including those behind others.
const parkedTotalsSQL = `-- parked.totals
SELECT c.name, p.reason, count(*), count(*) FILTER (WHERE p.state = 'retry'),
  pg_catalog.count(DISTINCT (p.topic, p.partition, sha256(p.key))) FILTER (WHERE p.state <> 'behind' AND p.key IS NOT NULL)` + parkedMatching + `
GROUP BY c.name, p.reason ORDER BY c.name, p.reason`

// parkedTargetsSQL returns the oldest first, in the order in which the consumers would have handled
// them.
const parkedTargetsSQL = `-- parked.targets
SELECT p.seq` + parkedMatching + `
ORDER BY p.seq LIMIT $10`

// parkedFindSQL finds rows by what a person knows: the ID as the log shows it ($1), or the text
// that the message carried ($2), hashed with each topic that a consumer reads. It does not know
// CloudEvents sources.
const parkedFindSQL = `-- parked.find
SELECT p.seq FROM effectonce.parked_messages p
WHERE p.message_id IN (
  SELECT $1::uuid UNION
  SELECT effectonce.message_id(t.topic, $2) FROM effectonce.consumers c CROSS JOIN LATERAL pg_catalog.unnest(c.topics) AS t (topic))
ORDER BY p.seq`

// parkedFindAtSQL finds rows by the record's place in Kafka.
const parkedFindAtSQL = `-- parked.find_at
SELECT seq FROM effectonce.parked_messages WHERE topic = $1 AND partition = $2 AND "offset" = $3 ORDER BY seq`

const parkedDetailSQL = `-- parked.detail
SELECT p.topic_id, p.headers::text, substring(p.payload FROM 1 FOR $2), p.released_at, p.retry_at
FROM effectonce.parked_messages p WHERE p.seq = $1`

const parkedBehindSQL = `-- parked.behind
SELECT ` + parkedColumns + `
FROM effectonce.parked_messages o JOIN effectonce.parked_messages p
  ON o.consumer = p.consumer AND o.topic = p.topic AND o.partition = p.partition AND sha256(o.key) = sha256(p.key) AND p.seq > o.seq
JOIN effectonce.consumers c ON c.id = p.consumer
WHERE o.seq = $1 AND p.state = 'behind' ORDER BY p.seq LIMIT $2`

// parkedLockSQL locks the rows in the order of seq, as consumers do, and waits for a consumer that
// is handling one.
const parkedLockSQL = `-- parked.lock
SELECT p.seq, p.consumer, c.name, p.message_id, p.topic, p.partition, p."offset", p.key, p.reason, p.error, p.attempts, p.state
FROM effectonce.parked_messages p JOIN effectonce.consumers c ON c.id = p.consumer
WHERE p.seq = ANY ($1) ORDER BY p.seq FOR UPDATE OF p`

// parkedLockQueuesSQL locks all rows of the queues to which the rows belong.
const parkedLockQueuesSQL = `-- parked.lock_queues
SELECT n.seq, n.consumer, c.name, n.message_id, n.topic, n.partition, n."offset", n.key, n.reason, n.error, n.attempts, n.state
FROM effectonce.parked_messages n JOIN effectonce.consumers c ON c.id = n.consumer
WHERE n.seq = ANY ($1) OR n.seq IN (
  SELECT n.seq FROM effectonce.parked_messages p JOIN effectonce.parked_messages n ON ` + parkedSameQueue + ` WHERE p.seq = ANY ($1))
ORDER BY n.seq FOR UPDATE OF n`

// parkedRetrySQL hands back the locked rows that have a payload. It checks again, under the lock,
// whether a row is the head. It also returns the last row behind each, which is how far the key
// continues.
const parkedRetrySQL = `-- parked.retry
WITH handed AS (
  UPDATE effectonce.parked_messages p SET state = 'retry', retry_at = clock_timestamp(), released_at = NULL
  FROM unnest($1::bigint[], $2::jsonb[]) AS s (seq, subject)
  WHERE p.seq = s.seq AND p.state <> 'retry' AND p.reason <> 'too_large' AND ` + parkedIsHead + `
  RETURNING p.seq, s.subject,
    coalesce((SELECT pg_catalog.max(n.seq) FROM effectonce.parked_messages n WHERE ` + parkedSameQueue + ` AND n.seq > p.seq AND n.state = 'behind'), p.seq) AS last
), logged AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'parked.retry', $4, subject FROM handed ORDER BY seq
)
SELECT seq, last FROM handed ORDER BY seq`

// parkedDiscardSQL deletes locked rows: heads, or whole queues ($5).
const parkedDiscardSQL = `-- parked.discard
WITH gone AS (
  DELETE FROM effectonce.parked_messages p USING unnest($1::bigint[], $2::jsonb[]) AS s (seq, subject)
  WHERE p.seq = s.seq AND ($5::bool OR ` + parkedIsHead + `)
  RETURNING p.seq, s.subject
), logged AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'parked.discard', $4, subject FROM gone ORDER BY seq
)
SELECT seq, seq FROM gone ORDER BY seq`

// parkedPromotedSQL counts the queues whose next row became the head. The trigger parked_promote
// does that when this transaction deletes: such a row is a version of this transaction.
const parkedPromotedSQL = `-- parked.promoted
SELECT FROM (SELECT DISTINCT consumer, topic, partition, hash
  FROM unnest($1::int[], $2::text[], $3::int[], $4::bytea[]) AS q (consumer, topic, partition, hash)) AS q
CROSS JOIN LATERAL (SELECT n.state, n.xmin FROM effectonce.parked_messages n
  WHERE n.consumer = q.consumer AND n.topic = q.topic AND n.partition = q.partition AND sha256(n.key) = q.hash
  ORDER BY n.seq LIMIT 1) AS first
WHERE first.state <> 'behind' AND first.xmin = pg_current_xact_id()::xid`

// parkedOutcomesSQL reads the consumers' progress: for each row, the first one that remains, up to
// the last row that was behind it. Null: all of them are done.
const parkedOutcomesSQL = `-- parked.outcomes
SELECT t.seq, p.message_id, p.state, p.reason, p.error
FROM unnest($1::bigint[], $2::bigint[], $3::int[], $4::text[], $5::int[], $6::bytea[]) AS t (seq, last, consumer, topic, partition, hash)
LEFT JOIN LATERAL (
  (SELECT n.seq FROM effectonce.parked_messages n WHERE t.hash IS NULL AND n.seq = t.seq)
  UNION ALL
  (SELECT n.seq FROM effectonce.parked_messages n
   WHERE n.consumer = t.consumer AND n.topic = t.topic AND n.partition = t.partition AND sha256(n.key) = t.hash AND n.seq >= t.seq AND n.seq <= t.last
   ORDER BY n.seq LIMIT 1)
) AS left_over ON true
LEFT JOIN effectonce.parked_messages p ON p.seq = left_over.seq
ORDER BY t.seq`

// parkedDiscardedSQL returns the missing rows that an operator discarded since an action.
const parkedDiscardedSQL = `-- parked.discarded
SELECT (subject->>'seq')::bigint FROM effectonce.operator_actions
WHERE what = 'parked.discard' AND "when" >= $2 AND subject->>'seq' = ANY (SELECT s::text FROM pg_catalog.unnest($1::bigint[]) AS s)`
