package pipeline

// shardsSQL reads the cursors with their ticks, and the clock from which a rate is computed. A shard
// that no replica ever took has no cursor: it is at the beginning. A missing tick is null.
const shardsSQL = `-- pipeline.shards
SELECT p.relay, p.shard, p.shards::int, p.stored, CASE WHEN p.lease_until > clock_timestamp() THEN coalesce(p.owner, ''::text) ELSE ''::text END,
  greatest(coalesce(extract(epoch FROM p.lease_until - clock_timestamp()), 0), 0)::float8, p.epoch, p.tick,
  CASE WHEN p.tick > 0 THEN extract(epoch FROM clock_timestamp() - t.created_at)::float8 END, p.floor, p.published,
  t.snapshot::text, t.seq_last, p.next_tick IS NOT NULL, n.snapshot::text, CASE WHEN p.next_tick IS NULL THEN 0 ELSE p.seq END,
  coalesce(p.system_identifier <> here.system, false), extract(epoch FROM clock_timestamp())::float8
FROM (
  SELECT relay, shard, shards, true AS stored, owner, lease_until, epoch, tick, floor, published, next_tick, seq, system_identifier FROM effectonce.outbox_progress_now
  UNION ALL
  SELECT r.relay, s.shard, r.shards, false, NULL, NULL, 0, 0, 0, 0, NULL, 0, NULL
  FROM effectonce.outbox_relays r CROSS JOIN LATERAL generate_series(0, r.shards - 1) AS s (shard)
  WHERE NOT EXISTS (SELECT FROM effectonce.outbox_progress p WHERE p.relay = r.relay AND p.shard = s.shard)
) p CROSS JOIN effectonce.this_cluster() here
LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick
LEFT JOIN effectonce.outbox_ticks n ON n.tick = p.next_tick
WHERE $1::text IS NULL OR p.relay = $1 ORDER BY p.relay, p.shard`

// CutCTE turns a Cut's Args, $1 to $6, into the table cut. It parses the snapshots once.
const CutCTE = `cut AS MATERIALIZED (
  SELECT c.shard, c.tick::pg_snapshot AS tick, c.next::pg_snapshot AS next, c.seq, c.floor
  FROM ROWS FROM (pg_catalog.unnest($1::smallint[]), pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::text[]),
    pg_catalog.unnest($4::bigint[]), pg_catalog.unnest($5::bigint[])) AS c (shard, tick, next, seq, floor))`

// CutJoin finds the progress that applies to a row o: that of its shard.
const CutJoin = `LEFT JOIN cut ON cut.shard = o.shard OPERATOR(pg_catalog.%) $6::int`

// CutPublished reports whether the relay has published a row o. A row that it moved to outbox_dead
// counts as published, too.
const CutPublished = `coalesce(o.seq <= cut.floor OR pg_visible_in_snapshot(o.txid, cut.tick)
    OR o.seq <= cut.seq AND pg_visible_in_snapshot(o.txid, cut.next), false)`

// waitingRows are the committed rows that a relay has not published yet, and those that had to be
// read to find them, as the table waiting, in which waits tells them apart. $1 to $6 are the cut, $7
// the first transaction id that no shard's last tick knows, $8 the transactions that those ticks name
// as open, $9 how far the batches of shards are published (null: none is inside of one).
//
// Each part walks one index. Subqueries hide where it begins: by outdated statistics, few rows were to be sorted.
// Each part stops at $10 rows, so the cost is bounded whatever the backlog.
const waitingRows = `WITH ` + CutCTE + `, page AS (
  (SELECT 1 AS part, ` + waitingColumns + ` FROM effectonce.outbox o WHERE o.txid >= (SELECT $7::text::xid8) ORDER BY o.txid, o.seq LIMIT $10)
  UNION ALL
  (SELECT 2, ` + waitingColumns + ` FROM effectonce.outbox o WHERE o.seq > (SELECT $9::bigint) ORDER BY o.seq LIMIT $10)
  UNION ALL
  (SELECT 3, o.* FROM pg_catalog.unnest($8::text[]::xid8[]) AS open (txid) CROSS JOIN LATERAL (
    SELECT ` + waitingColumns + ` FROM effectonce.outbox o WHERE o.txid = open.txid ORDER BY o.txid, o.seq LIMIT $10) o
   WHERE open.txid < $7::text::xid8 LIMIT $10)
), waiting AS (
  SELECT o.*, NOT ` + CutPublished + ` AND coalesce(o.seq > cut.seq AND cut.next IS NOT NULL, false) = (o.part = 2) AS waits FROM page o ` + CutJoin + `
)`

const waitingColumns = `o.seq, o.txid, o.shard, o.created_at, o.topic, o.key, o.payload, o.headers`

const countSQL = `-- pipeline.count
` + waitingRows + `
SELECT part, (shard OPERATOR(pg_catalog.%) $6::int)::smallint, count(*), count(*) FILTER (WHERE waits),
  greatest(extract(epoch FROM clock_timestamp() - greatest(least(pg_catalog.min(created_at) FILTER (WHERE waits), '2200-01-01'), '1970-01-01')), 0)::float8,
  pg_catalog.min(seq), coalesce(pg_catalog.pg_sequence_last_value('effectonce.outbox_seq_seq'), 0)
FROM waiting GROUP BY 1, 2`

// topicsSQL estimates the part of a record that comes from the row. The JSON text of headers is about
// as long as they are on the wire.
const topicsSQL = `-- pipeline.topics
` + waitingRows + `
SELECT topic, pg_catalog.max(coalesce(octet_length(key), 0) + coalesce(octet_length(payload), 0) + octet_length(headers::text))::bigint
FROM waiting WHERE waits GROUP BY topic`
