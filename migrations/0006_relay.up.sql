-- effectonce, schema version 6: progress that is only inserted, dead rows by their heads, what replicas say about Kafka.
--
-- Additive: relays of the previous release that are running, or start, work with this schema.

SET search_path = pg_catalog, pg_temp;

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
  epoch          bigint      NOT NULL, -- of the holder; -1: an end, see outbox_progress_removed
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

-- A shard that is removed takes its chain with it, but for an end, of epoch -1, which the view passes over: a holder that
-- does not know yet finds its next number taken.
CREATE FUNCTION effectonce.end_progress(relay_ text, shard_ smallint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  LOOP -- until no concurrent insert took the number
    INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, advanced_epoch, tick, next_tick, seq, floor, published, journal_offset)
    SELECT a.relay, a.shard, a.n + 1, -1, a.advanced_epoch, a.tick, a.next_tick, a.seq, a.floor, a.published, a.journal_offset
    FROM effectonce.outbox_advances a
    WHERE a.relay = relay_ AND a.shard = shard_ AND NOT EXISTS (SELECT FROM effectonce.outbox_progress p WHERE p.relay = relay_ AND p.shard = shard_)
    ORDER BY a.n DESC LIMIT 1
    ON CONFLICT DO NOTHING;
    EXIT WHEN FOUND;
    IF EXISTS (SELECT FROM effectonce.outbox_progress p WHERE p.relay = relay_ AND p.shard = shard_)
      OR NOT EXISTS (SELECT FROM effectonce.outbox_advances a WHERE a.relay = relay_ AND a.shard = shard_) THEN
      RETURN; -- it begins again already, or never wrote
    END IF;
  END LOOP;
  DELETE FROM effectonce.outbox_advances a WHERE a.relay = relay_ AND a.shard = shard_
    AND a.n < (SELECT n.n FROM effectonce.outbox_advances n WHERE n.relay = relay_ AND n.shard = shard_ AND n.epoch = -1 ORDER BY n.n DESC LIMIT 1);
END
$$;

-- With the owner's rights: the previous release deletes, too.
CREATE FUNCTION effectonce.outbox_progress_removed() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF TG_RELID <> 'effectonce.outbox_progress'::regclass THEN
    RAISE EXCEPTION 'outbox_progress_removed is for outbox_progress alone' USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF TG_OP = 'DELETE' THEN
    PERFORM effectonce.end_progress(g.relay, g.shard) FROM gone g;
  ELSE
    PERFORM effectonce.end_progress(a.relay, a.shard) FROM (SELECT DISTINCT relay, shard FROM effectonce.outbox_advances) a;
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER outbox_progress_removed AFTER DELETE ON effectonce.outbox_progress
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION effectonce.outbox_progress_removed();
CREATE TRIGGER outbox_progress_truncated AFTER TRUNCATE ON effectonce.outbox_progress
  FOR EACH STATEMENT EXECUTE FUNCTION effectonce.outbox_progress_removed();

-- One of the same number counts on from that end. (A chain without one belongs to the row: a restore of the data alone
-- inserts it last.)
CREATE FUNCTION effectonce.outbox_progress_begins() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF TG_RELID <> 'effectonce.outbox_progress'::regclass THEN
    RAISE EXCEPTION 'outbox_progress_begins is for outbox_progress alone' USING ERRCODE = 'insufficient_privilege';
  END IF;
  NEW.advance := greatest(NEW.advance, (SELECT CASE newest.epoch WHEN -1 THEN newest.n END
    FROM (SELECT * FROM effectonce.outbox_advances a WHERE a.relay = NEW.relay AND a.shard = NEW.shard ORDER BY a.n DESC LIMIT 1) AS newest));
  RETURN NEW;
END
$$;
CREATE TRIGGER outbox_progress_begins BEFORE INSERT ON effectonce.outbox_progress
  FOR EACH ROW EXECUTE FUNCTION effectonce.outbox_progress_begins();
REVOKE ALL ON FUNCTION effectonce.end_progress(text, smallint), effectonce.outbox_progress_removed(), effectonce.outbox_progress_begins() FROM PUBLIC;

-- ---------------------------------------------------------------------------------------------
-- What an insert costs

-- The same names as before: a bounded repetition costs PostgreSQL 13 µs for each row, this 0.4.
ALTER TABLE effectonce.outbox DROP CONSTRAINT outbox_topic_is_no_kafka_topic_name,
  ADD CONSTRAINT outbox_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]+$' AND octet_length(topic) <= 249 AND topic NOT IN ('.', '..'));
ALTER TABLE effectonce.outbox_scheduled DROP CONSTRAINT outbox_scheduled_topic_is_no_kafka_topic_name,
  ADD CONSTRAINT outbox_scheduled_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]+$' AND octet_length(topic) <= 249 AND topic NOT IN ('.', '..'));

-- ---------------------------------------------------------------------------------------------
-- Dead rows

ALTER TABLE effectonce.outbox_dead
  DROP CONSTRAINT outbox_dead_reason_check,
  ADD CONSTRAINT outbox_dead_reason_check CHECK (reason IN ('unknown_topic', 'not_authorized', 'too_large', 'refused', 'bad_headers', 'bad_partition', 'paused', 'behind')),
  SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 5000);
ALTER TABLE effectonce.outbox_ticks SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

-- The relay looks at the rows that may leave, and not at those that wait: rows that were handed back, keys that lost a
-- row, and, topic by topic, rows that are handed back when their topic is there or resumed.
CREATE INDEX outbox_dead_retry ON effectonce.outbox_dead (relay, seq) WHERE state = 'retry';
CREATE INDEX outbox_dead_waiting ON effectonce.outbox_dead (relay, topic, reason, seq)
  WHERE state = 'held' AND reason IN ('unknown_topic', 'not_authorized', 'paused');

-- Keys that lost a dead row: the relay publishes what is behind it, and removes the entry. Only inserts, and no unique
-- constraint: a deletion waits for no lock on account of it. An entry may be about a key of which nothing is left, or
-- whose next row is held.
CREATE TABLE effectonce.outbox_dead_freed (
  id    bigint GENERATED ALWAYS AS IDENTITY,
  relay text   NOT NULL CHECK (octet_length(relay) BETWEEN 1 AND 255),
  topic text   NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  hash  bytea  NOT NULL CHECK (octet_length(hash) = 32), -- SHA-256 of the key
  CONSTRAINT outbox_dead_freed_pkey PRIMARY KEY (relay, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 5000);

-- By a trigger, so that relays and operators of the previous release, and people with psql, do so, too. With the rights
-- of the owner: a role that may delete dead rows needs no right on the table.
CREATE FUNCTION effectonce.outbox_dead_free() RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  -- A trigger of somebody else's table would choose the types of the columns, and with them which functions run here.
  IF TG_RELID <> 'effectonce.outbox_dead'::regclass THEN
    RAISE EXCEPTION 'outbox_dead_free is for outbox_dead alone' USING ERRCODE = 'insufficient_privilege';
  END IF;
  INSERT INTO effectonce.outbox_dead_freed (relay, topic, hash)
  SELECT DISTINCT relay, topic, sha256(key) FROM gone WHERE key IS NOT NULL;
  RETURN NULL;
END
$$;
REVOKE ALL ON FUNCTION effectonce.outbox_dead_free() FROM PUBLIC;
CREATE TRIGGER outbox_dead_free AFTER DELETE ON effectonce.outbox_dead
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION effectonce.outbox_dead_free();

-- Rows that lost the one before them so far, which the previous release found by reading the whole table.
INSERT INTO effectonce.outbox_dead_freed (relay, topic, hash)
SELECT first.relay, first.topic, first.hash
FROM (SELECT DISTINCT ON (relay, topic, sha256(key)) relay, topic, sha256(key) AS hash, state FROM effectonce.outbox_dead
  WHERE key IS NOT NULL ORDER BY relay, topic, sha256(key), seq) AS first
WHERE first.state = 'behind';

-- ---------------------------------------------------------------------------------------------
-- Replicas, and topics that are paused

-- Each pause has an id of its own, so that a topic which is paused again is told from its earlier pause. A replica says
-- which pauses it obeys: nothing that it read before them is on its way to Kafka any more.
ALTER TABLE effectonce.outbox_paused ADD COLUMN id uuid NOT NULL DEFAULT gen_random_uuid();
ALTER TABLE effectonce.outbox_replicas ADD COLUMN obeys uuid[]; -- null: the previous release, which does not say

-- What a replica says with each sign of life. reached_at is when the brokers, or the sink, answered it last: a replica
-- yields its shards to one that reaches them later. Null: it never reached them, or is of the previous release.
ALTER TABLE effectonce.outbox_replicas
  ADD COLUMN reached_at timestamptz,
  ADD COLUMN state      text CONSTRAINT outbox_replicas_state_is_unknown CHECK (state IN ('publishing', 'standing_by', 'kafka_away', 'sink_away', 'stuck')),
  ADD COLUMN problem    text CONSTRAINT outbox_replicas_problem_is_too_long CHECK (octet_length(problem) <= 2048);

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

-- ---------------------------------------------------------------------------------------------
-- A sequence that is behind

-- A cursor compares the numbers of rows with those that it knows, so no number may be given twice. That happens after a
-- copy by logical replication (sequences are not copied), TRUNCATE … RESTART IDENTITY or setval: rows that committed are
-- then taken for published. The function says whether it happened. seq_known and tick_known are the largest numbers that
-- the tables and the arguments know. reused is the lowest number that a row was given again although the sequence has
-- caught up since, and reused_since when that began: no relay may have looked meanwhile.
--
-- It reads the sequences last: what its snapshot shows had its number by then. All that it looks at is found by indexes.
CREATE FUNCTION effectonce.outbox_sequence_state(
  more_seq bigint, more_tick bigint,
  OUT seq_last bigint, OUT seq_known bigint, OUT tick_last bigint, OUT tick_known bigint,
  OUT reused bigint, OUT reused_since timestamptz, OUT behind boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  here record;
  burying text[]; -- relays that have dead rows
BEGIN
  SELECT * INTO here FROM effectonce.this_cluster();
  SELECT greatest(more_seq, max(p.floor), max(p.seq), max(f.seq_last), max(n.seq_last)), greatest(more_tick, max(p.tick), max(p.next_tick))
  INTO seq_known, tick_known
  FROM effectonce.outbox_progress_now p
  LEFT JOIN effectonce.outbox_ticks f ON f.tick = p.tick LEFT JOIN effectonce.outbox_ticks n ON n.tick = p.next_tick;
  WITH RECURSIVE named AS ( -- one descent of the index for each relay
    (SELECT d.relay FROM effectonce.outbox_dead d ORDER BY d.relay LIMIT 1)
    UNION ALL
    SELECT (SELECT d.relay FROM effectonce.outbox_dead d WHERE d.relay > named.relay ORDER BY d.relay LIMIT 1) FROM named WHERE named.relay IS NOT NULL)
  SELECT coalesce(array_agg(named.relay), '{}') INTO burying FROM named WHERE named.relay IS NOT NULL;
  seq_known := greatest(seq_known, (SELECT max(o.seq) FROM effectonce.outbox o),
    (SELECT max((SELECT max(d.seq) FROM effectonce.outbox_dead d WHERE d.relay = b.relay)) FROM unnest(burying) AS b (relay)), 0);
  tick_known := greatest(tick_known, (SELECT max(t.tick) FROM effectonce.outbox_ticks t), 0);

  -- Each row of a shard up to its tick's seq_last has a transaction id below the snapshot's xmax. One that has not, and was written
  -- here, has a number that was given before. (A row that was copied or restored was written under another transaction
  -- id than the one that it names.) Where the tick means nothing here, or shows nothing, such a row is one up to the floor
  -- that is younger than the progress. So has a row with the number of a dead row that is another message. The rows
  -- looked at are the first by number and the first by transaction.
  WITH progress AS MATERIALIZED (
    SELECT p.shards, p.shard, p.floor, p.updated_at, t.seq_last, pg_snapshot_xmax(t.snapshot) AS xmax,
      coalesce(p.system_identifier <> here.system, false) OR coalesce(p.timeline <> here.timeline, false)
        OR t.tick IS NULL OR pg_snapshot_xmax(t.snapshot) = '1'::xid8 AS moved
    FROM effectonce.outbox_progress_now p LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick
  ), candidates AS MATERIALIZED (
    (SELECT o.seq, o.id, o.shard, o.txid, o.xmin, o.created_at FROM effectonce.outbox o ORDER BY o.seq LIMIT 1000)
    UNION ALL
    (SELECT late.* FROM (SELECT p.xmax FROM progress p WHERE NOT p.moved ORDER BY p.xmax LIMIT 1) oldest CROSS JOIN LATERAL (
      SELECT o.seq, o.id, o.shard, o.txid, o.xmin, o.created_at FROM effectonce.outbox o WHERE o.txid >= oldest.xmax ORDER BY o.txid, o.seq LIMIT 1000) late)
  )
  SELECT min(o.seq), min(o.created_at) INTO reused, reused_since
  FROM candidates o
  -- A row was written here if its xmin is the transaction that it names, or a subtransaction of that (a savepoint, a block with
  -- EXCEPTION): those have later ids. A copied row that looks so by chance is published once more.
  WHERE EXISTS (SELECT FROM progress p WHERE o.shard % p.shards = p.shard AND CASE
      WHEN p.moved THEN o.seq <= p.floor AND o.created_at > p.updated_at
      ELSE o.seq <= p.seq_last AND o.txid >= p.xmax AND mod(o.xmin::text::numeric - mod(o.txid::text::numeric, 4294967296) + 4294967296, 4294967296) < 1000000 END)
    OR EXISTS (SELECT FROM unnest(burying) AS b (relay) JOIN effectonce.outbox_dead d ON d.relay = b.relay AND d.seq = o.seq WHERE d.id <> o.id);

  -- Not from the sequences' rows: a reader of those may see up to 32 numbers more than were given. nextval writes them so for
  -- the write-ahead log, under a lock that pg_sequence_last_value takes, too. Null: none was given, nor is one being given, so
  -- that the row, which was read before, says where the sequence starts.
  SELECT coalesce(pg_sequence_last_value('effectonce.outbox_seq_seq'), s.last_value - 1) INTO seq_last FROM effectonce.outbox_seq_seq s;
  SELECT coalesce(pg_sequence_last_value('effectonce.outbox_ticks_tick_seq'), s.last_value - 1) INTO tick_last FROM effectonce.outbox_ticks_tick_seq s;
  behind := seq_last < seq_known OR tick_last < tick_known OR reused IS NOT NULL;
END
$$;

-- The cluster whose transaction ids rows have, as relays know it; null where the database does not show it.
CREATE FUNCTION effectonce.this_cluster(OUT system bigint, OUT timeline integer)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  system := (SELECT c.system_identifier FROM pg_control_system() c);
  timeline := ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer;
EXCEPTION WHEN insufficient_privilege OR undefined_function OR feature_not_supported OR object_not_in_prerequisite_state THEN
  NULL; -- hidden, or a standby
END
$$;

-- Repairs it: the next numbers are above all that is known, and rows that are not proven to be published are inserted
-- again with such numbers, in their order. What proves it: each relay's tick, which was taken in this cluster and while
-- the sequence was not behind its floor, shows the row. A row that is not proven may be published twice; none is lost.
-- All leases end, and relays go on from what the tables say: what they have in memory, or in Kafka, knows old numbers.
--
-- It waits for transactions that write to the outbox (at most some seconds: 55P03, try again), and such transactions wait
-- for it. It does nothing where no number was given twice. Arguments are numbers that the caller knows of. They are
-- bounded, and so is what the tables say: roles that may not touch the sequence write it.
CREATE FUNCTION effectonce.repair_outbox_sequences(
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

-- Gives rows that are not proven to be published numbers above the largest. Rows that were copied or restored come first,
-- since they were there first; then those of before the sequence went back, which are at most as young as a number that
-- it has not reached again; then the others.
CREATE FUNCTION effectonce.renumber_outbox(reached bigint, largest bigint, reused_since timestamptz) RETURNS bigint
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

REVOKE ALL ON FUNCTION effectonce.outbox_sequence_state(bigint, bigint), effectonce.repair_outbox_sequences(bigint, bigint),
  effectonce.renumber_outbox(bigint, bigint, timestamptz) FROM PUBLIC;
