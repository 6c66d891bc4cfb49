-- effectonce, schema version 5: what a consumer has to remember to keep its promise.
--
-- Additive: consumers of the previous release that are running go on with this schema. Columns that they do
-- not know have defaults that say "written by the previous release".

SET search_path = pg_catalog, pg_temp;

-- The oldest schema version whose programs work with this schema: migrations.Check reads it.
CREATE TABLE effectonce.schema_compatibility (oldest integer NOT NULL);
INSERT INTO effectonce.schema_compatibility VALUES (5);

-- ---------------------------------------------------------------------------------------------
-- Claims: what was forgotten, and under which rule messages got their IDs

ALTER TABLE effectonce.consumers
  -- Claims of messages up to this time may have been forgotten; null: none were. Written by the transaction
  -- that forgets, never moved back. The window only says what maintenance may forget from now on.
  ADD COLUMN forgotten_to timestamptz,
  -- How messages get their IDs. Names that the previous release registered keep its rule.
  ADD COLUMN id_rule text NOT NULL DEFAULT 'legacy'
    CONSTRAINT consumers_id_rule_is_too_long CHECK (octet_length(id_rule) BETWEEN 1 AND 2048);

-- What the previous release forgot: everything before each window, and every day before the first partition.
UPDATE effectonce.consumers SET forgotten_to = greatest(clock_timestamp() - dedup_window, past.bound)
FROM (SELECT to_timestamp(('x' || substr(replace((regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([0-9a-f-]{36})''\)'))[1], '-', ''), 1, 12))::bit(48)::bigint / 1000.0) AS bound
  FROM pg_catalog.pg_class c WHERE c.oid = 'effectonce.processed_messages_past'::regclass) AS past
WHERE dedup_window IS NOT NULL;

-- The previous release forgets claims without noting it, so it must not do that any more: its lease never
-- ends. This release has another one.
INSERT INTO effectonce.maintenance AS m (job, lease_until, epoch) VALUES ('dedup', 'infinity', 1)
ON CONFLICT (job) DO UPDATE SET lease_until = 'infinity', epoch = m.epoch + 1;
-- dropped_to: days before it are gone, and the marks above say so. If later ones are gone without a note, a process
-- of the previous release was in the middle of a run while this migration ran.
INSERT INTO effectonce.maintenance (job, state, done_at)
SELECT 'claims', d.state || jsonb_build_object('dropped_to',
    to_timestamp(('x' || substr(replace((regexp_match(pg_get_expr(c.relpartbound, c.oid), 'TO \(''([0-9a-f-]{36})''\)'))[1], '-', ''), 1, 12))::bit(48)::bigint / 1000.0)), d.done_at
FROM effectonce.maintenance d, pg_catalog.pg_class c WHERE d.job = 'dedup' AND c.oid = 'effectonce.processed_messages_past'::regclass;

-- ---------------------------------------------------------------------------------------------
-- Positions: what was worked through, and by whom

ALTER TABLE effectonce.consumer_positions
  -- Offsets from handled_from to next_offset were worked through by the consumer handled_by under handled_rule:
  -- a claim that is fresh in there was forgotten. Null: nothing is known about what lies behind the position.
  ADD COLUMN handled_from bigint,
  ADD COLUMN handled_by   integer,
  ADD COLUMN handled_rule text CHECK (octet_length(handled_rule) <= 2048),
  -- Messages before this offset may have been attempted by the previous release, whose keys for foreign calls
  -- depended on times.
  ADD COLUMN keys_from    bigint,
  -- Epoch of the last holder that wrote the columns above. A holder of the previous release leaves it behind.
  ADD COLUMN known_epoch  bigint,
  -- An operator's order to resume at this offset; -2: at the start of the topic, -1: at its end. The holder
  -- carries it out and takes it away.
  ADD COLUMN resume_at    bigint CHECK (resume_at >= -2);

-- The partitions that a topic had when a group met it. Config.Start decides where these begin; partitions
-- that are added later begin at their start.
CREATE TABLE effectonce.consumer_topics (
  consumer_group text        NOT NULL CHECK (octet_length(consumer_group) BETWEEN 1 AND 255),
  topic          text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  topic_id       uuid,
  partitions     integer     NOT NULL CHECK (partitions >= 0),
  met_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT consumer_topics_pkey PRIMARY KEY (consumer_group, topic)
);
INSERT INTO effectonce.consumer_topics (consumer_group, topic, topic_id, partitions)
SELECT consumer_group, topic, (array_agg(topic_id ORDER BY partition DESC))[1], max(partition) + 1
FROM effectonce.consumer_positions GROUP BY consumer_group, topic;

-- Topics that an operator paused for a group.
CREATE TABLE effectonce.consumer_pauses (
  consumer_group text        NOT NULL CHECK (octet_length(consumer_group) BETWEEN 1 AND 255),
  topic          text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  who            text        NOT NULL CHECK (octet_length(who) BETWEEN 1 AND 255),
  why            text        NOT NULL CHECK (octet_length(why) BETWEEN 1 AND 2048),
  paused_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT consumer_pauses_pkey PRIMARY KEY (consumer_group, topic)
);

-- check_position for workers: it also raises where the database is behind what the caller saw stored.
CREATE FUNCTION effectonce.check_position(p_group text, p_topic text, p_partition integer, p_epoch bigint, p_known bigint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
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

-- ---------------------------------------------------------------------------------------------
-- Failures

-- Generation of the message's keys for foreign calls. 1: derived with a time, by the previous release.
-- 2: derived from consumer, message ID and step alone.
ALTER TABLE effectonce.message_attempts ADD COLUMN keys smallint NOT NULL DEFAULT 1;
ALTER TABLE effectonce.parked_messages
  ADD COLUMN keys      smallint NOT NULL DEFAULT 1,
  -- The time in keys of generation 1. Null: released_at, or record_time where that is null, too: the previous release
  -- may still try the message again, under the time at which it does.
  ADD COLUMN call_time timestamptz;
UPDATE effectonce.parked_messages SET call_time = released_at WHERE released_at IS NOT NULL;

CREATE INDEX parked_messages_due ON effectonce.parked_messages (consumer, topic, partition, retry_at) WHERE state = 'retry';

-- When the first parked message of a key goes, the next one comes first: one that only waited is tried, one
-- with a reason of its own waits for an operator. Consumers and operators that delete need not know about it.
-- The lock waits for a transaction that deletes the next one meanwhile; then the one behind it comes first.
CREATE FUNCTION effectonce.parked_promote() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  WITH first AS MATERIALIZED ( -- once: what was updated is passed over by a second reading
    SELECT f.seq FROM (SELECT DISTINCT consumer, topic, partition, sha256(key) AS hash FROM gone WHERE key IS NOT NULL AND state <> 'behind'
      ORDER BY consumer, topic, partition, hash) AS k
    CROSS JOIN LATERAL (SELECT n.seq FROM effectonce.parked_messages n
      WHERE n.consumer = k.consumer AND n.topic = k.topic AND n.partition = k.partition AND sha256(n.key) = k.hash
      ORDER BY n.seq LIMIT 1 FOR NO KEY UPDATE) AS f)
  UPDATE effectonce.parked_messages p SET
    state = CASE WHEN p.reason = 'behind' THEN 'retry' ELSE 'parked' END, retry_at = clock_timestamp(), released_at = NULL
  FROM first WHERE p.seq = first.seq AND p.state = 'behind';
  RETURN NULL;
END
$$;
CREATE TRIGGER parked_promote AFTER DELETE ON effectonce.parked_messages
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION effectonce.parked_promote();
