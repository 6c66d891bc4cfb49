-- effectonce, schema version 1: outbox, relay progress, claims, positions.
--
-- Plain SQL: psql -f runs it as it stands. Every name is written with the default schema; the
-- migrations package replaces the word where another schema is configured.

SET search_path = pg_catalog, pg_temp;

-- CREATE SCHEMA IF NOT EXISTS asks for the right to create schemas even where this one is there.
DO $$
BEGIN
  IF to_regnamespace('effectonce') IS NULL THEN
    CREATE SCHEMA effectonce;
  END IF;
END
$$;

-- ---------------------------------------------------------------------------------------------
-- Message IDs

-- The names in these functions are resolved when they are created, or in pg_catalog alone, never in the
-- search path of whoever calls them: a function there that fits the arguments better than PostgreSQL's
-- own would be taken instead.

-- A UUIDv7 by the database's clock. PostgreSQL 18 has uuidv7(); 14 to 17 have not, and one
-- definition for all keeps dumps portable.
CREATE FUNCTION effectonce.uuid_v7() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN encode(
  set_bit(set_bit(
    overlay(uuid_send(gen_random_uuid())
      PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
      FROM 1 FOR 6),
    52, 1), 53, 1),
  'hex')::uuid;

-- The smallest UUIDv7 of a point in time: the bound of a range of IDs.
CREATE FUNCTION effectonce.uuid_floor(at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid;

-- The ID under which a message is claimed, from the text that it carries: a UUIDv7 or a ULID as it
-- is, because it carries its time; anything else as a UUIDv8 hash of scope and text with the top bit
-- set, so that it never falls among the times. dedup.MessageID computes the same.
CREATE FUNCTION effectonce.message_id(scope text, id text) RETURNS uuid
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  alphabet CONSTANT text := '0123456789ABCDEFGHJKMNPQRSTVWXYZ';
  bits bit varying := B'';
  hash bytea;
  upper_id text;
BEGIN
  IF id ~ '^[0-7][0-9a-fA-F]{7}-[0-9a-fA-F]{4}-7[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$' THEN
    RETURN id::uuid;
  END IF;
  -- 26 letters are 130 bits: a first letter of 0 to 3 keeps the value below 2^127.
  IF id ~ '^[0-3][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$' THEN
    upper_id := upper(id);
    FOR i IN 1..26 LOOP
      bits := bits || (strpos(alphabet, substr(upper_id, i, 1)) - 1)::bit(5);
    END LOOP;
    bits := substring(bits FROM 3);
    hash := '\x';
    FOR i IN 0..15 LOOP
      hash := hash || substring(int4send(substring(bits FROM i * 8 + 1 FOR 8)::bit(8)::int) FROM 4);
    END LOOP;
    RETURN encode(hash, 'hex')::uuid;
  END IF;
  hash := substring(sha256(int4send(octet_length(convert_to(scope, 'UTF8')))
    || convert_to(scope, 'UTF8') || convert_to(id, 'UTF8')) FROM 1 FOR 16);
  hash := set_byte(hash, 0, get_byte(hash, 0) | 128);
  hash := set_byte(hash, 6, get_byte(hash, 6) & 15 | 128);
  hash := set_byte(hash, 8, get_byte(hash, 8) & 63 | 128);
  RETURN encode(hash, 'hex')::uuid;
END
$$;

-- ---------------------------------------------------------------------------------------------
-- Outbox

-- Append-only: the relay neither updates nor deletes a row, so there are no dead tuples.
-- The order of the first two columns matters: defaults are computed in this order, so a row has its
-- transaction id before it has its seq. The relay's floor relies on it.
CREATE TABLE effectonce.outbox (
  txid       xid8        NOT NULL DEFAULT pg_current_xact_id(),
  seq        bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1),
  id         uuid        NOT NULL DEFAULT effectonce.uuid_v7(),
  topic      text        NOT NULL,
  key        bytea,
  payload    bytea,
  headers    jsonb       NOT NULL DEFAULT '{}',
  -- The first byte of SHA-256 of the key (of the id where there is no key): stable across releases,
  -- platforms and languages. Relay shard = this number modulo the number of shards.
  shard      smallint    NOT NULL GENERATED ALWAYS AS (get_byte(sha256(coalesce(key, uuid_send(id))), 0)) STORED,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_pkey PRIMARY KEY (seq),
  CONSTRAINT outbox_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]{1,249}$' AND topic NOT IN ('.', '..')),
  CONSTRAINT outbox_headers_are_no_json_object CHECK (jsonb_typeof(headers) = 'object')
);

-- Transactions that were open at a tick are looked up by their id, in seq order. New entries go to the
-- right end of the index.
CREATE INDEX outbox_txid ON effectonce.outbox (txid, seq);

-- Inserts alone trigger vacuum (for the visibility map and freezing) and analyze.
ALTER TABLE effectonce.outbox SET (
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
  autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 200000);

COMMENT ON TABLE effectonce.outbox IS
  'INSERT INTO outbox (topic, key, payload) is a complete publish. Hold the lock that orders a key before inserting its row.';

-- A tick is a stored snapshot. The rows between two ticks are exactly those that became visible
-- between them (the technique of Skype''s PgQ).
CREATE TABLE effectonce.outbox_ticks (
  tick       bigint      GENERATED BY DEFAULT AS IDENTITY (CACHE 1),
  snapshot   pg_snapshot NOT NULL,
  seq_last   bigint      NOT NULL, -- every row up to it has a transaction id below the snapshot's xmax
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_ticks_pkey PRIMARY KEY (tick)
);
-- The beginning: nothing is visible in it.
INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) VALUES (0, '1:1:', 0);

CREATE TABLE effectonce.outbox_progress (
  relay             text        NOT NULL,
  shard             smallint    NOT NULL,
  tick              bigint      NOT NULL DEFAULT 0,  -- everything visible in it is published
  next_tick         bigint,                          -- the tick being worked off, if it takes several pages
  seq               bigint      NOT NULL DEFAULT 0,  -- between tick and next_tick, everything up to this seq is published
  floor             bigint      NOT NULL DEFAULT 0,  -- everything that can ever appear up to this seq is published
  published         bigint      NOT NULL DEFAULT 0,  -- rows handed to the broker and acknowledged, duplicates included
  system_identifier bigint,                          -- the cluster that the ticks belong to
  owner             text,
  lease_until       timestamptz,
  epoch             bigint      NOT NULL DEFAULT 0,
  updated_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_progress_pkey PRIMARY KEY (relay, shard),
  CONSTRAINT outbox_progress_relay_is_too_long CHECK (octet_length(relay) BETWEEN 1 AND 255),
  CONSTRAINT outbox_progress_owner_is_too_long CHECK (octet_length(owner) <= 255)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

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
  reason     text        NOT NULL CHECK (reason IN ('unknown_topic', 'too_large', 'refused', 'bad_headers', 'behind')),
  error      text        NOT NULL CHECK (octet_length(error) <= 2048),
  attempts   integer     NOT NULL DEFAULT 1,
  -- held: waits for the topic or an operator, and holds its key. behind: waits for the held row
  -- before it. retry: the relay publishes it next.
  state      text        NOT NULL CHECK (state IN ('held', 'behind', 'retry')),
  died_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_dead_pkey PRIMARY KEY (relay, seq)
);
CREATE INDEX outbox_dead_key ON effectonce.outbox_dead (relay, topic, sha256(key), seq);

-- ---------------------------------------------------------------------------------------------
-- Claims

-- Who claims. A name that belongs to another group is refused: the two would drop each other's messages.
CREATE TABLE effectonce.consumers (
  id             integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name           text        NOT NULL UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 600),
  consumer_group text        NOT NULL CHECK (octet_length(consumer_group) BETWEEN 1 AND 255),
  topics         text[]      NOT NULL,
  created_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Range-partitioned by the message ID itself: a UUIDv7 begins with its time, so a day is a range of
-- IDs, a duplicate always lands where the first one is, and forgetting a day is DROP TABLE.
CREATE TABLE effectonce.processed_messages (
  message_id   uuid        NOT NULL,
  consumer     integer     NOT NULL,
  processed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT processed_messages_pkey PRIMARY KEY (message_id, consumer)
) PARTITION BY RANGE (message_id);

-- One partition a day, from a week back to a month ahead; a small one at either end, so that an insert
-- never fails for want of a partition; one for the IDs that carry no time (top bit set). None of them
-- is the DEFAULT partition, which every new day would have to scan under an exclusive lock.
DO $$
DECLARE
  first_day CONSTANT date := (clock_timestamp() AT TIME ZONE 'UTC')::date - 8;
  last_day  CONSTANT date := first_day + 40;
  day date := first_day;
BEGIN
  EXECUTE format('CREATE TABLE effectonce.processed_messages_past PARTITION OF effectonce.processed_messages FOR VALUES FROM (MINVALUE) TO (%L)',
    effectonce.uuid_floor(first_day::timestamp AT TIME ZONE 'UTC'));
  WHILE day < last_day LOOP
    EXECUTE format('CREATE TABLE effectonce.%I PARTITION OF effectonce.processed_messages FOR VALUES FROM (%L) TO (%L)',
      'processed_messages_' || to_char(day, 'YYYYMMDD'),
      effectonce.uuid_floor(day::timestamp AT TIME ZONE 'UTC'),
      effectonce.uuid_floor((day + 1)::timestamp AT TIME ZONE 'UTC'));
    day := day + 1;
  END LOOP;
  EXECUTE format('CREATE TABLE effectonce.processed_messages_ahead PARTITION OF effectonce.processed_messages FOR VALUES FROM (%L) TO (%L)',
    effectonce.uuid_floor(last_day::timestamp AT TIME ZONE 'UTC'), '80000000-0000-0000-0000-000000000000');
  CREATE TABLE effectonce.processed_messages_untimed PARTITION OF effectonce.processed_messages
    FOR VALUES FROM ('80000000-0000-0000-0000-000000000000') TO (MAXVALUE);
END
$$;

-- ---------------------------------------------------------------------------------------------
-- Positions

-- Where each partition resumes. The row is written in the transaction that handled the messages, so it
-- is never ahead of the effects; Kafka's committed offset may be.
CREATE TABLE effectonce.consumer_positions (
  consumer_group text        NOT NULL CHECK (octet_length(consumer_group) BETWEEN 1 AND 255),
  topic          text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  partition      integer     NOT NULL,
  topic_id       uuid,               -- a topic that was deleted and made anew has another one
  next_offset    bigint,             -- null: assigned, nothing handled yet
  epoch          bigint      NOT NULL DEFAULT 1, -- grows with every assignment; an older holder cannot advance
  record_time    timestamptz,        -- timestamp of the last record before next_offset
  owner          text        CHECK (octet_length(owner) <= 255),
  updated_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT consumer_positions_pkey PRIMARY KEY (consumer_group, topic, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Advances a position by compare-and-set and raises where the caller does not hold it any more, so
-- that the COMMIT which travels in the same round trip becomes a rollback. Never back: a batch of
-- redeliveries leaves the position where it is. p_known is what the caller saw stored last: a database
-- that is behind it has lost commits (a failover), and the caller must go back with it.
CREATE FUNCTION effectonce.advance_position(
  p_group text, p_topic text, p_partition integer, p_epoch bigint, p_known bigint, p_next_offset bigint, p_record_time timestamptz)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  stored bigint;
BEGIN
  UPDATE effectonce.consumer_positions SET
    next_offset = greatest(next_offset, p_next_offset),
    record_time = CASE WHEN next_offset > p_next_offset THEN record_time ELSE p_record_time END,
    updated_at = clock_timestamp()
  WHERE consumer_group = p_group AND topic = p_topic AND partition = p_partition AND epoch = p_epoch
    AND (p_known IS NULL OR next_offset >= p_known)
  RETURNING next_offset INTO stored;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'position of group %, topic %, partition % is held by another consumer, or went back', p_group, p_topic, p_partition
      USING ERRCODE = 'EO001', HINT = format('epoch %s, offset %s', p_epoch, p_known);
  END IF;
  RETURN stored;
END
$$;
