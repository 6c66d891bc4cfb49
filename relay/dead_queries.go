package relay

// The relay reads dead rows that may leave, and never those that wait, of which there may be
// millions. A row may leave when it was handed back (state retry), or when it follows, in its key,
// a row that may leave, and no row before it is held. So the relay checks a key when one of its
// rows is in state retry, or when the key lost a row (outbox_dead_freed). The rows that leave are
// the run from the first row of the key to the one before the first held row.
//
// The conditions on keys compare whole entries of the index outbox_dead_key, the only index in that
// order. On outdated statistics the planner would otherwise choose the primary key, and filter all
// waiting rows.

// deadSettingsSQL precedes statements on dead rows, in their transaction: see fetchSettingsSQL.
// Their plans do not depend on the parameters. $1 is the run of the server that the lease was taken
// on.
const deadSettingsSQL = `-- relay.dead_settings
SELECT ` + here + `,
  set_config('enable_sort', 'off', true), set_config('enable_incremental_sort', 'off', true), set_config('enable_bitmapscan', 'off', true),
  set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
  set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)`

// skipped is a dead row that holds no other row: see Config.SkipDead.
const skipped = `::bool AND reason IN ('too_large', 'refused', 'bad_headers', 'bad_partition')`

// forTopic is a row that waits for its topic: the condition of the index outbox_dead_waiting.
const forTopic = `state = 'held' AND reason IN ('unknown_topic', 'not_authorized', 'paused')`

// inKey: the entries of a key in the index, from the first on.
const inKey = `(d.relay, d.topic, sha256(d.key), d.seq) >= ($1, k.topic, k.hash, 0)
      AND (d.relay, d.topic, sha256(d.key), d.seq) <= ($1, k.topic, k.hash, 9223372036854775807)`

const keyOrder = `ORDER BY d.relay, d.topic, sha256(d.key), d.seq`

// deadTopicsSQL lists the topics that have dead rows, with one index lookup for each.
const deadTopicsSQL = `-- relay.dead_topics
WITH RECURSIVE topics AS (
  (SELECT d.topic FROM effectonce.outbox_dead d WHERE d.relay = $1 ORDER BY d.topic LIMIT 1)
  UNION ALL
  SELECT (SELECT d.topic FROM effectonce.outbox_dead d WHERE d.relay = $1 AND d.topic > t.topic ORDER BY d.topic LIMIT 1)
  FROM topics t WHERE t.topic IS NOT NULL
)
SELECT topic FROM topics WHERE topic IS NOT NULL`

// waitingTopicsSQL lists the topics that rows wait for, and why, with one index lookup for each.
const waitingTopicsSQL = `-- relay.waiting_topics
WITH RECURSIVE waiting AS (
  (SELECT topic, reason FROM effectonce.outbox_dead WHERE relay = $1 AND ` + forTopic + ` ORDER BY topic, reason LIMIT 1)
  UNION ALL
  SELECT next.topic, next.reason FROM waiting w CROSS JOIN LATERAL (
    SELECT d.topic, d.reason FROM effectonce.outbox_dead d
    WHERE d.relay = $1 AND ` + forTopic + ` AND (d.topic, d.reason) > (w.topic, w.reason) ORDER BY d.topic, d.reason LIMIT 1) AS next
)
SELECT topic, reason FROM waiting`

// retryTopicSQL hands back the next $5 rows that waited for a topic, behind seq $4. A million rows
// of a topic are a million updates; one statement for all of them would hold all their locks until
// it ends. It locks rows in the order of seq; otherwise it could deadlock with operators. A row
// that an operator has locked is left to a later poll.
const retryTopicSQL = `-- relay.retry_topic
WITH batch AS MATERIALIZED (
  SELECT seq FROM effectonce.outbox_dead
  WHERE relay = $1 AND topic = $2 AND reason = $3 AND ` + forTopic + ` AND seq > $4 AND shard OPERATOR(pg_catalog.%) $6::int = $7::int
  ORDER BY seq LIMIT $5 FOR UPDATE SKIP LOCKED
), handed AS (
  UPDATE effectonce.outbox_dead d SET state = 'retry' FROM batch b WHERE d.relay = $1 AND d.seq = b.seq
)
SELECT count(*), coalesce(pg_catalog.max(seq), 0) FROM batch`

// releasedSQL reports whether some row may leave, or a key lost a row.
const releasedSQL = `-- relay.released
SELECT EXISTS (SELECT FROM effectonce.outbox_dead_freed WHERE relay = $1 AND get_byte(hash, 0) % $2::int = $3::int)
  OR EXISTS (
    SELECT FROM effectonce.outbox_dead r CROSS JOIN LATERAL (SELECT r.topic, sha256(r.key) AS hash OFFSET 0) AS k
    WHERE r.relay = $1 AND r.state = 'retry' AND r.shard OPERATOR(pg_catalog.%) $2::int = $3::int AND (r.key IS NULL OR EXISTS (
      SELECT FROM (SELECT d.state FROM effectonce.outbox_dead d
        WHERE ` + inKey + ` AND NOT (d.state = 'held' AND $4` + skipped + `) ` + keyOrder + ` LIMIT 1) AS first
      WHERE first.state <> 'held'))
    ORDER BY r.seq LIMIT 1)`

// releasableSQL lists keys that may have rows to publish, and the rows. $2 and $3 are where the
// last page ended among the entries of outbox_dead_freed and among the rows in state retry: under
// an old snapshot, removed entries stay in the indexes, and each page would walk over them again.
// $4 bounds the keys and the rows of a key. A key is listed once, at the place of its first entry;
// place and at are the position of the page if it is cut behind the row. Without a row: nothing of
// the key may leave. A row without a key is a key of its own. The join keeps the order of the keys,
// and the relay checks it.
const releasableSQL = `-- relay.releasable
WITH found AS (
  (SELECT 1 AS place, f.id AS at, f.topic, f.hash FROM effectonce.outbox_dead_freed f
   WHERE f.relay = $1 AND f.id > $2 AND get_byte(f.hash, 0) % $5::int = $6::int ORDER BY f.id LIMIT $4)
  UNION ALL
  (SELECT 2, r.seq, r.topic, sha256(r.key) FROM effectonce.outbox_dead r
   WHERE r.relay = $1 AND r.state = 'retry' AND r.seq > $3 AND r.shard OPERATOR(pg_catalog.%) $5::int = $6::int ORDER BY r.seq LIMIT $4)
), keys AS MATERIALIZED (
  SELECT pg_catalog.min(place) AS place, (pg_catalog.array_agg(at ORDER BY place, at))[1] AS at, topic, hash, coalesce(pg_catalog.array_agg(at) FILTER (WHERE place = 1), '{}') AS freed
  FROM found GROUP BY topic, hash, CASE WHEN hash IS NULL THEN at END
  ORDER BY 1, 2
)
SELECT k.place::smallint, k.at, k.freed, run.seq, run.id, k.topic, run.key, run.payload, run.headers_text, run.created_at, coalesce(run.reason, '')
FROM keys k LEFT JOIN LATERAL (
  (SELECT * FROM (
    SELECT d.seq, d.id, d.key, d.payload, d.headers::text AS headers_text, d.created_at, d.reason,
      bool_or(d.state = 'held') OVER (ORDER BY d.relay, d.topic, d.hash, d.seq) AS blocked
    FROM (SELECT d.*, sha256(d.key) AS hash FROM effectonce.outbox_dead d
      WHERE k.hash IS NOT NULL AND ` + inKey + ` AND NOT (d.state = 'held' AND $7` + skipped + `) ` + keyOrder + ` LIMIT $4) AS d
  ) AS numbered WHERE NOT blocked)
  UNION ALL
  (SELECT d.seq, d.id, d.key, d.payload, d.headers::text, d.created_at, d.reason, false FROM effectonce.outbox_dead d
   WHERE k.hash IS NULL AND d.relay = $1 AND d.seq = k.at AND d.state = 'retry')
) AS run ON true
LIMIT $4`

// holdingSQL finds the rows of a page that follow a dead row of their key.
const holdingSQL = `-- relay.holding
SELECT k.place::int
FROM (SELECT topic, sha256(key) AS hash, place FROM unnest($2::text[], $3::bytea[]) WITH ORDINALITY AS page (topic, key, place)) AS k
CROSS JOIN LATERAL (SELECT FROM effectonce.outbox_dead d
  WHERE ` + inKey + ` AND NOT ($4` + skipped + `) ` + keyOrder + ` LIMIT 1) AS d`

// forgetFreedSQL removes entries whose keys were checked, if the epoch is still the caller's. An
// earlier statement read them; the rows behind them were published and removed. A holder that lost
// its shard removes none: it may have checked the key before the next holder moved a row behind it.
const forgetFreedSQL = `-- relay.forget_freed
DELETE FROM effectonce.outbox_dead_freed f WHERE f.relay = $1 AND f.id = ANY ($4)
  AND EXISTS (SELECT FROM effectonce.outbox_progress p WHERE p.relay = $1 AND p.shard = $2 AND p.epoch = $3)`

// freeSkippedSQL makes the relay check the keys of dead rows that hold no other row now, and did
// before: see Config.SkipDead.
const freeSkippedSQL = `-- relay.free_skipped
INSERT INTO effectonce.outbox_dead_freed (relay, topic, hash)
SELECT DISTINCT d.relay, d.topic, sha256(d.key) FROM effectonce.outbox_dead d
WHERE d.relay = $1 AND d.shard OPERATOR(pg_catalog.%) $2::int = $3::int AND d.key IS NOT NULL AND d.state = 'held' AND true` + skipped
