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

const positionsSQL = `-- relay.positions
SELECT p.tick, p.seq, p.next_tick, p.floor, p.epoch, p.published, p.system_identifier, p.timeline, t.snapshot::text, t.seq_last
FROM effectonce.outbox_progress_now p LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick
WHERE p.relay = $1 ORDER BY p.shard`

const dropShardsSQL = `-- relay.drop_shards
DELETE FROM effectonce.outbox_progress WHERE relay = $1`

const beginShardsSQL = `-- relay.begin_shards
INSERT INTO effectonce.outbox_progress (relay, shard, shards, tick, next_tick, seq, floor, epoch, advanced_epoch, published, system_identifier, timeline)
SELECT $1, s.shard, $2, $3, $4, $5, $6, $7, $7, CASE s.shard WHEN 0 THEN $8::bigint ELSE 0 END, $9, $10
FROM generate_series(0, $2::int - 1) AS s (shard)`

const setShardsSQL = `-- relay.set_shards
UPDATE effectonce.outbox_relays SET shards = $2 WHERE relay = $1`

const noteShardsSQL = `-- relay.note_shards
INSERT INTO effectonce.operator_actions (who, what, why, subject)
VALUES ($4, 'relay.shards', $5, pg_catalog.jsonb_build_object('relay', $1::text, 'before', $2::smallint, 'shards', $3::smallint))`
