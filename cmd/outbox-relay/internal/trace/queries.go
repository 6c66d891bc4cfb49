package trace

import (
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
)

// rowsSQL finds rows by ID. $2 bounds the search from below.
const rowsSQL = `-- trace.rows
SELECT o.seq, o.id, o.topic, o.key, o.shard, o.created_at, octet_length(o.payload)
FROM effectonce.outbox o WHERE o.id = ANY ($1::uuid[]) AND o.seq > $2 ORDER BY o.seq LIMIT 1000`

const publishedSQL = `-- trace.published
WITH ` + pipeline.CutCTE + `
SELECT o.seq FROM effectonce.outbox o ` + pipeline.CutJoin + `
WHERE o.seq = ANY ($7::bigint[]) AND ` + pipeline.CutPublished

const scheduledSQL = `-- trace.scheduled
SELECT id, topic, key, due_at, created_at, octet_length(payload)::bigint, greatest(extract(epoch FROM clock_timestamp() - greatest(least(due_at, '2200-01-01'), '1970-01-01')), 0)::float8, refused
FROM effectonce.outbox_scheduled WHERE id = ANY ($1::uuid[]) ORDER BY due_at, id, topic LIMIT 1000`

const lockLimitSQL = `-- trace.lock_limit
SELECT set_config('lock_timeout', '1s', true)`

// topicsSQL lists, with each topic, what it is called in IDs: see consumer.Config.Aliases.
const topicsSQL = `-- trace.topics
SELECT DISTINCT t.topic, c.id_rule, coalesce(t.alias, t.topic) FROM effectonce.consumers c CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(c.topics), pg_catalog.unnest(c.aliases)) AS t (topic, alias)
WHERE t.topic IS NOT NULL ORDER BY 1, 2`

const claimsSQL = `-- trace.claims
SELECT k.message_id, coalesce(c.name, 'consumer ' || k.consumer::text), coalesce(c.consumer_group, ''), k.processed_at, k.forever
FROM (
  SELECT message_id, consumer, processed_at, false AS forever FROM effectonce.processed_messages WHERE message_id = ANY ($1::uuid[])
  UNION ALL
  SELECT message_id, consumer, processed_at, true FROM effectonce.processed_forever WHERE message_id = ANY ($1::uuid[])
) k LEFT JOIN effectonce.consumers c ON c.id = k.consumer
ORDER BY k.processed_at, 2`

// pastSQL finds consumers whose position is past an offset.
const pastSQL = `-- trace.passed
SELECT c.name, c.consumer_group, p.next_offset, extract(epoch FROM c.dedup_window)::float8
FROM effectonce.consumer_positions p JOIN effectonce.consumers c ON c.consumer_group = p.consumer_group AND p.topic = ANY (c.topics)
WHERE p.topic = $1::text AND p.partition = $2::int AND p.next_offset > $3::bigint ORDER BY c.name`

// parkedSQL also finds messages by the places of their records in Kafka: a message without an ID, and
// one whose ID another message has, is known by that alone.
const parkedSQL = `-- trace.parked
SELECT seq FROM effectonce.parked_messages WHERE message_id = ANY ($1::uuid[])
UNION
SELECT p.seq FROM unnest($2::text[], $3::int[], $4::bigint[]) AS r (topic, partition, at)
JOIN effectonce.parked_messages p ON p.topic = r.topic AND p.partition = r.partition AND p."offset" = r.at
ORDER BY seq LIMIT 1000`

// actionsSQL reads what operators did to a message, or to a row.
const actionsSQL = `-- trace.actions
SELECT id, who, stated, what, why, "when", db_role, subject::text FROM effectonce.operator_actions
WHERE subject->>'message_id' = ANY ($1::text[]) OR subject->>'id' = ANY ($1::text[])
  OR what LIKE 'dead.%' AND subject->>'seq' = ANY ($2::text[])
ORDER BY id LIMIT 1000`

const clockSQL = `-- trace.clock
SELECT clock_timestamp()`

const snapshotSQL = `-- trace.snapshot
SELECT pg_current_snapshot()::text`

const tailColumns = `o.seq, o.id, o.topic, o.key, o.created_at, octet_length(o.payload)::bigint, CASE WHEN $3 > 0 THEN substring(o.payload FROM 1 FOR $3) END`

const tailFilter = `($1::text IS NULL OR o.topic = $1) AND ($2::bytea IS NULL OR o.key = $2)`

// tailSQL reads the rows that became visible since the snapshot $6, and the statement's own
// snapshot. $4 is that snapshot's xmax, $5 its open transactions. Each branch walks the index on
// txid.
const tailSQL = `-- trace.tail
WITH now AS MATERIALIZED (SELECT pg_current_snapshot()::text AS snapshot, $6::text::pg_snapshot AS since)
SELECT now.snapshot, page.* FROM now LEFT JOIN (
  SELECT ` + tailColumns + ` FROM effectonce.outbox o
  WHERE (o.txid >= $4::text::xid8 OR o.txid = ANY ($5::text[]::xid8[])) AND ` + tailFilter + `
    AND NOT pg_visible_in_snapshot(o.txid, (SELECT since FROM now))
) page ON true ORDER BY page.seq`

// historySQL reads the rows behind $4 that are visible in the snapshot $5.
const historySQL = `-- trace.history
SELECT NULL::text, ` + tailColumns + ` FROM effectonce.outbox o
WHERE o.seq > (SELECT $4::bigint) AND ` + tailFilter + ` AND pg_visible_in_snapshot(o.txid, $5::text::pg_snapshot)
ORDER BY o.seq LIMIT $6`

const positionsSQL = `-- trace.positions
SELECT consumer_group, topic, partition, next_offset, epoch, coalesce(owner, ''), released, record_time, caught_up_at,
  extract(epoch FROM clock_timestamp() - greatest(least(updated_at, '2200-01-01'), '1970-01-01'))::float8, coalesce(trouble, ''),
  EXISTS (SELECT FROM effectonce.consumer_pauses w WHERE w.consumer_group = p.consumer_group AND w.topic = p.topic), resume_at
FROM effectonce.consumer_positions p
WHERE ($1::text IS NULL OR consumer_group = $1) AND ($2::text IS NULL OR topic = $2)
ORDER BY consumer_group, topic, partition LIMIT 100000`

const sinceSQL = `-- trace.since
SELECT clock_timestamp(), clock_timestamp() - $1::interval`

// outboxSQL reads a page of the outbox in the order of seq, from behind $7. The page is cut before
// the join, so that the planner cannot sort the table for it. It returns only headers that ask for a
// partition.
const outboxSQL = `-- trace.outbox
WITH ` + pipeline.CutCTE + `
SELECT o.seq, o.id, o.topic, o.key, o.created_at, CASE WHEN pg_catalog.strpos(o.headers::text, 'effectonce-partition'::text) OPERATOR(pg_catalog.>) 0 THEN o.headers::text END AS headers_text, ` + pipeline.CutPublished + `
FROM (
  SELECT * FROM effectonce.outbox
  WHERE seq > $7 AND ($8::timestamptz IS NULL OR created_at >= $8) AND ($9::text[] IS NULL OR topic = ANY ($9))
  ORDER BY seq LIMIT $10
) o ` + pipeline.CutJoin + `
ORDER BY o.seq`

// unpublishedSQL lists rows that the relay has passed and that are in no topic: dead rows, and rows
// that an operator discarded. It is read after progress: a row that leaves outbox_dead in between
// is published.
const unpublishedSQL = `-- trace.unpublished
SELECT seq FROM effectonce.outbox_dead WHERE relay = $1 ORDER BY seq`

const groupPositionsSQL = `-- trace.group_positions
SELECT topic, partition, next_offset FROM effectonce.consumer_positions WHERE consumer_group = $1 AND next_offset IS NOT NULL`

// consumersSQL returns a null window for forever.
const consumersSQL = `-- trace.consumers
SELECT c.id, t.topic, c.id_rule, extract(epoch FROM c.dedup_window)::float8, coalesce(t.alias, t.topic)
FROM effectonce.consumers c CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(c.topics), pg_catalog.unnest(c.aliases)) AS t (topic, alias)
WHERE c.consumer_group = $1 AND t.topic IS NOT NULL`

// unclaimedSQL returns for which of the records $3 none of the consumers $1 has claimed an ID, $2.
const unclaimedSQL = `-- trace.unclaimed
SELECT m.record FROM unnest($2::uuid[], $3::int[]) AS m (id, record) GROUP BY m.record HAVING NOT pg_catalog.bool_or(
  EXISTS (SELECT FROM effectonce.processed_messages p WHERE p.message_id = m.id AND p.consumer = ANY ($1::int[]))
  OR EXISTS (SELECT FROM effectonce.processed_forever p WHERE p.message_id = m.id AND p.consumer = ANY ($1::int[])))
ORDER BY m.record`
