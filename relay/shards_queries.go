package relay

// lockRelaySQL and the statements after it are run by operators, not by relays: see SetShards.
const lockRelaySQL = `-- relay.lock_relay
SELECT shards FROM effectonce.outbox_relays WHERE relay = $1 FOR UPDATE`

const runningSQL = `-- relay.running
SELECT coalesce(pg_catalog.array_agg(owner ORDER BY owner), '{}') FROM (
  SELECT owner FROM effectonce.outbox_replicas WHERE relay = $1 AND alive_until > clock_timestamp()
  UNION
  SELECT coalesce(owner, 'unknown') FROM effectonce.outbox_progress WHERE relay = $1 AND lease_until >= clock_timestamp()) AS working`

const lockProgressSQL = `-- relay.lock_progress
SELECT FROM effectonce.outbox_progress WHERE relay = $1 ORDER BY shard FOR UPDATE`

// oldShardsSQL returns how many shards of $2 were ever leased, their lowest floor (0: one of them never
// was), an epoch above theirs, what they published, and the latest cluster.
const oldShardsSQL = `-- relay.old_shards
SELECT count(*), coalesce(CASE WHEN count(*) >= $2 THEN pg_catalog.min(floor) END, 0), coalesce(pg_catalog.max(epoch), 0) + 1,
  coalesce(pg_catalog.sum(published), 0)::bigint, pg_catalog.min(system_identifier), pg_catalog.max(timeline)
FROM effectonce.outbox_progress_now WHERE relay = $1`

const dropShardsSQL = `-- relay.drop_shards
DELETE FROM effectonce.outbox_progress WHERE relay = $1`

const beginShardsSQL = `-- relay.begin_shards
INSERT INTO effectonce.outbox_progress (relay, shard, shards, epoch, system_identifier, timeline)
SELECT $1, s.shard, $2, $3, $4, $5 FROM generate_series(0, $2::int - 1) AS s (shard)`

// beginChainsSQL continues the chain of each shard that there was or will be, with the next number: a
// holder that does not know about the change finds it taken. Shards that go away get an end. The others
// get tick 0 and the floor $4, from which the next holder recovers: see Relay.begin.
const beginChainsSQL = `-- relay.begin_chains
WITH newest AS (
  SELECT DISTINCT ON (shard) shard, n, journal_offset FROM effectonce.outbox_advances WHERE relay = $1 ORDER BY shard, n DESC
)
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published, journal_offset)
SELECT $1, s.shard, coalesce(n.n, 0) + 1, CASE WHEN s.shard < $2 THEN $3::bigint ELSE -1 END, 0, NULL, 0, $4,
  CASE s.shard WHEN 0 THEN $5::bigint ELSE 0 END, n.journal_offset
FROM (SELECT shard FROM newest UNION SELECT g.shard FROM generate_series(0, $2::int - 1) AS g (shard)) AS s LEFT JOIN newest n USING (shard)`

const clearChainsSQL = `-- relay.clear_chains
DELETE FROM effectonce.outbox_advances a WHERE a.relay = $1
  AND EXISTS (SELECT FROM effectonce.outbox_advances newer WHERE newer.relay = a.relay AND newer.shard = a.shard AND newer.n > a.n)`

const setShardsSQL = `-- relay.set_shards
UPDATE effectonce.outbox_relays SET shards = $2 WHERE relay = $1`

const noteShardsSQL = `-- relay.note_shards
INSERT INTO effectonce.operator_actions (who, what, why, subject)
VALUES ($4, 'relay.shards', $5, pg_catalog.jsonb_build_object('relay', $1::text, 'before', $2::smallint, 'shards', $3::smallint))`
