-- effectonce, schema version 2: claims, positions, parked messages, fences.

SET search_path = pg_catalog, pg_temp;

-- === Message IDs

-- The smallest UUIDv7 of a point in time: the bound of a range of IDs.
CREATE FUNCTION effectonce.uuid_floor(at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid;

-- The ID under which a message is claimed, from the text that it carries: a UUIDv7 or a ULID as it
-- is, because it carries its time; anything else as a UUIDv8 hash of scope and text with the top bit
-- set, so that it never falls among the times. dedup.MessageID computes the same.
CREATE FUNCTION effectonce.message_id(scope text, id text) RETURNS uuid
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $$
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

-- === Claims

-- Who claims. A name that belongs to another group is refused: the two would drop each other's messages.
CREATE TABLE effectonce.consumers (
  id             integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name           text        NOT NULL UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 600),
  consumer_group text        NOT NULL CHECK (octet_length(consumer_group) BETWEEN 1 AND 255),
  topics         text[]      NOT NULL CONSTRAINT consumers_topics_are_too_many CHECK (pg_column_size(topics) <= 1048576),
  aliases        text[]      NOT NULL DEFAULT '{}' CONSTRAINT consumers_aliases_are_too_many CHECK (pg_column_size(aliases) <= 1048576), -- what topics are called in IDs
  created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
  -- Null: claims are kept for ever, in processed_forever.
  dedup_window   interval    DEFAULT '7 days' CONSTRAINT consumers_dedup_window_is_not_positive CHECK (dedup_window > interval '0'),
  -- Claims of messages up to this time may have been forgotten; null: none were. Written by the transaction
  -- that forgets, never moved back. The window only says what maintenance may forget from now on.
  forgotten_to   timestamptz,
  id_rule        text        NOT NULL DEFAULT 'standard' CONSTRAINT consumers_id_rule_is_too_long CHECK (octet_length(id_rule) BETWEEN 1 AND 2048)
);

-- Range-partitioned by the message ID itself: a UUIDv7 begins with its time, so a day is a range of
-- IDs, a duplicate always lands where the first one is, and forgetting a day is DROP TABLE.
CREATE TABLE effectonce.processed_messages (
  message_id   uuid        NOT NULL,
  consumer     integer     NOT NULL,
  fingerprint  integer     NOT NULL, -- CRC-32C of key and value: dedup.Fingerprint. It fills a gap that alignment leaves
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

-- Claims of consumers that never forget.
CREATE TABLE effectonce.processed_forever (
  message_id   uuid        NOT NULL,
  consumer     integer     NOT NULL,
  fingerprint  integer     NOT NULL,
  processed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT processed_forever_pkey PRIMARY KEY (message_id, consumer)
);

-- Jobs that one process at a time does for all: making partitions ahead, forgetting what is old.
CREATE TABLE effectonce.maintenance (
  job         text        NOT NULL PRIMARY KEY CHECK (octet_length(job) BETWEEN 1 AND 64),
  owner       text        CHECK (octet_length(owner) <= 255),
  lease_until timestamptz,
  epoch       bigint      NOT NULL DEFAULT 0,
  state       jsonb       NOT NULL DEFAULT '{}', -- where the job goes on
  done_at     timestamptz                        -- end of the last complete run
);

-- === Positions

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
  -- Whether the last holder released the partition in good order. If not, and nothing was finished since it
  -- took over (next_offset = held_offset), a message may have killed it: stuck counts such takeovers.
  released       boolean     NOT NULL DEFAULT true,
  held_offset    bigint,
  stuck          integer     NOT NULL DEFAULT 0,
  -- At this time the partition was handled up to its end: an idle partition passes time, too.
  caught_up_at   timestamptz,
  -- Why the partition stands still; null: it does not.
  trouble        text        CHECK (octet_length(trouble) <= 2048),
  trouble_since  timestamptz,
  -- Offsets from handled_from to next_offset were worked through by the consumer handled_by under handled_rule:
  -- a claim that is fresh in there was forgotten. Null: nothing is known about what lies behind the position.
  -- After a rewind the range reaches up to handled_to, and it begins at rewound_from once the position has reached
  -- handled_from.
  handled_from   bigint,
  handled_to     bigint,
  rewound_from   bigint,
  handled_by     integer,
  handled_rule   text        CHECK (octet_length(handled_rule) <= 2048),
  -- An operator's order to resume at this offset; -2: at the start of the topic, -1: at its end. The holder
  -- carries it out and takes it away.
  resume_at      bigint      CHECK (resume_at >= -2),
  CONSTRAINT consumer_positions_pkey PRIMARY KEY (consumer_group, topic, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Topics that an operator paused for a group.
CREATE TABLE effectonce.consumer_pauses (
  consumer_group text        NOT NULL CHECK (octet_length(consumer_group) BETWEEN 1 AND 255),
  topic          text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  who            text        NOT NULL CHECK (octet_length(who) BETWEEN 1 AND 255),
  why            text        NOT NULL CHECK (octet_length(why) BETWEEN 1 AND 2048),
  paused_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT consumer_pauses_pkey PRIMARY KEY (consumer_group, topic)
);

-- Advances a position by compare-and-set and raises where the caller does not hold it any more, so
-- that the COMMIT which travels in the same round trip becomes a rollback. Never back: a batch of
-- redeliveries leaves the position where it is. p_known is what the caller saw stored last: a database
-- that is behind it has lost commits (a failover), and the caller must go back with it.
CREATE FUNCTION effectonce.advance_position(
  p_group text, p_topic text, p_partition integer, p_epoch bigint, p_known bigint, p_next_offset bigint, p_record_time timestamptz)
RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
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

-- Raises where the caller does not hold the position any more, or the database is behind what the caller saw stored, and
-- keeps others from taking the position over before the caller's transaction has ended.
CREATE FUNCTION effectonce.check_position(p_group text, p_topic text, p_partition integer, p_epoch bigint, p_known bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM 1 FROM effectonce.consumer_positions
  WHERE consumer_group = p_group AND topic = p_topic AND partition = p_partition AND epoch = p_epoch
    AND (p_known IS NULL OR next_offset >= p_known)
  FOR SHARE;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'position of group %, topic %, partition % is held by another consumer, or went back', p_group, p_topic, p_partition
      USING ERRCODE = 'EO001', HINT = format('epoch %s, offset %s', p_epoch, p_known);
  END IF;
END
$$;

-- A consumer's transaction opens a holdable cursor on this function, and closes it right before its own
-- COMMIT. PostgreSQL runs what is left of such a cursor at COMMIT: one that comes from anybody else fails
-- here, before it can make claims durable whose effects are still to come.
CREATE FUNCTION effectonce.refuse_commit() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION 'who began the transaction ends it, not the handler' USING ERRCODE = 'EO002',
    HINT = 'Return nil to commit, or an error to roll back.';
END
$$;

-- === Failures

-- Messages that could not be handled, as they were, and the later messages of their keys behind them. The
-- row is written in the transaction that claims the message. Within (consumer, topic, partition, key) the
-- order of seq is the order of handling.
CREATE TABLE effectonce.parked_messages (
  seq         bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1),
  consumer    integer     NOT NULL,
  message_id  uuid        NOT NULL,
  topic       text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  topic_id    uuid,
  partition   integer     NOT NULL,
  "offset"    bigint      NOT NULL,
  key         bytea,                 -- null: no other message waits for it
  payload     bytea,
  headers     jsonb       NOT NULL DEFAULT '{}',
  record_time timestamptz,
  reason      text        NOT NULL CONSTRAINT parked_messages_reason_is_unknown CHECK (reason IN (
    'failed', 'permanent', 'undecodable', 'unknown_type', 'invalid', 'too_large', 'expired', 'conflict', 'crashed', 'behind')),
  error       text        NOT NULL CHECK (octet_length(error) <= 2048),
  attempts    integer     NOT NULL DEFAULT 0,
  -- parked: waits for an operator, and holds its key. behind: waits for the one before it. retry: the
  -- consumer that holds the partition handles it next, not before retry_at.
  state       text        NOT NULL CONSTRAINT parked_messages_state_is_unknown CHECK (state IN ('parked', 'behind', 'retry')),
  parked_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
  retry_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
  released_at timestamptz,           -- the time of its children: of the record, or of the first attempt since an operator's retry
  CONSTRAINT parked_messages_pkey PRIMARY KEY (seq),
  CONSTRAINT parked_messages_once UNIQUE (consumer, topic, partition, "offset", message_id)
);
CREATE INDEX parked_messages_head ON effectonce.parked_messages (consumer, topic, partition, seq) WHERE state <> 'behind';
CREATE INDEX parked_messages_key ON effectonce.parked_messages (consumer, topic, partition, sha256(key), seq);
CREATE INDEX parked_messages_message ON effectonce.parked_messages (message_id);
CREATE INDEX parked_messages_due ON effectonce.parked_messages (consumer, topic, partition, retry_at) WHERE state = 'retry';

COMMENT ON TABLE effectonce.parked_messages IS
  'Messages that wait for an operator: see outbox-relay parked. UPDATE … SET state = ''retry'' hands one back to the running consumers.';

-- When the first parked message of a key goes, the next one comes first: one that only waited is tried, one
-- with a reason of its own waits for an operator. Consumers and operators that delete need not know about it.
-- The lock waits for a transaction that deletes the next one meanwhile; then the one behind it comes first.
CREATE FUNCTION effectonce.parked_promote() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  WITH first AS MATERIALIZED ( -- once: what was updated is passed over by a second reading
    SELECT f.seq FROM (SELECT DISTINCT consumer, topic, partition, sha256(key) AS hash FROM gone WHERE key IS NOT NULL AND state <> 'behind'
      ORDER BY consumer, topic, partition, hash) AS k
    CROSS JOIN LATERAL (SELECT n.seq FROM effectonce.parked_messages n
      WHERE n.consumer = k.consumer AND n.topic = k.topic AND n.partition = k.partition AND sha256(n.key) = k.hash
      ORDER BY n.seq LIMIT 1 FOR NO KEY UPDATE) AS f)
  UPDATE effectonce.parked_messages p SET
    state = CASE WHEN p.reason = 'behind' THEN 'retry' ELSE 'parked' END, retry_at = clock_timestamp()
  FROM first WHERE p.seq = first.seq AND p.state = 'behind';
  RETURN NULL;
END
$$;
CREATE TRIGGER parked_promote AFTER DELETE ON effectonce.parked_messages
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION effectonce.parked_promote();
ALTER TABLE effectonce.parked_messages ENABLE ALWAYS TRIGGER parked_promote; -- also where a handler sets session_replication_role

-- === Fences

-- The newest version of a resource that was applied.
CREATE TABLE effectonce.fences (
  scope    text   NOT NULL CHECK (octet_length(scope) BETWEEN 1 AND 255),
  resource text   NOT NULL CHECK (octet_length(resource) BETWEEN 1 AND 1024),
  version  bigint NOT NULL,
  CONSTRAINT fences_pkey PRIMARY KEY (scope, resource)
) WITH (fillfactor = 70);
