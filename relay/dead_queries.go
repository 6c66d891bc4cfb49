package relay

// The relay reads dead rows that may leave, and never those that wait, of which there may be
// millions. A row may leave when it was handed back or discarded (states retry and discard), or when
// it follows, in its key, a row that may leave, and no row before it is held. The rows that leave are
// the run from the first row of the key to the one before the first held row. What leaves hands its
// state on: the first row that only waited behind it gets the state retry, in the same statement. Only
// the holder of the shard adds rows to a key or removes them, so none is missed.
//
// The conditions on keys compare pairs of hash and seq, and only the index outbox_dead_key is in that
// order. With hash = … the planner would, on outdated statistics, choose the primary key, and filter all
// waiting rows.

// deadSettingsSQL precedes statements on dead rows, in their transaction: see fetchSettingsSQL.
// Their plans do not depend on the parameters. $1 is the run of the server that the lease was taken
// on.
const deadSettingsSQL = `-- relay.dead_settings
SELECT ` + here + `,
  set_config('enable_sort', 'off', true), set_config('enable_incremental_sort', 'off', true), set_config('enable_bitmapscan', 'off', true),
  set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
  set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true), ` + flushed

// skipped is a dead row that holds no other row: see Config.SkipDead.
const skipped = `::bool AND reason IN ('too_large', 'refused', 'bad_headers', 'bad_partition')`

// forTopic is a row that waits for its topic: the condition of the index outbox_dead_waiting.
const forTopic = `state = 'held' AND reason IN ('unknown_topic', 'not_authorized', 'paused')`

// leaves is a row that an operator or the relay released: the condition of the index
// outbox_dead_leaving.
const leaves = `state IN ('retry', 'discard')`

// inKey: the entries of a key in the index, from the first on. Before version 18 a walk over the index ends
// only where the first column of a compared pair passes its end.
const inKey = `d.state <> 'discarded' AND d.relay = $1 AND d.topic = k.topic AND (sha256(d.key), d.seq) >= (k.hash, 0)
      AND (sha256(d.key), d.seq) <= (k.hash, 9223372036854775807)`

const keyOrder = `ORDER BY d.relay, d.topic, sha256(d.key), d.seq`

// deadTopicsSQL lists the topics that have dead rows, with one index lookup for each.
const deadTopicsSQL = `-- relay.dead_topics
WITH RECURSIVE topics AS (
  (SELECT d.topic FROM effectonce.outbox_dead d WHERE d.relay = $1 AND d.state <> 'discarded' ORDER BY d.topic LIMIT 1)
  UNION ALL
  SELECT (SELECT d.topic FROM effectonce.outbox_dead d WHERE d.relay = $1 AND d.state <> 'discarded' AND d.topic > t.topic ORDER BY d.topic LIMIT 1)
  FROM topics t WHERE t.topic IS NOT NULL
)
SELECT topic FROM topics WHERE topic IS NOT NULL`

// waitingTopicsSQL lists the topics that rows wait for, and why, with one index lookup for each.
const waitingTopicsSQL = `-- relay.waiting_topics
WITH RECURSIVE waiting AS (
  (SELECT topic, reason, waits_for FROM effectonce.outbox_dead WHERE relay = $1 AND ` + forTopic + ` ORDER BY topic, reason, waits_for LIMIT 1)
  UNION ALL
  SELECT next.* FROM waiting w CROSS JOIN LATERAL (
    SELECT d.topic, d.reason, d.waits_for FROM effectonce.outbox_dead d
    WHERE d.relay = $1 AND ` + forTopic + ` AND (d.topic, d.reason, d.waits_for) > (w.topic, w.reason, w.waits_for) ORDER BY d.topic, d.reason, d.waits_for LIMIT 1) AS next
)
SELECT topic, reason, waits_for FROM waiting`

// retryTopicSQL hands back the next $5 rows that waited for a topic. A million rows of a topic are a
// million updates; one statement for all of them would hold all their locks until it ends. It locks
// rows in the order of seq; otherwise it could deadlock with operators. A row that an operator has
// locked is left to a later poll.
const retryTopicSQL = `-- relay.retry_topic
WITH batch AS MATERIALIZED (
  SELECT seq FROM effectonce.outbox_dead
  WHERE relay = $1 AND topic = $2 AND reason = $3 AND waits_for = $4 AND ` + forTopic + ` AND shard OPERATOR(pg_catalog.%) $6::int = $7::int
  ORDER BY seq LIMIT $5 FOR UPDATE SKIP LOCKED
), handed AS (
  UPDATE effectonce.outbox_dead d SET state = 'retry' FROM batch b WHERE d.relay = $1 AND d.seq = b.seq
)
SELECT count(*) FROM batch`

// releasedSQL reports whether some row may leave.
const releasedSQL = `-- relay.released
SELECT EXISTS (
  SELECT FROM effectonce.outbox_dead r CROSS JOIN LATERAL (SELECT r.topic, sha256(r.key) AS hash OFFSET 0) AS k
  WHERE r.relay = $1 AND r.` + leaves + ` AND r.shard OPERATOR(pg_catalog.%) $2::int = $3::int AND (r.key IS NULL OR EXISTS (
    SELECT FROM (SELECT d.state FROM effectonce.outbox_dead d
      WHERE ` + inKey + ` AND NOT (d.state = 'held' AND $4` + skipped + `) ` + keyOrder + ` LIMIT 1) AS first
    WHERE first.state <> 'held'))
  ORDER BY r.seq LIMIT 1)`

// releasableSQL lists keys that may have rows to publish, and the rows. $2 is where the last page
// ended: under an old snapshot, removed entries stay in the index, and each page would walk over them
// again. $3 bounds the keys and the rows of a key. A key is listed once, at the place of its first
// entry; at is the position of the page if it is cut behind the row. Without a row: nothing of the key
// may leave. A row without a key is a key of its own. The join keeps the order of the keys, and the
// relay checks it.
const releasableSQL = `-- relay.releasable
WITH found AS (
  SELECT r.seq AS at, r.topic, sha256(r.key) AS hash FROM effectonce.outbox_dead r
  WHERE r.relay = $1 AND r.` + leaves + ` AND r.seq > $2 AND r.shard OPERATOR(pg_catalog.%) $4::int = $5::int ORDER BY r.seq LIMIT $3
), keys AS MATERIALIZED (
  SELECT pg_catalog.min(at) AS at, topic, hash FROM found GROUP BY topic, hash, CASE WHEN hash IS NULL THEN at END
  ORDER BY 1
)
SELECT k.at, run.seq, run.id, k.topic, run.key, run.payload, run.headers_text, run.created_at, coalesce(run.reason, ''), coalesce(run.state, '')
FROM keys k LEFT JOIN LATERAL (
  (SELECT * FROM (
    SELECT d.seq, d.id, d.key, d.payload, d.headers::text AS headers_text, d.created_at, d.reason, d.state,
      bool_or(d.state = 'held') OVER (ORDER BY d.relay, d.topic, d.hash, d.seq) AS blocked
    FROM (SELECT d.*, sha256(d.key) AS hash FROM effectonce.outbox_dead d
      WHERE k.hash IS NOT NULL AND ` + inKey + ` AND NOT (d.state = 'held' AND $6` + skipped + `) ` + keyOrder + ` LIMIT $3) AS d
  ) AS numbered WHERE NOT blocked)
  UNION ALL
  (SELECT d.seq, d.id, d.key, d.payload, d.headers::text, d.created_at, d.reason, d.state, false FROM effectonce.outbox_dead d
   WHERE k.hash IS NULL AND d.relay = $1 AND d.seq = k.at AND d.` + leaves + `)
) AS run ON true
LIMIT $3`

// holdingSQL finds the rows of a page that follow a dead row of their key.
const holdingSQL = `-- relay.holding
SELECT k.place::int
FROM (SELECT topic, sha256(key) AS hash, place FROM unnest($2::text[], $3::bytea[]) WITH ORDINALITY AS page (topic, key, place)) AS k
CROSS JOIN LATERAL (SELECT FROM effectonce.outbox_dead d
  WHERE ` + inKey + ` AND NOT ($4` + skipped + `) ` + keyOrder + ` LIMIT 1) AS d`

// ownedSQL finds the rows of a page that are in outbox_dead: progress went back behind them. A number
// of a row may be given to another one after a failover, an ID is not.
const ownedSQL = `-- relay.owned
SELECT k.place::int FROM unnest($2::bigint[], $3::uuid[]) WITH ORDINALITY AS k (seq, id, place)
CROSS JOIN LATERAL (SELECT FROM effectonce.outbox_dead d WHERE d.relay = $1 AND d.seq = k.seq AND d.id = k.id) AS d`

// lastDeadSQL returns the largest number of a dead row of any shard, also of a discarded one.
const lastDeadSQL = `-- relay.last_dead
SELECT coalesce((SELECT seq FROM effectonce.outbox_dead WHERE relay = $1 ORDER BY seq DESC LIMIT 1), 0)`

// moveToDeadSQL copies rows, those that are not behind another one with state $6. It looks up each row:
// without deadSettingsSQL the planner reads the whole outbox for each page.
const moveToDeadSQL = `-- relay.move_to_dead
INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, waits_for, state)
SELECT $1, o.seq, o.id, o.topic, o.key, o.payload, o.headers, o.created_at, d.reason, d.error, d.waits_for,
  CASE d.reason WHEN 'behind' THEN 'behind' ELSE $6 END
FROM unnest($2::bigint[], $3::text[], $4::text[], $5::text[]) AS d (seq, reason, error, waits_for)
CROSS JOIN LATERAL (SELECT * FROM effectonce.outbox WHERE seq = d.seq LIMIT 1) AS o
ON CONFLICT (relay, seq) DO UPDATE SET id = excluded.id, topic = excluded.topic, key = excluded.key, payload = excluded.payload, headers = excluded.headers,
  created_at = excluded.created_at, reason = excluded.reason, error = excluded.error, waits_for = excluded.waits_for, state = excluded.state, attempts = 1, died_at = clock_timestamp()
WHERE outbox_dead.id <> excluded.id AND outbox_dead.state = 'discarded' -- of a relay by the same name, before the numbers began again`

// next, locked and mine are in each statement that changes dead rows. leaving are the rows that leave
// their keys; next are the rows that get the state retry from them. $5 is Config.SkipDead. What changes
// (changes, and next) is locked first, in the order of seq, as operators lock them: an operator who has locked them may take long, and
// must not keep the lease from being renewed. mine is whether the lease is the caller's, epoch $3 of shard
// $2 in run $4 of the server. The next holder waits until the statement has ended: what it adds behind
// rows that leave would be missed.
func next(changes string) string {
	return `next AS MATERIALIZED (
  SELECT first.seq FROM (SELECT DISTINCT topic, sha256(key) AS hash FROM leaving WHERE key IS NOT NULL) AS k
  CROSS JOIN LATERAL (SELECT d.seq, d.state FROM effectonce.outbox_dead d
    WHERE ` + inKey + ` AND d.seq <> ALL (ARRAY(SELECT seq FROM leaving)) AND NOT (d.state = 'held' AND $5` + skipped + `) ` + keyOrder + ` LIMIT 1) AS first
  WHERE first.state = 'behind'),
locked AS MATERIALIZED (
  SELECT seq FROM effectonce.outbox_dead
  WHERE relay = $1 AND seq = ANY (ARRAY(SELECT seq FROM ` + changes + ` UNION ALL SELECT seq FROM next)) ORDER BY seq FOR UPDATE),
mine AS MATERIALIZED (
  SELECT FROM effectonce.outbox_progress p
  WHERE p.relay = $1 AND p.shard = $2 AND p.epoch = $3 AND $4::text = ` + serverRun + ` AND (SELECT count(*) FROM locked) >= 0 FOR SHARE OF p),
handed AS (UPDATE effectonce.outbox_dead d SET state = 'retry' FROM mine CROSS JOIN next WHERE d.relay = $1 AND d.seq = next.seq AND d.state = 'behind')`
}

// removeDeadSQL deletes rows that were published ($6), and sets aside those that an operator discarded
// ($7), if the lease is the caller's. It reports whether it is.
func removeDeadSQL() string {
	return `-- relay.remove_dead
WITH leaving AS MATERIALIZED (
  SELECT seq, topic, key FROM effectonce.outbox_dead
  WHERE relay = $1 AND seq = ANY ($6::bigint[] OPERATOR(pg_catalog.||) $7::bigint[]) AND (state = 'discard' OR seq = ANY ($6))),
` + next("leaving") + `,
gone AS (DELETE FROM effectonce.outbox_dead d USING mine CROSS JOIN leaving l WHERE d.relay = $1 AND d.seq = l.seq AND d.seq = ANY ($6)),
dropped AS (UPDATE effectonce.outbox_dead d SET state = 'discarded' FROM mine CROSS JOIN leaving l WHERE d.relay = $1 AND d.seq = l.seq AND d.seq = ANY ($7) AND d.state = 'discard')
SELECT EXISTS (SELECT FROM mine)`
}

// holdAgainSQL holds released rows again if the lease is the caller's, and reports whether it is. A row
// that holds no other row (Config.SkipDead) leaves its key.
func holdAgainSQL() string {
	return `-- relay.hold_again
WITH again AS MATERIALIZED (
  SELECT d.seq, d.topic, d.key, f.reason, f.error, f.waits_for
  FROM effectonce.outbox_dead d JOIN unnest($6::bigint[], $7::text[], $8::text[], $9::text[]) AS f (seq, reason, error, waits_for) USING (seq)
  WHERE d.relay = $1),
leaving AS MATERIALIZED (SELECT * FROM again WHERE $5` + skipped + `),
` + next("again") + `,
held AS (UPDATE effectonce.outbox_dead d SET state = 'held', reason = a.reason, error = a.error, waits_for = a.waits_for, attempts = d.attempts + 1
  FROM mine CROSS JOIN again a WHERE d.relay = $1 AND d.seq = a.seq)
SELECT EXISTS (SELECT FROM mine)`
}

// pruneDiscardedSQL forgets discarded rows that the outbox has no longer, $1 at a time, of all relays.
const pruneDiscardedSQL = `-- relay.prune_discarded
DELETE FROM effectonce.outbox_dead WHERE (relay, seq) IN (
  SELECT relay, seq FROM effectonce.outbox_dead
  WHERE state = 'discarded' AND seq < coalesce((SELECT pg_catalog.min(seq) FROM effectonce.outbox), 9223372036854775807) ORDER BY seq LIMIT $1)`
