package held

// deadRows and parkedRows give both tables the same columns, as d. Discarded rows are not among them.
const (
	deadRows = `
FROM (SELECT relay, seq, id, '' AS consumer_name, '' AS "group", topic, NULL::int AS partition, NULL::bigint AS "offset", key, reason, state, error, attempts,
  created_at, died_at AS held_at, headers, payload, NULL::uuid AS topic_id, NULL::timestamptz AS released_at, NULL::timestamptz AS retry_at
  FROM effectonce.outbox_dead WHERE state IN ('held', 'behind', 'retry')) AS d`
	parkedRows = `
FROM (SELECT '' AS relay, p.seq, p.message_id AS id, p.consumer, c.name AS consumer_name, c.consumer_group AS "group", p.topic, p.partition, p."offset", p.key,
  p.reason, p.state, p.error, p.attempts, p.record_time AS created_at, p.parked_at AS held_at, p.headers, p.payload, p.topic_id, p.released_at, p.retry_at
  FROM effectonce.parked_messages p JOIN effectonce.consumers c ON c.id = p.consumer) AS d`
)

// Conditions on another row n. Keys are compared by their hash, because the index has the hash: keys
// may be longer than an index entry. Null is equal to nothing, so a row without a key has no queue.
const (
	deadSame   = `n.state IN ('held', 'behind', 'retry') AND n.relay = d.relay AND n.topic = d.topic AND sha256(n.key) = sha256(d.key)`
	deadOf     = `n.state IN ('held', 'behind', 'retry') AND n.relay = q.relay AND n.topic = q.topic AND sha256(n.key) = q.hash` // of queue q
	parkedSame = `n.consumer = d.consumer AND n.topic = d.topic AND n.partition = d.partition AND sha256(n.key) = sha256(d.key)`
	parkedOf   = `n.consumer = q.consumer AND n.topic = q.topic AND n.partition = q.partition AND sha256(n.key) = q.hash`
)

// deadIsHead and parkedIsHead report a row that is behind none, also a row whose head was deleted by
// hand.
const (
	deadIsHead   = `(d.state <> 'behind' OR NOT EXISTS (SELECT FROM effectonce.outbox_dead n WHERE ` + deadSame + ` AND n.seq < d.seq))`
	parkedIsHead = `(d.state <> 'behind' OR NOT EXISTS (SELECT FROM effectonce.parked_messages n WHERE ` + parkedSame + ` AND n.seq < d.seq))`
)

// matching is a Filter, $1 to $12. A null parameter does not filter; the planner sees the values and
// removes its condition.
const matching = `
WHERE ($1::bigint[] IS NULL OR d.seq = ANY ($1)) AND ($2::uuid[] IS NULL OR d.id = ANY ($2)) AND ($3::bytea IS NULL OR d.key = $3)
  AND ($4::text IS NULL OR d.topic = $4) AND ($5::text IS NULL OR d.relay = $5) AND ($6::text IS NULL OR d.consumer_name = $6) AND ($7::text IS NULL OR d."group" = $7)
  AND ($8::text IS NULL OR d.reason = $8) AND ($9::text IS NULL OR d.state = $9)
  AND ($10::interval IS NULL OR d.held_at < clock_timestamp() - $10) AND ($11::interval IS NULL OR d.held_at > clock_timestamp() - $11)
  AND ($12::bool OR `

// columns are those of a Row, with those of its kind. The index of keys counts the rows behind a
// row. Queues do not overlap, so all counts together read the table at most once.
const (
	columns = `d.relay, d.seq, d.id, d.consumer_name, d."group", d.topic, d.partition, d."offset", d.key, d.reason, d.state, d.error, d.attempts, d.created_at, d.held_at,
  extract(epoch FROM clock_timestamp() - greatest(least(d.held_at, '2200-01-01'), '1970-01-01'))::float8 AS age_seconds, octet_length(d.payload) AS payload_bytes,
  CASE WHEN d.state = 'retry' AND d.retry_at IS NOT NULL THEN greatest(extract(epoch FROM least(d.retry_at, '2200-01-01') - clock_timestamp()), 0)::float8 END AS retry_in_seconds,
  `
	deadColumns = columns + `(SELECT count(*) FROM effectonce.outbox_dead n WHERE ` + deadSame + ` AND n.seq > d.seq AND n.state = 'behind') AS behind,
  CASE WHEN d.state = 'behind' THEN (SELECT n.id FROM effectonce.outbox_dead n WHERE ` + deadSame + ` AND n.seq < d.seq ORDER BY n.seq LIMIT 1) END AS head`
	parkedColumns = columns + `(SELECT count(*) FROM effectonce.parked_messages n WHERE ` + parkedSame + ` AND n.seq > d.seq AND n.state = 'behind') AS behind,
  CASE WHEN d.state = 'behind' THEN (SELECT n.message_id FROM effectonce.parked_messages n WHERE ` + parkedSame + ` AND n.seq < d.seq ORDER BY n.seq LIMIT 1) END AS head`
)

// The lists return the newest of a relay first: an operator who was just paged looks for those. The
// targets are the oldest first, in the order in which the program would have processed them. Both walk
// the primary key.
const (
	newest           = `) ORDER BY d.relay DESC, d.seq DESC LIMIT $13`
	oldest           = `) ORDER BY d.relay, d.seq LIMIT $13`
	deadListSQL      = "-- dead.list\nSELECT " + deadColumns + deadRows + matching + deadIsHead + newest
	parkedListSQL    = "-- parked.list\nSELECT " + parkedColumns + parkedRows + matching + parkedIsHead + newest
	deadTargetsSQL   = "-- dead.targets\nSELECT d.relay, d.seq" + deadRows + matching + deadIsHead + oldest
	parkedTargetsSQL = "-- parked.targets\nSELECT d.relay, d.seq" + parkedRows + matching + parkedIsHead + oldest
)

// The totals read all rows that the filter selects, including those behind others.
const (
	deadTotalsSQL = `-- dead.totals
SELECT d.relay AS of, d.reason, count(*) AS count, count(*) FILTER (WHERE d.state = 'retry') AS retrying,
  pg_catalog.count(d.key) FILTER (WHERE d.state = 'held') AS held_keys` + deadRows + matching + deadIsHead + `)
GROUP BY d.relay, d.reason ORDER BY d.relay, d.reason`
	parkedTotalsSQL = `-- parked.totals
SELECT d.consumer_name AS of, d.reason, count(*) AS count, count(*) FILTER (WHERE d.state = 'retry') AS retrying,
  pg_catalog.count(d.key) FILTER (WHERE d.state <> 'behind') AS held_keys` + parkedRows + matching + parkedIsHead + `)
GROUP BY d.consumer_name, d.reason ORDER BY d.consumer_name, d.reason`
)

const (
	detail        = `, d.topic_id, d.headers::text AS headers, substring(d.payload FROM 1 FOR $3) AS payload, d.released_at, d.retry_at`
	deadShowSQL   = "-- dead.show\nSELECT " + deadColumns + detail + deadRows + ` WHERE d.relay = $1 AND d.seq = $2`
	parkedShowSQL = "-- parked.show\nSELECT " + parkedColumns + detail + parkedRows + ` WHERE d.relay = $1 AND d.seq = $2`

	// Counts of rows behind each of these would read a long queue once for each.
	next          = columns + `0::bigint AS behind, NULL::uuid AS head`
	behind        = ` AND n.seq < d.seq WHERE d.relay = $1 AND n.seq = $2 AND d.state = 'behind' ORDER BY d.seq LIMIT $3`
	deadNextSQL   = "-- dead.next\nSELECT " + next + deadRows + ` JOIN effectonce.outbox_dead n ON ` + deadSame + behind
	parkedNextSQL = "-- parked.next\nSELECT " + next + parkedRows + ` JOIN effectonce.parked_messages n ON ` + parkedSame + behind
)

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

// Rows are locked in the order of seq, as consumers do; a lock waits for a consumer that is handling
// the message. Whole queues use UNION instead of OR, so that each half is read by its index.
const (
	fromRefs   = ` FROM unnest($1::text[], $2::bigint[]) AS t (relay, seq)`
	deadLocked = `
SELECT d.relay, d.seq, d.id, d.topic, d.key, d.reason, d.error, d.attempts, d.state, d.created_at, sha256(d.key) AS hash
FROM effectonce.outbox_dead d
WHERE d.state IN ('held', 'behind', 'retry') AND (d.relay, d.seq) IN (SELECT t.relay, t.seq` + fromRefs
	parkedLocked = `
SELECT '' AS relay, d.seq, d.message_id AS id, d.consumer, c.name AS consumer_name, d.topic, d.partition, d."offset", d.key, d.reason, d.error, d.attempts, d.state, sha256(d.key) AS hash
FROM effectonce.parked_messages d JOIN effectonce.consumers c ON c.id = d.consumer
WHERE d.seq IN (SELECT t.seq` + fromRefs
	deadLockSQL       = `-- dead.lock` + deadLocked + `) ORDER BY d.seq, d.relay FOR UPDATE OF d`
	parkedLockSQL     = `-- parked.lock` + parkedLocked + `) ORDER BY d.seq FOR UPDATE OF d`
	deadLockQueuesSQL = `-- dead.lock_queues` + deadLocked + `
  UNION SELECT n.relay, n.seq` + fromRefs + ` JOIN effectonce.outbox_dead d ON d.relay = t.relay AND d.seq = t.seq JOIN effectonce.outbox_dead n ON ` + deadSame + `)
ORDER BY d.seq, d.relay FOR UPDATE OF d`
	parkedLockQueuesSQL = `-- parked.lock_queues` + parkedLocked + `
  UNION SELECT n.seq` + fromRefs + ` JOIN effectonce.parked_messages d ON d.seq = t.seq JOIN effectonce.parked_messages n ON ` + parkedSame + `)
ORDER BY d.seq FOR UPDATE OF d`
)

// fromSubjects are the locked rows to change, each with what is recorded about it. recorded writes
// one action for each row that was changed, in the same statement.
const (
	fromSubjects = `unnest($1::text[], $2::bigint[], $3::jsonb[]) AS s (relay, seq, subject)`
	recorded     = `
), logged AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $4, $5, $6, subject FROM changed ORDER BY seq, relay
)
SELECT relay, seq, last FROM changed ORDER BY seq, relay`
)

// The retries hand locked rows back, those that have a payload. They check again, under the lock,
// whether a row is the head. They also return the last row behind each, which is how far the key
// continues.
const (
	deadRetrySQL = `-- dead.retry
WITH changed AS (
  UPDATE effectonce.outbox_dead d SET state = 'retry' FROM ` + fromSubjects + `
  WHERE d.relay = s.relay AND d.seq = s.seq AND d.state IN ('held', 'behind') AND ` + deadIsHead + `
  RETURNING s.relay, s.seq, s.subject,
    coalesce((SELECT pg_catalog.max(n.seq) FROM effectonce.outbox_dead n WHERE ` + deadSame + ` AND n.seq > d.seq AND n.state = 'behind'), d.seq) AS last` + recorded
	parkedRetrySQL = `-- parked.retry
WITH changed AS (
  UPDATE effectonce.parked_messages d SET state = 'retry', retry_at = clock_timestamp(), released_at = NULL FROM ` + fromSubjects + `
  WHERE d.seq = s.seq AND d.state <> 'retry' AND d.reason <> 'too_large' AND ` + parkedIsHead + `
  RETURNING s.relay, s.seq, s.subject,
    coalesce((SELECT pg_catalog.max(n.seq) FROM effectonce.parked_messages n WHERE ` + parkedSame + ` AND n.seq > d.seq AND n.state = 'behind'), d.seq) AS last` + recorded
)

// deadDiscardSQL marks locked rows that no relay can be publishing: held ones and, with $7, those
// behind a held one. The relay reads neither, and the held row is locked, so it stays held until
// the transaction ends.
const deadDiscardSQL = `-- dead.discard
WITH changed AS (
  UPDATE effectonce.outbox_dead d SET state = 'discard' FROM ` + fromSubjects + `
  WHERE d.relay = s.relay AND d.seq = s.seq AND (d.state = 'held' OR ($7::bool AND d.state = 'behind' AND EXISTS (
    SELECT FROM effectonce.outbox_dead n WHERE ` + deadSame + ` AND n.seq < d.seq AND n.state = 'held')))
  RETURNING s.relay, s.seq, s.subject, s.seq AS last` + recorded

// parkedDiscardSQL deletes locked rows: heads, or whole queues ($7).
const parkedDiscardSQL = `-- parked.discard
WITH changed AS (
  DELETE FROM effectonce.parked_messages d USING ` + fromSubjects + `
  WHERE d.seq = s.seq AND ($7::bool OR ` + parkedIsHead + `)
  RETURNING s.relay, s.seq, s.subject, s.seq AS last` + recorded

// queues are those of rows that were discarded, each with its first row that remains. The statement
// has a snapshot of its own, in which the discarded rows are gone.
const queues = `
FROM (SELECT DISTINCT relay, consumer, topic, partition, hash
  FROM unnest($1::text[], $2::int[], $3::text[], $4::int[], $5::bytea[]) AS q (relay, consumer, topic, partition, hash)) AS q
CROSS JOIN LATERAL (SELECT n.seq, n.state, n.xmin FROM `

// deadPromotedSQL counts the queues whose next row becomes the head when the relay drops the rows.
const deadPromotedSQL = `-- dead.promoted
SELECT` + queues + `effectonce.outbox_dead n WHERE ` + deadOf + ` ORDER BY n.seq LIMIT 1) AS first
WHERE first.state = 'behind'`

// parkedPromotedSQL counts the queues whose next row became the head. The trigger parked_promote
// does that when this transaction deletes: such a row is a version of this transaction.
const parkedPromotedSQL = `-- parked.promoted
SELECT` + queues + `effectonce.parked_messages n WHERE ` + parkedOf + ` ORDER BY n.seq LIMIT 1) AS first
WHERE first.state <> 'behind' AND first.xmin = pg_current_xact_id()::xid`

// The progress of rows that were handed back: for each, the first one that remains, up to the last
// row that was behind it. Null: all of them are done, or an operator discarded the row since then.
const (
	followed = `
SELECT q.relay, q.seq, w.id, w.state, w.reason, w.error,
  w.id IS NULL AND (q.relay, q.seq::text) IN (SELECT coalesce(a.subject->>'relay', ''), a.subject->>'seq'
    FROM effectonce.operator_actions a WHERE a.what = $8 AND a."when" >= $9) AS discarded
FROM unnest($1::text[], $2::int[], $3::text[], $4::int[], $5::bytea[], $6::bigint[], $7::bigint[]) AS q (relay, consumer, topic, partition, hash, seq, last)
LEFT JOIN LATERAL (`
	following = ` AND n.seq BETWEEN q.seq AND q.last ORDER BY n.seq LIMIT 1)
) AS w ON true
ORDER BY q.seq, q.relay`
	deadProgressSQL = `-- dead.progress` + followed + `
  (SELECT n.id, n.state, n.reason, n.error FROM effectonce.outbox_dead n WHERE q.hash IS NULL AND n.state IN ('held', 'behind', 'retry') AND n.relay = q.relay AND n.seq = q.seq)
  UNION ALL
  (SELECT n.id, n.state, n.reason, n.error FROM effectonce.outbox_dead n WHERE ` + deadOf + following
	parkedProgressSQL = `-- parked.progress` + followed + `
  (SELECT n.message_id AS id, n.state, n.reason, n.error FROM effectonce.parked_messages n WHERE q.hash IS NULL AND n.seq = q.seq)
  UNION ALL
  (SELECT n.message_id, n.state, n.reason, n.error FROM effectonce.parked_messages n WHERE ` + parkedOf + following
)
