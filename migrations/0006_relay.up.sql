-- effectonce, schema version 6: progress that is only inserted, dead rows by their heads, what replicas say about Kafka.
--
-- Additive: relays of the previous release that are running, or start, work with this schema.

-- ---------------------------------------------------------------------------------------------
-- Progress

-- Where each shard is, as a chain: each write of progress inserts the next number. A row of outbox_progress that is
-- updated instead leaves a dead version each time, which an old snapshot keeps, and every later write walks over them.
-- The primary key fences: the next holder of a shard begins with the next number, so that an insert of a holder that
-- lost its lease finds its number taken. outbox_progress gets a copy with each renewal of the lease.
CREATE TABLE effectonce.outbox_advances (
  relay          text        NOT NULL CHECK (octet_length(relay) BETWEEN 1 AND 255),
  shard          smallint    NOT NULL,
  n              bigint      NOT NULL,
  epoch          bigint      NOT NULL, -- of the holder
  advanced_epoch bigint      NOT NULL, -- the epoch under which progress was made last: a new holder repeats what it found
  tick           bigint      NOT NULL,
  next_tick      bigint,
  seq            bigint      NOT NULL,
  floor          bigint      NOT NULL,
  published      bigint      NOT NULL,
  journal_offset bigint,               -- with exactly once: the record of the progress topic that this is a copy of
  at             timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_advances_pkey PRIMARY KEY (relay, shard, n)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 10000);

ALTER TABLE effectonce.outbox_progress
  ADD COLUMN advance bigint NOT NULL DEFAULT 0; -- n of the advance that the row is a copy of

-- outbox_progress with the progress of now. An advance of an epoch before advanced_epoch was passed by something else:
-- a holder of the previous release, a restore into another cluster, another number of shards.
CREATE VIEW effectonce.outbox_progress_now AS
SELECT p.relay, p.shard, p.shards, coalesce(a.tick, p.tick) AS tick, CASE WHEN a.n IS NULL THEN p.next_tick ELSE a.next_tick END AS next_tick,
  coalesce(a.seq, p.seq) AS seq, greatest(a.floor, p.floor) AS floor, coalesce(a.published, p.published) AS published,
  p.system_identifier, p.timeline, p.owner, p.lease_until, p.epoch, coalesce(a.advanced_epoch, p.advanced_epoch) AS advanced_epoch,
  a.journal_offset, coalesce(a.n, p.advance) AS advance, coalesce(a.at, p.updated_at) AS updated_at
FROM effectonce.outbox_progress p
LEFT JOIN LATERAL (
  SELECT newest.* FROM (SELECT * FROM effectonce.outbox_advances n WHERE n.relay = p.relay AND n.shard = p.shard ORDER BY n.n DESC LIMIT 1) AS newest
  WHERE newest.epoch >= p.advanced_epoch AND newest.n > p.advance) AS a ON true;

-- A shard that is removed takes its chain with it: one of the same number later begins anew.
CREATE FUNCTION effectonce.outbox_progress_removed() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  DELETE FROM effectonce.outbox_advances a USING gone WHERE a.relay = gone.relay AND a.shard = gone.shard;
  RETURN NULL;
END
$$;
CREATE TRIGGER outbox_progress_removed AFTER DELETE ON effectonce.outbox_progress
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION effectonce.outbox_progress_removed();

-- ---------------------------------------------------------------------------------------------
-- Dead rows

ALTER TABLE effectonce.outbox_dead
  DROP CONSTRAINT outbox_dead_reason_check,
  ADD CONSTRAINT outbox_dead_reason_check CHECK (reason IN ('unknown_topic', 'not_authorized', 'too_large', 'refused', 'bad_headers', 'bad_partition', 'paused', 'behind')),
  SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 5000);
ALTER TABLE effectonce.outbox_ticks SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

-- ---------------------------------------------------------------------------------------------
-- Replicas, and topics that are paused

-- Each pause has an id of its own, so that a topic which is paused again is told from its earlier pause. A replica says
-- which pauses it obeys: nothing that it read before them is on its way to Kafka any more.
ALTER TABLE effectonce.outbox_paused ADD COLUMN id uuid NOT NULL DEFAULT gen_random_uuid();
ALTER TABLE effectonce.outbox_replicas ADD COLUMN obeys uuid[]; -- null: the previous release, which does not say

-- ---------------------------------------------------------------------------------------------
-- Messages for later

-- The order of messages that are due at the same time. Those that are there are numbered as they are stored. The old
-- index would have all messages of one time sorted for each batch of them.
DROP INDEX effectonce.outbox_scheduled_due;
ALTER TABLE effectonce.outbox_scheduled ADD COLUMN place bigint GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME effectonce.outbox_scheduled_place CACHE 1);
CREATE INDEX outbox_scheduled_due ON effectonce.outbox_scheduled (due_at, place);

-- ---------------------------------------------------------------------------------------------
-- The backlog, for those who write

-- How much waits, for each relay: with the rights of the owner, so that a writer, who may read no row of the outbox, sees these
-- numbers and nothing else. It descends some indexes, whatever waits. rows is an estimate from the sequence, rather too high;
-- bytes is the whole outbox, with published rows that are kept. Dead rows do not count, nor messages for later.
CREATE VIEW effectonce.outbox_backlog AS
WITH sequence AS (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS last FROM effectonce.outbox_seq_seq),
relays AS (
  SELECT relay, shards FROM effectonce.outbox_relays
  UNION ALL SELECT 'default', 1 WHERE NOT EXISTS (SELECT FROM effectonce.outbox_relays)
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

-- ---------------------------------------------------------------------------------------------
-- A sequence that is behind
