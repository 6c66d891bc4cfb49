package relay

// pauseSQL and the statements after it are run by operators, not by relays: see pause.go.
const pauseSQL = `-- relay.pause
WITH paused AS (
  INSERT INTO effectonce.outbox_paused (relay, topic, who, why) SELECT $1, t.topic, $3, $4 FROM pg_catalog.unnest($2::text[]) AS t (topic)
  ON CONFLICT (relay, topic) DO NOTHING RETURNING topic
), noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'topic.pause', $4, pg_catalog.jsonb_build_object('relay', $1::text, 'topic', topic) FROM paused
)
SELECT topic FROM paused ORDER BY topic`

const resumeSQL = `-- relay.resume
WITH resumed AS (
  DELETE FROM effectonce.outbox_paused WHERE relay = $1 AND topic = ANY ($2::text[]) RETURNING topic
), noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'topic.resume', $4, pg_catalog.jsonb_build_object('relay', $1::text, 'topic', topic) FROM resumed
)
SELECT topic FROM resumed ORDER BY topic`

const pausedSQL = `-- relay.paused
SELECT topic, who, why, paused_at FROM effectonce.outbox_paused WHERE relay = $1 ORDER BY topic`

// unconfirmedSQL returns the owners that do not obey the pauses of topics $2 yet: replicas that are
// alive, and holders of a lease that are no longer on the list. Its first column reports whether
// any replica runs.
const unconfirmedSQL = `-- relay.unconfirmed
WITH wanted AS (
  SELECT coalesce(pg_catalog.array_agg(id), '{}') AS ids FROM effectonce.outbox_paused WHERE relay = $1 AND topic = ANY ($2::text[])
), working AS (
  SELECT owner, obeys, true AS listed FROM effectonce.outbox_replicas WHERE relay = $1 AND alive_until > clock_timestamp()
  UNION ALL
  SELECT DISTINCT p.owner, NULL::uuid[], false FROM effectonce.outbox_progress p
  WHERE p.relay = $1 AND p.lease_until > clock_timestamp() AND p.owner IS NOT NULL AND NOT EXISTS (
    SELECT FROM effectonce.outbox_replicas r WHERE r.relay = $1 AND r.owner = p.owner AND r.alive_until > clock_timestamp())
)
SELECT EXISTS (SELECT FROM working), coalesce((SELECT pg_catalog.array_agg(owner || CASE
    WHEN NOT listed THEN ' (holds a lease, and is not alive)' ELSE '' END ORDER BY owner)
  FROM working WHERE (obeys OPERATOR(pg_catalog.@>) wanted.ids) IS NOT TRUE), '{}')
FROM wanted`

// withoutRowsSQL returns the topics that have no row in any table.
const withoutRowsSQL = `-- relay.without_rows
SELECT t.topic FROM pg_catalog.unnest($2::text[]) WITH ORDINALITY AS t (topic, place)
WHERE NOT EXISTS (SELECT FROM effectonce.outbox_paused p WHERE p.relay = $1 AND p.topic = t.topic)
  AND NOT EXISTS (SELECT FROM effectonce.outbox_dead d WHERE d.relay = $1 AND d.topic = t.topic AND d.state IN ('held', 'behind', 'retry'))
  AND NOT EXISTS (SELECT FROM effectonce.outbox_scheduled s WHERE s.topic = t.topic)
  AND NOT EXISTS (SELECT FROM effectonce.outbox o WHERE o.topic = t.topic)
ORDER BY t.place`

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
// get tick 0 and the floor $4, from which the next holder recovers: see Relay.begin. Nothing else stays.
const beginChainsSQL = `-- relay.begin_chains
WITH newest AS (
  SELECT DISTINCT ON (shard) shard, n, journal_offset FROM effectonce.outbox_advances WHERE relay = $1 ORDER BY shard, n DESC
), before AS (
  DELETE FROM effectonce.outbox_advances WHERE relay = $1
)
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published, journal_offset)
SELECT $1, s.shard, coalesce(n.n, 0) + 1, CASE WHEN s.shard < $2 THEN $3::bigint ELSE -1 END, 0, NULL, 0, $4,
  CASE s.shard WHEN 0 THEN $5::bigint ELSE 0 END, n.journal_offset
FROM (SELECT shard FROM newest UNION SELECT g.shard FROM generate_series(0, $2::int - 1) AS g (shard)) AS s LEFT JOIN newest n USING (shard)`

const setShardsSQL = `-- relay.set_shards
WITH noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  VALUES ($4, 'relay.shards', $5, pg_catalog.jsonb_build_object('relay', $1::text, 'before', $2::smallint, 'shards', $3::smallint))
)
UPDATE effectonce.outbox_relays SET shards = $3 WHERE relay = $1`

// noteRepairSQL and the statements after it: see Repair.
const noteRepairSQL = `-- relay.note_repair
INSERT INTO effectonce.operator_actions (who, what, why, subject)
VALUES ($1, 'outbox.repair', $2, pg_catalog.jsonb_build_object('seq_before', $3::bigint, 'seq_after', $4::bigint, 'tick_before', $5::bigint, 'tick_after', $6::bigint, 'renumbered', $7::bigint))`

// repairSettingsSQL removes the time limit for a repair of many rows, and makes it durable. The
// function limits how long it waits for locks.
const repairSettingsSQL = `-- relay.repair_settings
SELECT set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '30s', true),
  set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

const repairSequencesSQL = `-- relay.repair_sequences
SELECT repaired, seq_before, seq_after, tick_before, tick_after, renumbered FROM effectonce.repair_outbox_sequences()`
