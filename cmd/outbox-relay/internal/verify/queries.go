package verify

import "github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"

const sinceSQL = `-- verify.since
SELECT clock_timestamp(), clock_timestamp() - $1::interval`

// rowsSQL reads a page of the outbox in the order of seq, from behind $7. The page is cut before
// the join, so that the planner cannot sort the table for it. It returns only headers that ask for a
// partition.
const rowsSQL = `-- verify.rows
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
const unpublishedSQL = `-- verify.unpublished
SELECT seq FROM effectonce.outbox_dead WHERE relay = $1 ORDER BY seq`

const positionsSQL = `-- verify.positions
SELECT topic, partition, next_offset FROM effectonce.consumer_positions WHERE consumer_group = $1 AND next_offset IS NOT NULL`

// consumersSQL returns a null window for forever.
const consumersSQL = `-- verify.consumers
SELECT c.id, t.topic, c.id_rule, extract(epoch FROM c.dedup_window)::float8, coalesce(t.alias, t.topic)
FROM effectonce.consumers c CROSS JOIN LATERAL ROWS FROM (pg_catalog.unnest(c.topics), pg_catalog.unnest(c.aliases)) AS t (topic, alias)
WHERE c.consumer_group = $1 AND t.topic IS NOT NULL`

// unclaimedSQL returns for which of the records $3 none of the consumers $1 has claimed an ID, $2.
const unclaimedSQL = `-- verify.unclaimed
SELECT m.record FROM unnest($2::uuid[], $3::int[]) AS m (id, record) GROUP BY m.record HAVING NOT pg_catalog.bool_or(
  EXISTS (SELECT FROM effectonce.processed_messages p WHERE p.message_id = m.id AND p.consumer = ANY ($1::int[]))
  OR EXISTS (SELECT FROM effectonce.processed_forever p WHERE p.message_id = m.id AND p.consumer = ANY ($1::int[])))
ORDER BY m.record`
