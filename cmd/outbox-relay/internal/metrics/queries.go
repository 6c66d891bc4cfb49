package metrics

// limitsSQL begins each transaction. A reading that would wait, behind a migration or a truncation,
// gives up soon. The time is for the difference between the clocks.
const limitsSQL = `-- metrics.limits
SELECT pg_catalog.set_config('statement_timeout', $1, true), pg_catalog.set_config('lock_timeout', $2, true), clock_timestamp()`

const deadSQL = `-- metrics.dead
SELECT reason, state, count(*)::float8 FROM (SELECT reason, state FROM effectonce.outbox_dead WHERE relay = $1 AND state IN ('held', 'behind', 'retry') LIMIT $2) bounded
GROUP BY reason, state`

const shardsSQL = `-- metrics.shards
SELECT coalesce((SELECT shards FROM effectonce.outbox_relays WHERE relay = $1), 1)::float8`

const pausedSQL = `-- metrics.paused
SELECT count(*)::float8 FROM effectonce.outbox_paused WHERE relay = $1`

// sizeSQL includes indexes and TOAST, and partitions if there are any.
const sizeSQL = `-- metrics.size
SELECT coalesce(
  (SELECT pg_catalog.sum(pg_catalog.pg_total_relation_size(relid)) FROM pg_catalog.pg_partition_tree('effectonce.outbox'::regclass)),
  pg_catalog.pg_total_relation_size('effectonce.outbox'::regclass))::float8`

// transactionsSQL finds the oldest transaction that has an id, in a session or prepared. Null: the
// role does not see other roles' sessions, so 0 would be a guess.
const transactionsSQL = `-- metrics.transactions
SELECT CASE WHEN pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') THEN greatest(extract(epoch FROM clock_timestamp() - least(
  (SELECT pg_catalog.min(xact_start) FROM pg_stat_activity WHERE backend_xid IS NOT NULL),
  (SELECT pg_catalog.min(prepared) FROM pg_prepared_xacts))), 0)::float8 END`

const parkedSQL = `-- metrics.parked
SELECT c.consumer_group, p.topic, p.reason, count(*)::float8
FROM effectonce.consumers c CROSS JOIN LATERAL (
  SELECT topic, CASE WHEN state = 'retry' AND (parked_at > clock_timestamp() - interval '2 h'
    OR EXISTS (SELECT FROM effectonce.consumer_pauses w WHERE w.consumer_group = c.consumer_group AND w.topic = m.topic)) THEN 'retry' ELSE reason END AS reason
  FROM effectonce.parked_messages m WHERE m.consumer = c.id LIMIT $1) p
GROUP BY c.consumer_group, p.topic, p.reason`

const pausesSQL = `-- metrics.pauses
SELECT consumer_group, count(*)::float8 FROM effectonce.consumer_pauses GROUP BY consumer_group`

// positionsSQL: a position is as old as the last record before it, or as the last time when it was
// at the end of its partition. The oldest come first, so the limit leaves out the youngest.
const positionsSQL = `-- metrics.positions
SELECT consumer_group, topic, partition::text,
  greatest(extract(epoch FROM clock_timestamp() - greatest(least(coalesce(greatest(record_time, caught_up_at), updated_at), '2200-01-01'), '1970-01-01')), 0)::float8 AS seconds
FROM effectonce.consumer_positions p WHERE NOT EXISTS (SELECT FROM effectonce.consumer_pauses w WHERE w.consumer_group = p.consumer_group AND w.topic = p.topic)
ORDER BY seconds DESC LIMIT $1`
