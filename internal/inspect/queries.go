package inspect

import "github.com/effectonce/effectonce/migrations"

// shardsSQL is into how many shards a relay ($1) divides the outbox. A row belongs to the shard
// outbox.shard % this number. The one place that knows where the number is.
const shardsSQL = `-- inspect.shards
SELECT 1 WHERE $1::text IS NOT NULL`

// cutSQL reads where all shards of a relay stand, from one snapshot. A tick that is missing is null.
const cutSQL = `-- inspect.cut
SELECT p.shard, t.snapshot::text, p.next_tick IS NOT NULL, n.snapshot::text, p.seq, p.floor, p.system_identifier
FROM effectonce.outbox_progress p
LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick
LEFT JOIN effectonce.outbox_ticks n ON n.tick = p.next_tick
WHERE p.relay = $1 ORDER BY p.shard`

// CutCTE makes the table cut of a Cut's Args, $1 to $6. The snapshots are parsed once.
const CutCTE = `cut AS MATERIALIZED (
  SELECT c.shard, c.tick::pg_snapshot AS tick, c.next::pg_snapshot AS next, c.seq, c.floor
  FROM ROWS FROM (pg_catalog.unnest($1::smallint[]), pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::text[]),
    pg_catalog.unnest($4::bigint[]), pg_catalog.unnest($5::bigint[])) AS c (shard, tick, next, seq, floor))`

// CutJoin finds the progress that decides about a row o: that of its shard.
const CutJoin = `LEFT JOIN cut ON cut.shard = o.shard % $6::int`

// CutPublished tells whether the relay has published a row o. What it moved to outbox_dead counts, too.
const CutPublished = `coalesce(o.seq <= cut.floor OR pg_visible_in_snapshot(o.txid, cut.tick)
    OR o.seq <= cut.seq AND pg_visible_in_snapshot(o.txid, cut.next), false)`

const relaysSQL = `-- inspect.relays
SELECT DISTINCT relay FROM effectonce.outbox_progress ORDER BY relay`

const systemSQL = `-- inspect.system
SELECT system_identifier FROM pg_control_system()`

// rowsSQL finds rows by ID. $2 bounds the search from below.
const rowsSQL = `-- inspect.rows
SELECT o.seq, o.id, o.topic, o.key, o.shard, o.created_at, octet_length(o.payload)
FROM effectonce.outbox o WHERE o.id = ANY ($1::uuid[]) AND o.seq > $2 ORDER BY o.seq LIMIT 1000`

const publishedSQL = `-- inspect.published
WITH ` + CutCTE + `
SELECT o.seq FROM effectonce.outbox o ` + CutJoin + `
WHERE o.seq = ANY ($7::bigint[]) AND ` + CutPublished

const deadSQL = `-- inspect.dead
SELECT relay, seq, id, topic, key, reason, error, attempts, state, died_at
FROM effectonce.outbox_dead WHERE id = ANY ($1::uuid[]) ORDER BY relay, seq LIMIT 1000`

const topicsSQL = `-- inspect.topics
SELECT DISTINCT t.topic FROM effectonce.consumers c CROSS JOIN LATERAL pg_catalog.unnest(c.topics) AS t (topic) ORDER BY 1`

const claimsSQL = `-- inspect.claims
SELECT k.message_id, coalesce(c.name, 'consumer ' || k.consumer), coalesce(c.consumer_group, ''), k.processed_at, k.forever
FROM (
  SELECT message_id, consumer, processed_at, false AS forever FROM effectonce.processed_messages WHERE message_id = ANY ($1::uuid[])
  UNION ALL
  SELECT message_id, consumer, processed_at, true FROM effectonce.processed_forever WHERE message_id = ANY ($1::uuid[])
) k LEFT JOIN effectonce.consumers c ON c.id = k.consumer
ORDER BY k.processed_at, 2`

const attemptsSQL = `-- inspect.attempts
SELECT a.message_id, coalesce(c.name, 'consumer ' || a.consumer), a.attempts, coalesce(a.error, ''), a.updated_at
FROM effectonce.message_attempts a LEFT JOIN effectonce.consumers c ON c.id = a.consumer
WHERE a.message_id = ANY ($1::uuid[]) ORDER BY a.updated_at`

// parkedSQL also finds by where Kafka has the record, since one without an ID is known by that alone.
const parkedSQL = `-- inspect.parked
SELECT seq FROM effectonce.parked_messages WHERE message_id = ANY ($1::uuid[])
UNION
SELECT seq FROM effectonce.parked_messages WHERE topic = $2 AND partition = $3 AND "offset" = $4
ORDER BY seq LIMIT 1000`

// actionsSQL: what operators did to a message, or to a row.
const actionsSQL = `-- inspect.actions
SELECT id, who, what, why, "when", db_role, subject::text FROM effectonce.operator_actions
WHERE subject->>'message_id' = ANY ($1::text[]) OR subject->>'id' = ANY ($1::text[])
  OR what LIKE 'dead.%' AND subject->>'seq' = ANY ($2::text[])
ORDER BY id LIMIT 1000`

const clockSQL = `-- inspect.clock
SELECT clock_timestamp()`

func inSchema(sql, schema string) string { return migrations.InSchema(sql, schema) }
