package relays

// listSQL: a replica was last known to work when it renewed a lease, stored progress or reported
// that it is alive.
const listSQL = `-- relays.list
SELECT known.relay, coalesce(r.shards, 1), coalesce(p.leased, 0), coalesce(a.alive, 0), coalesce(p.published, 0)::bigint,
  (SELECT count(*) FROM (SELECT FROM effectonce.outbox_dead d WHERE d.relay = known.relay AND d.state IN ('held', 'behind', 'retry') LIMIT $1) bounded), coalesce(r.created_at, p.seen),
  greatest(extract(epoch FROM clock_timestamp() - greatest(r.created_at, p.seen, a.seen)), 0)::float8
FROM (SELECT relay FROM effectonce.outbox_relays UNION SELECT relay FROM effectonce.outbox_progress) known
LEFT JOIN effectonce.outbox_relays r ON r.relay = known.relay
LEFT JOIN (
  SELECT relay, count(*) FILTER (WHERE lease_until > clock_timestamp()) AS leased, pg_catalog.sum(published) AS published,
    pg_catalog.max(greatest(lease_until, updated_at)) AS seen
  FROM effectonce.outbox_progress_now GROUP BY relay
) p ON p.relay = known.relay
LEFT JOIN (
  SELECT relay, count(*) FILTER (WHERE alive_until > clock_timestamp()) AS alive, pg_catalog.max(alive_until) AS seen
  FROM effectonce.outbox_replicas GROUP BY relay
) a ON a.relay = known.relay
ORDER BY known.relay`

// replicasSQL lists the live processes, as they last described themselves.
const replicasSQL = `-- relays.replicas
SELECT relay, owner, coalesce(state, ''), coalesce(problem, '')
FROM effectonce.outbox_replicas WHERE alive_until > clock_timestamp() ORDER BY relay, owner LIMIT $1`

// lockSQL locks the row that a replica locks to take a shard or to change the number of shards.
const lockSQL = `-- relays.lock
SELECT FROM effectonce.outbox_relays WHERE relay = $1 FOR UPDATE`

// deleteSQL leaves live rows. If a row is being renewed, it waits and then checks the renewed row.
const deleteSQL = `-- relays.delete
WITH progress AS (
  DELETE FROM effectonce.outbox_progress WHERE relay = $1 AND (lease_until IS NULL OR lease_until < clock_timestamp()) RETURNING 1
), replicas AS (
  DELETE FROM effectonce.outbox_replicas WHERE relay = $1 AND alive_until < clock_timestamp() RETURNING 1
), paused AS (
  DELETE FROM effectonce.outbox_paused WHERE relay = $1 RETURNING 1
), dropped AS (
  UPDATE effectonce.outbox_dead SET state = 'discarded' WHERE relay = $1 AND state = 'discard'
), relay AS (
  DELETE FROM effectonce.outbox_relays WHERE relay = $1
)
SELECT (SELECT count(*) FROM progress), (SELECT count(*) FROM paused), (SELECT count(*) FROM replicas)`

// endChainsSQL ends the chains of progress: a holder that was frozen meanwhile finds its next number
// taken. clearChainsSQL leaves these ends.
const endChainsSQL = `-- relays.end_chains
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, seq, floor, published)
SELECT DISTINCT ON (shard) relay, shard, n + 1, -1, tick, seq, floor, published FROM effectonce.outbox_advances WHERE relay = $1 ORDER BY shard, n DESC`

const clearChainsSQL = `-- relays.clear_chains
DELETE FROM effectonce.outbox_advances WHERE relay = $1 AND epoch >= 0`

const knownSQL = `-- relays.known
SELECT EXISTS (SELECT FROM effectonce.outbox_progress WHERE relay = $1)`

const leftSQL = `-- relays.left
SELECT EXISTS (SELECT FROM effectonce.outbox_progress WHERE relay = $1) OR EXISTS (SELECT FROM effectonce.outbox_replicas WHERE relay = $1),
  EXISTS (SELECT FROM effectonce.outbox_dead WHERE relay = $1 AND state IN ('held', 'behind', 'retry'))`
