-- Removes what 0008_neighbours.up.sql made: publishers see one another's messages for later again, and publish to any topic; rows have no
-- bounds, and the operator's log says what its writers say. Of messages for later with the same ID and topic only one stays.

SET search_path = pg_catalog, pg_temp;

CREATE OR REPLACE VIEW effectonce.outbox_backlog AS
WITH sequence AS (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS last FROM effectonce.outbox_seq_seq),
relays AS (
  SELECT relay, shards FROM effectonce.outbox_relays
  UNION ALL SELECT 'default' AS relay, 1 AS shards WHERE NOT EXISTS (SELECT FROM effectonce.outbox_relays)
), places AS (
  SELECT r.relay, r.shards, s.shard, p.next_tick IS NOT NULL AS within, coalesce(p.seq, 0) AS seq,
    coalesce(pg_snapshot_xmax(t.snapshot), '0'::xid8) AS xmax, ARRAY(SELECT pg_snapshot_xip(t.snapshot)) AS xip,
    CASE WHEN p.next_tick IS NULL THEN coalesce(t.seq_last, 0) ELSE p.seq END AS published_to
  FROM relays r CROSS JOIN LATERAL generate_series(0, r.shards - 1) AS s (shard)
  LEFT JOIN effectonce.outbox_progress_now p ON p.relay = r.relay AND p.shard = s.shard
  LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick
)
SELECT p.relay, max(CASE WHEN oldest.at IS NULL THEN 0 ELSE greatest(sequence.last - p.published_to, 1) END)::bigint AS rows,
  coalesce(extract(epoch FROM clock_timestamp() - min(oldest.at)), 0)::double precision AS oldest_seconds,
  (SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('effectonce.outbox'::regclass))::bigint AS bytes
FROM places p CROSS JOIN sequence CROSS JOIN LATERAL (
  SELECT min(created_at) AS at FROM (
    (SELECT o.created_at FROM effectonce.outbox o
     WHERE NOT p.within AND o.txid >= p.xmax AND o.shard % p.shards = p.shard ORDER BY o.txid, o.seq LIMIT 1)
    UNION ALL
    (SELECT o.created_at FROM effectonce.outbox o
     WHERE p.within AND o.seq > p.seq AND o.txid >= p.xmax AND o.shard % p.shards = p.shard ORDER BY o.seq LIMIT 1)
    UNION ALL
    (SELECT late.created_at FROM unnest(p.xip) AS open (txid) CROSS JOIN LATERAL (
       SELECT o.created_at FROM effectonce.outbox o
       WHERE o.txid = open.txid AND o.seq > CASE WHEN p.within THEN p.seq ELSE 0 END AND o.shard % p.shards = p.shard ORDER BY o.txid, o.seq LIMIT 1) late)
  ) firsts
) oldest
GROUP BY p.relay;

CREATE OR REPLACE FUNCTION effectonce.renumber_outbox(reached bigint, largest bigint, reused_since timestamptz) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  moved bigint;
BEGIN
  WITH back AS MATERIALIZED (
    SELECT coalesce((SELECT max(o.created_at) FROM effectonce.outbox o WHERE o.seq > reached), reused_since - interval '1 microsecond', 'infinity') AS at
  ), proof AS MATERIALIZED (
    SELECT p.shards, p.shard, t.snapshot
    FROM effectonce.outbox_progress_now p CROSS JOIN effectonce.this_cluster() c
    LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick AND t.seq_last >= p.floor AND p.system_identifier = c.system AND p.timeline = c.timeline
    UNION ALL -- a shard that was never leased has published nothing, nor has anything where there is no relay
    SELECT 1, 0, NULL WHERE NOT EXISTS (SELECT FROM effectonce.outbox_progress) OR EXISTS (
      SELECT FROM effectonce.outbox_relays r WHERE r.shards > (SELECT count(*) FROM effectonce.outbox_progress p WHERE p.relay = r.relay))
  ), unproven AS MATERIALIZED (
    SELECT o.seq, o.slot, row_number() OVER (
      ORDER BY mod(o.xmin::text::numeric - mod(o.txid::text::numeric, 4294967296) + 4294967296, 4294967296) < 1000000, o.created_at > (SELECT at FROM back), o.seq, o.created_at) AS n
    FROM effectonce.outbox o
    WHERE EXISTS (SELECT FROM proof f WHERE o.shard % f.shards = f.shard AND (f.snapshot IS NULL OR NOT pg_visible_in_snapshot(o.txid, f.snapshot)))
  ), gone AS (
    DELETE FROM effectonce.outbox o USING unproven u WHERE o.seq = u.seq AND o.slot = u.slot
    RETURNING u.n, o.id, o.topic, o.key, o.payload, o.headers, o.created_at
  )
  INSERT INTO effectonce.outbox (txid, seq, id, topic, key, payload, headers, created_at) OVERRIDING SYSTEM VALUE
  SELECT pg_current_xact_id(), largest + g.n, g.id, g.topic, g.key, g.payload, g.headers, g.created_at FROM gone g ORDER BY g.n;
  GET DIAGNOSTICS moved = ROW_COUNT;
  RETURN moved;
END
$$;

CREATE OR REPLACE FUNCTION effectonce.repair_outbox_sequences(
  more_seq bigint, more_tick bigint,
  OUT repaired boolean, OUT seq_before bigint, OUT seq_after bigint, OUT tick_before bigint, OUT tick_after bigint, OUT renumbered bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '3s'
AS $$
DECLARE
  largest CONSTANT bigint := 4611686018427387904; -- half of what there is
  ahead CONSTANT bigint := 1000000000000;
  state record;
  tables record;
BEGIN
  -- The stamps of a recovery first: it takes its locks in this order. And one repair at a time: reading a sequence takes a lock that
  -- another repair would wait for.
  PERFORM pg_advisory_xact_lock(hashtextextended('outbox stamps', 'effectonce.outbox'::regclass::oid::bigint));
  SELECT * INTO state FROM effectonce.outbox_sequence_state(more_seq, more_tick);
  IF state.behind THEN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      RAISE EXCEPTION 'want a transaction that is read committed: one that is % does not see what the locks waited for', current_setting('transaction_isolation')
        USING ERRCODE = 'invalid_transaction_state';
    END IF;
    LOCK TABLE effectonce.outbox IN EXCLUSIVE MODE;
    LOCK TABLE effectonce.outbox_ticks IN EXCLUSIVE MODE;
    SELECT * INTO state FROM effectonce.outbox_sequence_state(more_seq, more_tick);
  END IF;
  repaired := state.behind;
  seq_before := state.seq_last; seq_after := state.seq_last; tick_before := state.tick_last; tick_after := state.tick_last; renumbered := 0;
  IF NOT repaired THEN
    RETURN;
  END IF;
  SELECT * INTO tables FROM effectonce.outbox_sequence_state(0, 0);
  IF more_seq - ahead > greatest(tables.seq_known, tables.seq_last) OR more_tick - ahead > greatest(tables.tick_known, tables.tick_last)
    OR greatest(state.seq_known, state.seq_last, state.tick_known, state.tick_last) > largest THEN
    RAISE EXCEPTION 'numbers are too large to be true: row %, tick %; the sequences are at % and %', state.seq_known, state.tick_known, state.seq_last, state.tick_last
      USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Look for a number that was written by hand: in outbox_progress, outbox_dead, outbox_ticks, outbox.';
  END IF;
  -- RESTART, since setval would outlive a rollback; and a number is taken, so that the sequence says what it gave last. The locks of both,
  -- in the order of outbox_sequence_state: a reader has a lock on the first and would wait with it for the second
  -- while rows are renumbered.
  IF state.seq_last < state.seq_known OR state.reused IS NOT NULL THEN
    seq_after := greatest(state.seq_known, state.seq_last);
    EXECUTE format('ALTER SEQUENCE effectonce.outbox_seq_seq RESTART WITH %s', greatest(seq_after, 1));
  END IF;
  IF state.tick_last < state.tick_known THEN
    tick_after := state.tick_known;
    EXECUTE format('ALTER SEQUENCE effectonce.outbox_ticks_tick_seq RESTART WITH %s', tick_after);
    PERFORM nextval('effectonce.outbox_ticks_tick_seq');
  END IF;
  IF state.seq_last < state.seq_known OR state.reused IS NOT NULL THEN
    PERFORM FROM effectonce.outbox_progress ORDER BY relay, shard FOR UPDATE;
    UPDATE effectonce.outbox_progress p SET
      tick = n.tick, next_tick = n.next_tick, seq = n.seq, floor = n.floor, published = n.published,
      epoch = greatest(p.epoch, n.advanced_epoch) + 1, advanced_epoch = greatest(p.epoch, n.advanced_epoch) + 1, owner = NULL, lease_until = NULL
    FROM effectonce.outbox_progress_now n WHERE n.relay = p.relay AND n.shard = p.shard;
    renumbered := effectonce.renumber_outbox(state.seq_last, seq_after, state.reused_since);
    seq_after := seq_after + renumbered;
    EXECUTE format('ALTER SEQUENCE effectonce.outbox_seq_seq RESTART WITH %s', greatest(seq_after, 1));
    PERFORM nextval('effectonce.outbox_seq_seq');
  END IF;
END
$$;

DROP TABLE effectonce.outbox_locks;

DROP TRIGGER operator_actions_stay ON effectonce.operator_actions;
DROP TRIGGER operator_actions_all_stay ON effectonce.operator_actions;
DROP TRIGGER operator_action_written ON effectonce.operator_actions;
DROP FUNCTION effectonce.operator_actions_stay();
DROP FUNCTION effectonce.operator_action_written();
UPDATE effectonce.operator_actions SET who = stated WHERE stated IS NOT NULL;
ALTER TABLE effectonce.operator_actions DROP COLUMN stated, DROP CONSTRAINT operator_actions_subject_is_too_large;

DROP TRIGGER IF EXISTS outbox_topic_allowed ON effectonce.outbox;
DROP TRIGGER IF EXISTS outbox_topic_allowed ON effectonce.outbox_scheduled;
DROP TABLE effectonce.outbox_publishers;
DROP FUNCTION effectonce.outbox_publishers_changed();
DROP FUNCTION effectonce.outbox_publisher_checked();
DROP FUNCTION effectonce.outbox_topic_allowed();

ALTER TABLE effectonce.outbox_scheduled DISABLE ROW LEVEL SECURITY;
DROP POLICY outbox_scheduled_own ON effectonce.outbox_scheduled;
DELETE FROM effectonce.outbox_scheduled s USING effectonce.outbox_scheduled o
WHERE o.id = s.id AND o.topic = s.topic AND o.place < s.place;
ALTER TABLE effectonce.outbox_scheduled DROP CONSTRAINT outbox_scheduled_pkey, DROP COLUMN publisher,
  ADD CONSTRAINT outbox_scheduled_pkey PRIMARY KEY (id, topic), DROP CONSTRAINT outbox_scheduled_row_is_out_of_bounds;

ALTER TABLE effectonce.consumers DROP CONSTRAINT consumers_topics_are_too_many;
ALTER TABLE effectonce.outbox DROP CONSTRAINT outbox_row_is_out_of_bounds;
