-- effectonce, schema version 1: outbox, relays, and the operator's log.
--
-- Plain SQL: psql -f runs it as it stands. Every name is written with the default schema; the
-- migrations package replaces the word where another schema is configured.

SET search_path = pg_catalog, pg_temp;

-- CREATE SCHEMA IF NOT EXISTS asks for the right to create schemas even where this one exists.
DO $$
BEGIN
  IF to_regnamespace('effectonce') IS NULL THEN
    CREATE SCHEMA effectonce;
  END IF;
END
$$;

-- The oldest schema version whose programs work with this schema: migrations.Check reads it.
CREATE TABLE effectonce.schema_compatibility (oldest integer NOT NULL);
INSERT INTO effectonce.schema_compatibility VALUES (3);

-- The names in functions and views are resolved when they are created, or in pg_catalog alone, never in the search path
-- of the caller: a function there that fits the arguments better than PostgreSQL's own would be called instead.

-- A UUIDv7 by the database's clock, for PostgreSQL 14 to 17, too: one definition for all keeps dumps portable.
CREATE FUNCTION effectonce.uuid_v7() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN encode(
  set_bit(set_bit(
    overlay(uuid_send(gen_random_uuid())
      PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
      FROM 1 FOR 6),
    52, 1), 53, 1),
  'hex')::uuid;

-- The cluster whose transaction ids rows have; null where the database does not show it.
CREATE FUNCTION effectonce.this_cluster(OUT system bigint, OUT timeline integer)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  system := (SELECT c.system_identifier FROM pg_control_system() c);
  timeline := ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer;
EXCEPTION WHEN insufficient_privilege OR undefined_function OR feature_not_supported OR object_not_in_prerequisite_state THEN
  NULL; -- hidden, or a standby
END
$$;

-- === Outbox

-- Published rows leave by TRUNCATE of a whole slot, never row by row. New rows go to the slot that this sequence names; a
-- relay turns it. It only chooses: a row is right in every slot, and the slot's lock decides what may be truncated.
CREATE SEQUENCE effectonce.outbox_slot AS smallint MINVALUE 0 MAXVALUE 3 START 0;
SELECT setval('effectonce.outbox_slot', 0);
-- The column's default reads it with the rights of whoever inserts. Without any, PostgreSQL refuses the row up to
-- version 17, and fills slot 0 for ever from 18 on. SELECT does not turn it, as USAGE would.
GRANT SELECT ON SEQUENCE effectonce.outbox_slot TO PUBLIC;

-- Append-only: the relay neither updates nor deletes a row, so there are no dead tuples. The first two columns matter:
-- defaults are computed in their order, so a row has its transaction id before its seq. The relay's floor relies on it.
-- One CHECK for all bounds: each INSERT prepares each CHECK anew. The text of headers may be much longer than
-- what is stored: a number of some bytes has up to 131,072 digits. (A bounded repetition in the topic's
-- expression would cost 13 µs a row, this 0.4.)
CREATE TABLE effectonce.outbox (
  txid       xid8        NOT NULL DEFAULT pg_current_xact_id(),
  seq        bigint      GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME effectonce.outbox_seq_seq CACHE 1),
  id         uuid        NOT NULL DEFAULT effectonce.uuid_v7(),
  topic      text        NOT NULL,
  key        bytea,
  payload    bytea,
  headers    jsonb       NOT NULL DEFAULT '{}',
  -- The first byte of SHA-256 of the key (of the id where there is no key): stable across releases,
  -- platforms and languages. Relay shard = this number modulo the number of shards.
  shard      smallint    NOT NULL GENERATED ALWAYS AS (get_byte(sha256(coalesce(key, uuid_send(id))), 0)) STORED,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  slot       smallint    NOT NULL DEFAULT coalesce(pg_sequence_last_value('effectonce.outbox_slot'), 0),
  CONSTRAINT outbox_pkey PRIMARY KEY (seq, slot),
  CONSTRAINT outbox_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]+$' AND octet_length(topic) <= 249 AND topic NOT IN ('.', '..')),
  CONSTRAINT outbox_headers_are_no_json_object CHECK (jsonb_typeof(headers) = 'object'),
  CONSTRAINT outbox_row_is_out_of_bounds CHECK (
    octet_length(payload) <= 100000000 AND octet_length(key) <= 1048576
    AND pg_column_size(headers) <= 2097152 AND octet_length(headers::text) <= 8388608
    AND created_at >= '0001-01-01+00' AND created_at < '9999-01-01+00')
) PARTITION BY LIST (slot);

-- Transactions that were open at a tick are looked up by their id, in seq order. New entries go to the
-- right end of the index.
CREATE INDEX outbox_txid ON effectonce.outbox (txid, seq);

-- Inserts alone trigger vacuum (for the visibility map and freezing) and analyze.
DO $$
BEGIN
  FOR slot IN 0..3 LOOP
    EXECUTE format('CREATE TABLE effectonce.outbox_%s PARTITION OF effectonce.outbox FOR VALUES IN (%s) WITH (
      autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
      autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 200000)', slot, slot);
  END LOOP;
END
$$;

COMMENT ON TABLE effectonce.outbox IS
  'INSERT INTO outbox (topic, key, payload) is a complete publish. Hold the lock that orders a key before inserting its row.';

-- When each slot was last turned to, and away from.
CREATE TABLE effectonce.outbox_slots (
  slot         smallint    NOT NULL,
  turned_to    timestamptz NOT NULL DEFAULT clock_timestamp(),
  turned_away  timestamptz,
  truncated_at timestamptz,
  CONSTRAINT outbox_slots_pkey PRIMARY KEY (slot)
);
INSERT INTO effectonce.outbox_slots (slot, turned_away) VALUES (0, NULL), (1, clock_timestamp()), (2, clock_timestamp()), (3, clock_timestamp());

-- Messages for later: a relay moves them to the outbox when they are due, in the order of due_at and place.
-- An ID that another publisher took first would keep the message away: so the key has the publisher.
CREATE TABLE effectonce.outbox_scheduled (
  due_at     timestamptz NOT NULL,
  id         uuid        NOT NULL DEFAULT effectonce.uuid_v7(),
  topic      text        NOT NULL,
  key        bytea,
  payload    bytea,
  headers    jsonb       NOT NULL DEFAULT '{}',
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  place      bigint      GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME effectonce.outbox_scheduled_place CACHE 1),
  publisher  name        NOT NULL DEFAULT current_user,
  refused    text        CHECK (octet_length(refused) <= 2048), -- why the outbox did not take it: it stays here
  CONSTRAINT outbox_scheduled_pkey PRIMARY KEY (id, topic, publisher),
  CONSTRAINT outbox_scheduled_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]+$' AND octet_length(topic) <= 249 AND topic NOT IN ('.', '..')),
  CONSTRAINT outbox_scheduled_headers_are_no_json_object CHECK (jsonb_typeof(headers) = 'object'),
  CONSTRAINT outbox_scheduled_row_is_out_of_bounds CHECK (
    octet_length(payload) <= 100000000 AND octet_length(key) <= 1048576
    AND pg_column_size(headers) <= 2097152 AND octet_length(headers::text) <= 8388608
    AND created_at >= '0001-01-01+00' AND created_at < '9999-01-01+00' AND due_at >= '0001-01-01+00' AND due_at < '9999-01-01+00')
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX outbox_scheduled_due ON effectonce.outbox_scheduled (due_at, place) WHERE refused IS NULL;
CREATE INDEX outbox_scheduled_refused ON effectonce.outbox_scheduled (due_at) WHERE refused IS NOT NULL;

-- Publishers may read due_at, id and topic, and delete; the policy limits that to their own messages. Roles that may
-- read all columns (the relay, operators) see all messages, and so does the owner of the table.
CREATE POLICY outbox_scheduled_own ON effectonce.outbox_scheduled
  USING (publisher = current_user OR (SELECT has_table_privilege('effectonce.outbox_scheduled', 'SELECT')));
ALTER TABLE effectonce.outbox_scheduled ENABLE ROW LEVEL SECURITY;

-- === Relays: shards, replicas, progress

CREATE TABLE effectonce.outbox_relays (
  relay      text        NOT NULL,
  shards     smallint    NOT NULL DEFAULT 1,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_relays_pkey PRIMARY KEY (relay),
  CONSTRAINT outbox_relays_relay_is_too_long CHECK (octet_length(relay) BETWEEN 1 AND 255),
  CONSTRAINT outbox_relays_shards_are_out_of_bounds CHECK (shards BETWEEN 1 AND 256)
);

-- The processes that share a relay's shards, and what each says with its sign of life. obeys: the pauses that it obeys, so
-- that nothing which it read before them is on its way to Kafka any more. problem: why its rows wait.
CREATE TABLE effectonce.outbox_replicas (
  relay       text        NOT NULL,
  owner       text        NOT NULL,
  alive_until timestamptz NOT NULL,
  obeys       uuid[],
  state       text        CONSTRAINT outbox_replicas_state_is_unknown CHECK (state IN ('publishing', 'standing_by', 'kafka_away', 'stuck')),
  problem     text        CONSTRAINT outbox_replicas_problem_is_too_long CHECK (octet_length(problem) <= 2048),
  CONSTRAINT outbox_replicas_pkey PRIMARY KEY (relay, owner),
  CONSTRAINT outbox_replicas_owner_is_too_long CHECK (octet_length(owner) BETWEEN 1 AND 255)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- A tick is a stored snapshot. The rows between two ticks are exactly those that became visible
-- between them (the technique of Skype's PgQ).
CREATE TABLE effectonce.outbox_ticks (
  tick       bigint      GENERATED BY DEFAULT AS IDENTITY (CACHE 1),
  snapshot   pg_snapshot NOT NULL,
  token      uuid        NOT NULL DEFAULT gen_random_uuid(),
  seq_last   bigint      NOT NULL, -- every row up to it has a transaction id below the snapshot's xmax
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_ticks_pkey PRIMARY KEY (tick)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
-- The beginning: nothing is visible in it.
INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) VALUES (0, '1:1:', 0);

-- The leases of shards.
CREATE TABLE effectonce.outbox_progress (
  relay             text        NOT NULL,
  shard             smallint    NOT NULL,
  shards            smallint    NOT NULL DEFAULT 1,  -- the row is about the rows with outbox.shard % shards = shard
  system_identifier bigint,                          -- the cluster that the ticks belong to
  timeline          integer,
  owner             text,
  lease_until       timestamptz,
  epoch             bigint      NOT NULL DEFAULT 0,  -- grows with each holder
  CONSTRAINT outbox_progress_pkey PRIMARY KEY (relay, shard),
  CONSTRAINT outbox_progress_relay_is_too_long CHECK (octet_length(relay) BETWEEN 1 AND 255),
  CONSTRAINT outbox_progress_owner_is_too_long CHECK (octet_length(owner) <= 255)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Where each shard is, as a chain: each write of progress inserts the next number, and the newest row counts. A row that is
-- updated instead leaves a dead version each time, which an old snapshot keeps, and every later write walks over them.
-- The primary key fences: the next holder of a shard begins with the next number, so that an insert of a holder that
-- lost its lease finds its number taken. Whoever moves a shard by hand inserts a row, too. Where a shard goes away, its
-- chain ends with a row of epoch -1, for the same reason.
CREATE TABLE effectonce.outbox_advances (
  relay          text        NOT NULL CHECK (octet_length(relay) BETWEEN 1 AND 255),
  shard          smallint    NOT NULL,
  n              bigint      NOT NULL,
  epoch          bigint      NOT NULL, -- of the holder that made this progress: a new holder repeats what it found
  tick           bigint      NOT NULL DEFAULT 0, -- everything visible in it is published
  next_tick      bigint,               -- the tick being worked off, if it takes several pages
  seq            bigint      NOT NULL DEFAULT 0, -- between tick and next_tick, everything up to this seq is published
  floor          bigint      NOT NULL DEFAULT 0, -- everything that can ever appear up to this seq is published
  published      bigint      NOT NULL DEFAULT 0, -- rows handed to the broker and acknowledged, duplicates included
  journal_offset bigint,               -- with exactly once: the record of the progress topic that this is a copy of
  at             timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_advances_pkey PRIMARY KEY (relay, shard, n)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 10000);

-- Leases with the progress of now.
CREATE VIEW effectonce.outbox_progress_now AS
SELECT p.relay, p.shard, p.shards, coalesce(a.tick, 0) AS tick, a.next_tick, coalesce(a.seq, 0) AS seq, coalesce(a.floor, 0) AS floor,
  coalesce(a.published, 0) AS published, p.system_identifier, p.timeline, p.owner, p.lease_until, p.epoch,
  coalesce(a.epoch, 0) AS progress_epoch, a.journal_offset, coalesce(a.n, 0) AS advance, a.at AS updated_at
FROM effectonce.outbox_progress p
LEFT JOIN LATERAL (SELECT * FROM effectonce.outbox_advances n WHERE n.relay = p.relay AND n.shard = p.shard ORDER BY n.n DESC LIMIT 1) AS a
  ON a.epoch >= 0;

-- === Rows that wait

-- Topics whose rows wait, in outbox_dead, until the topic is resumed. Each pause has an id of its own, so that a topic
-- which is paused again is distinguished from its earlier pause.
CREATE TABLE effectonce.outbox_paused (
  relay     text        NOT NULL CHECK (octet_length(relay) BETWEEN 1 AND 255),
  topic     text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  who       text        NOT NULL CHECK (octet_length(who) <= 255),
  why       text        NOT NULL CHECK (octet_length(why) <= 2048),
  paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  id        uuid        NOT NULL DEFAULT gen_random_uuid(),
  CONSTRAINT outbox_paused_pkey PRIMARY KEY (relay, topic)
);

-- Rows that Kafka does not take, as they were, and the later rows of their keys behind them.
CREATE TABLE effectonce.outbox_dead (
  relay      text        NOT NULL CHECK (octet_length(relay) BETWEEN 1 AND 255),
  seq        bigint      NOT NULL,
  id         uuid        NOT NULL,
  topic      text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  key        bytea,
  payload    bytea,
  headers    jsonb       NOT NULL,
  created_at timestamptz NOT NULL,
  reason     text        NOT NULL CHECK (reason IN ('unknown_topic', 'not_authorized', 'too_large', 'refused', 'bad_headers', 'bad_partition', 'paused', 'behind')),
  error      text        NOT NULL CHECK (octet_length(error) <= 2048),
  waits_for  text        NOT NULL DEFAULT '' CHECK (octet_length(waits_for) <= 1024), -- a topic in Kafka
  attempts   integer     NOT NULL DEFAULT 1,
  -- held: waits for the topic or an operator, and holds its key. behind: waits for the held row
  -- before it. retry: the relay publishes it next. discard: the relay drops it next. discarded: it is
  -- remembered while the outbox has the row, so that it is not published when that is read again.
  state      text        NOT NULL CHECK (state IN ('held', 'behind', 'retry', 'discard', 'discarded')),
  died_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
  shard      smallint    NOT NULL GENERATED ALWAYS AS (get_byte(sha256(coalesce(key, uuid_send(id))), 0)) STORED,
  CONSTRAINT outbox_dead_pkey PRIMARY KEY (relay, seq)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 5000);
CREATE INDEX outbox_dead_key ON effectonce.outbox_dead (relay, topic, sha256(key), seq) WHERE state <> 'discarded';
-- The relay looks at the rows that may leave, and not at those that wait: rows that were handed back or discarded, and,
-- topic by topic, rows that are handed back when their topic is there or resumed.
CREATE INDEX outbox_dead_leaving ON effectonce.outbox_dead (relay, seq) WHERE state IN ('retry', 'discard');
CREATE INDEX outbox_dead_waiting ON effectonce.outbox_dead (relay, topic, reason, waits_for, seq)
  WHERE state = 'held' AND reason IN ('unknown_topic', 'not_authorized', 'paused');
CREATE INDEX outbox_dead_discarded ON effectonce.outbox_dead (seq) WHERE state = 'discarded';

-- Any login can take an advisory lock, and keep it. The lock of a row needs the right to update the table.
CREATE TABLE effectonce.outbox_locks (
  name text NOT NULL,
  CONSTRAINT outbox_locks_pkey PRIMARY KEY (name),
  CONSTRAINT outbox_locks_name_is_unknown CHECK (name IN ('promote', 'stamps'))
);
INSERT INTO effectonce.outbox_locks (name) VALUES ('promote'), ('stamps');

-- === The backlog, for those who write

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
  greatest(extract(epoch FROM clock_timestamp() - greatest(least(min(oldest.at), '2200-01-01'), '1970-01-01')), 0)::double precision AS oldest_seconds,
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

-- === A sequence that is behind

-- A cursor compares the numbers of rows with those that it knows, so no number may be given twice. That happens after a
-- copy by logical replication (sequences are not copied), TRUNCATE … RESTART IDENTITY or setval: rows that committed are
-- then taken for published. The function says whether it happened. seq_known and tick_known are the largest numbers that
-- the tables know. reused is the lowest number that a row was given again although the sequence has caught up since, and
-- reused_since when that began.
--
-- It reads the sequences last: what its snapshot shows had its number by then. All that it looks at is found by indexes.
CREATE FUNCTION effectonce.outbox_sequence_state(
  OUT seq_last bigint, OUT seq_known bigint, OUT tick_last bigint, OUT tick_known bigint,
  OUT reused bigint, OUT reused_since timestamptz, OUT behind boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  here record;
  burying text[]; -- relays that have dead rows
BEGIN
  SELECT * INTO here FROM effectonce.this_cluster();
  SELECT greatest(max(p.floor), max(p.seq), max(f.seq_last), max(n.seq_last)), greatest(max(p.tick), max(p.next_tick))
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
  -- here, has a number that was given before. Where the progress is of another cluster, so has a row up to the floor that was written
  -- here, and is younger than the progress; and so has a row with the number of a dead row that is another message. The rows looked at
  -- are the first by number and the first by transaction.
  WITH progress AS MATERIALIZED (
    SELECT p.shards, p.shard, p.floor, p.updated_at, t.seq_last, pg_snapshot_xmax(t.snapshot) AS xmax, coalesce(p.system_identifier <> here.system, false) AS moved
    FROM effectonce.outbox_progress_now p JOIN effectonce.outbox_ticks t ON t.tick = p.tick
    WHERE pg_snapshot_xmax(t.snapshot) <> '1'::xid8
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
  WHERE mod(o.xmin::text::numeric - mod(o.txid::text::numeric, 4294967296) + 4294967296, 4294967296) < 1000000 AND EXISTS (
      SELECT FROM progress p WHERE o.shard % p.shards = p.shard AND CASE WHEN p.moved THEN o.seq <= p.floor AND o.created_at > p.updated_at
        ELSE o.seq <= p.seq_last AND o.txid >= p.xmax END)
    OR EXISTS (SELECT FROM unnest(burying) AS b (relay) JOIN effectonce.outbox_dead d ON d.relay = b.relay AND d.seq = o.seq WHERE d.id <> o.id);

  -- Not from the sequences' rows: a reader of those may see up to 32 numbers more than were given. nextval writes them so for
  -- the write-ahead log, under a lock that pg_sequence_last_value takes, too. Null: none was given, nor is one being given, so
  -- that the row, which was read before, says where the sequence starts.
  SELECT coalesce(pg_sequence_last_value('effectonce.outbox_seq_seq'), s.last_value - 1) INTO seq_last FROM effectonce.outbox_seq_seq s;
  SELECT coalesce(pg_sequence_last_value('effectonce.outbox_ticks_tick_seq'), s.last_value - 1) INTO tick_last FROM effectonce.outbox_ticks_tick_seq s;
  behind := seq_last < seq_known OR tick_last < tick_known OR reused IS NOT NULL;
END
$$;

-- Repairs it: the next numbers are above all that is known, and rows that are not proven to be published are inserted
-- again with such numbers, in their order. What proves it: each relay's tick, which was taken in this cluster and while
-- the sequence was not behind its floor, shows the row. A row that is not proven may be published twice; none is lost.
-- All leases end, and relays go on from what the tables say: what they have in memory, or in Kafka, knows old numbers.
--
-- It waits for transactions that write to the outbox (at most some seconds: 55P03, try again), and such transactions wait
-- for it. It does nothing where no number was given twice. What the tables say is bounded, because roles without rights on
-- the sequence write them.
CREATE FUNCTION effectonce.repair_outbox_sequences(
  OUT repaired boolean, OUT seq_before bigint, OUT seq_after bigint, OUT tick_before bigint, OUT tick_after bigint, OUT renumbered bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '3s' AS $$
DECLARE
  state record;
BEGIN
  -- The stamps of a recovery first: it takes its locks in this order. And one repair at a time: reading a sequence takes a lock that
  -- another repair would wait for.
  INSERT INTO effectonce.outbox_locks (name) VALUES ('stamps') ON CONFLICT DO NOTHING; -- a copy may not have it
  PERFORM FROM effectonce.outbox_locks WHERE name = 'stamps' FOR UPDATE;
  SELECT * INTO state FROM effectonce.outbox_sequence_state();
  IF state.behind THEN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      RAISE EXCEPTION 'want a transaction that is read committed: one that is % does not see what the locks waited for', current_setting('transaction_isolation')
        USING ERRCODE = 'invalid_transaction_state';
    END IF;
    LOCK TABLE effectonce.outbox IN EXCLUSIVE MODE;
    LOCK TABLE effectonce.outbox_ticks IN EXCLUSIVE MODE;
    SELECT * INTO state FROM effectonce.outbox_sequence_state();
  END IF;
  repaired := state.behind;
  seq_before := state.seq_last; seq_after := state.seq_last; tick_before := state.tick_last; tick_after := state.tick_last; renumbered := 0;
  IF NOT repaired THEN
    RETURN;
  END IF;
  IF greatest(state.seq_known, state.seq_last, state.tick_known, state.tick_last) > 4611686018427387904 THEN -- half of what there is
    RAISE EXCEPTION 'numbers are too large to be true: row %, tick %; the sequences are at % and %', state.seq_known, state.tick_known, state.seq_last, state.tick_last
      USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Look for a number that was written by hand: in outbox_advances, outbox_dead, outbox_ticks, outbox.';
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
    -- All leases end: a holder's next insert finds its number taken.
    PERFORM FROM effectonce.outbox_progress ORDER BY relay, shard FOR UPDATE;
    LOCK TABLE effectonce.outbox_advances IN EXCLUSIVE MODE;
    UPDATE effectonce.outbox_progress SET epoch = epoch + 1, owner = NULL, lease_until = NULL;
    INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published, journal_offset)
    SELECT relay, shard, advance + 1, epoch, tick, next_tick, seq, floor, published, journal_offset FROM effectonce.outbox_progress_now;
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
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
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
    RETURNING u.n, o.seq AS was, o.id, o.topic, o.key, o.payload, o.headers, o.created_at
  ), discarded AS ( -- known by number and ID; the others keep the order of their key
    UPDATE effectonce.outbox_dead d SET seq = largest + g.n FROM gone g WHERE d.seq = g.was AND d.id = g.id AND d.state = 'discarded'
  )
  INSERT INTO effectonce.outbox (txid, seq, id, topic, key, payload, headers, created_at) OVERRIDING SYSTEM VALUE
  SELECT pg_current_xact_id(), largest + g.n, g.id, g.topic, g.key, g.payload, g.headers, g.created_at FROM gone g ORDER BY g.n;
  GET DIAGNOSTICS moved = ROW_COUNT;
  RETURN moved;
END
$$;

REVOKE ALL ON FUNCTION effectonce.outbox_sequence_state(), effectonce.repair_outbox_sequences(),
  effectonce.renumber_outbox(bigint, bigint, timestamptz) FROM PUBLIC;

-- === The operator's log

-- Every retry, discard, reset and other order of a person. who is the login, db_role the role it acted as, and stated the name
-- that the person or program gave: the database writes the first two.
CREATE TABLE effectonce.operator_actions (
  id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  who     text        NOT NULL CHECK (octet_length(who) BETWEEN 1 AND 255),
  what    text        NOT NULL CHECK (octet_length(what) BETWEEN 1 AND 64), -- parked.retry, parked.discard, …
  why     text        NOT NULL CHECK (octet_length(why) BETWEEN 1 AND 2048),
  "when"  timestamptz NOT NULL DEFAULT clock_timestamp(),
  subject jsonb       NOT NULL DEFAULT '{}' CONSTRAINT operator_actions_subject_is_too_large CHECK (pg_column_size(subject) <= 1048576), -- what it was done to
  db_role text        NOT NULL DEFAULT session_user,
  stated  text        CONSTRAINT operator_actions_stated_is_out_of_bounds CHECK (octet_length(stated) BETWEEN 1 AND 255)
);
CREATE INDEX operator_actions_when ON effectonce.operator_actions ("when");

CREATE FUNCTION effectonce.operator_action_written() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  -- The owner restores rows of a dump as they are. It could disable the trigger as well.
  IF NEW.stated IS NOT NULL AND NEW."when" < transaction_timestamp()
    AND pg_has_role((SELECT c.relowner FROM pg_class c WHERE c.oid = TG_RELID), 'USAGE') THEN
    RETURN NEW;
  END IF;
  NEW.stated := coalesce(NEW.stated, NEW.who);
  NEW.who := session_user;
  NEW.db_role := current_user;
  NEW."when" := clock_timestamp();
  RETURN NEW;
END
$$;
CREATE TRIGGER operator_action_written BEFORE INSERT ON effectonce.operator_actions
  FOR EACH ROW EXECUTE FUNCTION effectonce.operator_action_written();

-- Applies to the owner as well; to remove old entries, disable the triggers.
CREATE FUNCTION effectonce.operator_actions_stay() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_OP = 'TRUNCATE' AND NOT EXISTS (SELECT FROM effectonce.operator_actions) THEN
    RETURN NULL; -- as programs do that prepare a copy
  END IF;
  RAISE EXCEPTION 'operator_actions is only added to' USING ERRCODE = 'insufficient_privilege',
    HINT = 'The owner may disable the triggers operator_actions_stay and operator_actions_all_stay to remove old entries.';
END
$$;
CREATE TRIGGER operator_actions_stay BEFORE UPDATE OR DELETE ON effectonce.operator_actions
  FOR EACH ROW EXECUTE FUNCTION effectonce.operator_actions_stay();
CREATE TRIGGER operator_actions_all_stay BEFORE TRUNCATE ON effectonce.operator_actions
  FOR EACH STATEMENT EXECUTE FUNCTION effectonce.operator_actions_stay();
