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

// deadSQL counts each dead row in its shard, at most $2 rows of each of the relays $1.
const deadSQL = `-- pipeline.dead
SELECT k.relay, (d.shard OPERATOR(pg_catalog.%) coalesce(r.shards, 1))::smallint, d.reason, count(*)
FROM pg_catalog.unnest($1::text[]) AS k (relay) CROSS JOIN LATERAL (
  SELECT d.shard, d.reason FROM effectonce.outbox_dead d WHERE d.relay = k.relay AND d.state IN ('held', 'behind', 'retry') LIMIT $2) d
LEFT JOIN effectonce.outbox_relays r ON r.relay = k.relay
GROUP BY 1, 2, 3`

// pausedTopicsSQL reads every relay if $1 is empty. It counts the rows of each topic up to a bound.
const pausedTopicsSQL = `-- pipeline.paused_topics
SELECT p.relay, p.topic, (SELECT count(*) FROM (SELECT FROM effectonce.outbox_dead d WHERE d.relay = p.relay AND d.topic = p.topic AND d.state IN ('held', 'behind', 'retry') LIMIT $2) bounded), p.who, p.why, p.paused_at
FROM effectonce.outbox_paused p WHERE $1 = '' OR p.relay = $1 ORDER BY p.relay, p.topic`

const countConsumersSQL = `-- pipeline.count_consumers
SELECT (SELECT count(*) FROM effectonce.consumers), (SELECT count(*) FROM effectonce.consumer_positions)`

// consumersSQL allows for several names in a group, one for each topic.
const consumersSQL = `-- pipeline.consumers
SELECT c.name, c.consumer_group, c.topics, c.id_rule, (SELECT count(*) FROM effectonce.consumer_positions p
  WHERE p.consumer_group = c.consumer_group AND p.topic = ANY (c.topics))
FROM effectonce.consumers c ORDER BY c.name`

const troubleSQL = `-- pipeline.trouble
SELECT c.name, p.topic, p.partition, coalesce(p.owner, ''), p.trouble, extract(epoch FROM clock_timestamp() - greatest(least(coalesce(p.trouble_since, p.updated_at), '2200-01-01'), '1970-01-01'))::float8
FROM effectonce.consumer_positions p JOIN effectonce.consumers c ON c.consumer_group = p.consumer_group AND p.topic = ANY (c.topics)
WHERE p.trouble IS NOT NULL ORDER BY c.name, p.topic, p.partition LIMIT $1`

// behindSQL returns, for each consumer, how many of its partitions have a position older than $1,
// how many of those no process holds, and the oldest one. It leaves out partitions with a stored
// cause, and topics that an operator paused: other checks report them.
const behindSQL = `-- pipeline.behind
SELECT DISTINCT ON (b.name) b.name, b.topic, b.partition, b.owner, b.seconds, pg_catalog.count(*) OVER (PARTITION BY b.name),
  pg_catalog.count(*) FILTER (WHERE b.owner = ''::text) OVER (PARTITION BY b.name)
FROM (
  SELECT c.name, p.topic, p.partition, CASE WHEN p.released THEN ''::text ELSE coalesce(p.owner, '') END AS owner,
    extract(epoch FROM clock_timestamp() - greatest(least(coalesce(greatest(p.record_time, p.caught_up_at), p.updated_at), '2200-01-01'), '1970-01-01'))::float8 AS seconds
  FROM effectonce.consumer_positions p JOIN effectonce.consumers c ON c.consumer_group = p.consumer_group AND p.topic = ANY (c.topics)
  WHERE p.trouble IS NULL AND NOT EXISTS (SELECT FROM effectonce.consumer_pauses w WHERE w.consumer_group = p.consumer_group AND w.topic = p.topic)
) b
WHERE b.seconds > $1::float8
ORDER BY b.name, b.seconds DESC`

// parkedSQL counts at most $1 rows of each consumer. Only the first parked row of a key is behind no
// other: it holds the key. Rows that a consumer tries again by itself count as "retry" for two hours.
const parkedSQL = `-- pipeline.parked
SELECT c.name, p.reason, count(*),
  pg_catalog.count(p.key) FILTER (WHERE p.state <> 'behind'),
  extract(epoch FROM clock_timestamp() - greatest(least(pg_catalog.min(p.parked_at), '2200-01-01'), '1970-01-01'))::float8
FROM effectonce.consumers c CROSS JOIN LATERAL (
  SELECT topic, partition, key, CASE WHEN state = 'retry' AND parked_at > clock_timestamp() - interval '2 h' THEN 'retry' ELSE reason END AS reason, state, parked_at
  FROM effectonce.parked_messages m WHERE m.consumer = c.id LIMIT $1) p
GROUP BY c.name, p.reason`

const scheduledSQL = `-- pipeline.scheduled
SELECT (SELECT count(*) FROM (SELECT FROM effectonce.outbox_scheduled LIMIT $1) bounded),
  (SELECT count(*) FROM (SELECT FROM effectonce.outbox_scheduled WHERE due_at <= (SELECT clock_timestamp()) AND refused IS NULL LIMIT $1) bounded),
  (SELECT count(*) FROM (SELECT FROM effectonce.outbox_scheduled WHERE refused IS NOT NULL LIMIT $1) bounded),
  greatest(extract(epoch FROM clock_timestamp() - greatest(least(
    (SELECT due_at FROM effectonce.outbox_scheduled WHERE refused IS NULL ORDER BY due_at LIMIT 1),
    (SELECT due_at FROM effectonce.outbox_scheduled WHERE refused IS NOT NULL ORDER BY due_at LIMIT 1), '2200-01-01'), '1970-01-01')), 0)::float8`

// keysSQL counts at most $1 keys of each kind, and reads no keys that are finished and still within
// their window. $2: a key is stuck if no process has worked on it since then.
const keysSQL = `-- pipeline.keys
SELECT running.n, greatest(extract(epoch FROM clock_timestamp() - greatest(least(running.oldest, '2200-01-01'), '1970-01-01')), 0)::float8, running.stuck, running.failing, undecided.indeterminate, undecided.abandoned,
  greatest(coalesce(extract(epoch FROM clock_timestamp() - greatest(least((
    SELECT expires_at FROM effectonce.idempotency_keys WHERE state OPERATOR(pg_catalog.=) 'finished' AND expires_at IS NOT NULL ORDER BY expires_at LIMIT 1), '2200-01-01'), '1970-01-01')), 0), 0)::float8
FROM (
  SELECT count(*) AS n, pg_catalog.min(created_at) AS oldest, count(*) FILTER (
    WHERE due <= clock_timestamp() - $2::interval AND (locked_until IS NULL OR locked_until <= clock_timestamp() - $2::interval)) AS stuck,
    count(*) FILTER (WHERE due > clock_timestamp() AND created_at <= clock_timestamp() - $2::interval AND (locked_until IS NULL OR locked_until <= clock_timestamp())) AS failing
  FROM (SELECT created_at, locked_until, coalesce(retry_at, created_at) AS due FROM effectonce.idempotency_keys
    WHERE state OPERATOR(pg_catalog.=) 'running' ORDER BY coalesce(retry_at, created_at) LIMIT $1) first
) running, (
  SELECT count(*) FILTER (WHERE state OPERATOR(pg_catalog.=) 'indeterminate') AS indeterminate, count(*) FILTER (WHERE state OPERATOR(pg_catalog.=) 'abandoned') AS abandoned
  FROM (SELECT state FROM effectonce.idempotency_keys WHERE state::text IN ('indeterminate', 'abandoned') ORDER BY created_at LIMIT $1) first
) undecided`
