-- effectonce, schema version 2: failures, parking, dedup windows, fences, the operator's log.

SET search_path = pg_catalog, pg_temp;

-- ---------------------------------------------------------------------------------------------
-- Claims: how long they are kept, and of what content

-- Null: for ever; such a consumer claims in processed_forever.
ALTER TABLE effectonce.consumers ADD COLUMN dedup_window interval DEFAULT '7 days'
  CONSTRAINT consumers_dedup_window_is_not_positive CHECK (dedup_window > interval '0');

-- The first 128 bits of SHA-256 over key and payload, where the consumer compares them; else null, which
-- takes no room: the header of the row has a spare byte for it.
ALTER TABLE effectonce.processed_messages ADD COLUMN fingerprint uuid;

CREATE TABLE effectonce.processed_forever (
  message_id   uuid        NOT NULL,
  consumer     integer     NOT NULL,
  processed_at timestamptz NOT NULL DEFAULT now(),
  fingerprint  uuid,
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

-- ---------------------------------------------------------------------------------------------
-- Positions: what the next holder has to know

ALTER TABLE effectonce.consumer_positions
  -- Whether the last holder gave the partition up in good order. If not, and nothing was finished since it
  -- took over (next_offset = held_offset), a message may have killed it: stuck counts such takeovers.
  ADD COLUMN released     boolean NOT NULL DEFAULT true,
  ADD COLUMN held_offset  bigint,
  ADD COLUMN stuck        integer NOT NULL DEFAULT 0,
  -- At this time the partition was handled up to its end: an idle partition passes time, too.
  ADD COLUMN caught_up_at timestamptz,
  -- Why the partition stands still; null: it does not.
  ADD COLUMN trouble       text CHECK (octet_length(trouble) <= 2048),
  ADD COLUMN trouble_since timestamptz;

CREATE OR REPLACE FUNCTION effectonce.advance_position(
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
    trouble = NULL, trouble_since = NULL,
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

-- Raises where the caller does not hold the position any more, and keeps others from taking it over before
-- the caller's transaction has ended.
CREATE FUNCTION effectonce.check_position(p_group text, p_topic text, p_partition integer, p_epoch bigint) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  PERFORM 1 FROM effectonce.consumer_positions
  WHERE consumer_group = p_group AND topic = p_topic AND partition = p_partition AND epoch = p_epoch
  FOR SHARE;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'position of group %, topic %, partition % is held by another consumer', p_group, p_topic, p_partition
      USING ERRCODE = 'EO001', HINT = format('epoch %s', p_epoch);
  END IF;
END
$$;

-- A consumer's transaction opens a holdable cursor on this function, and closes it right before its own
-- COMMIT. PostgreSQL runs what is left of such a cursor at COMMIT: one that comes from anybody else fails
-- here, before it can make claims durable whose effects are still to come.
CREATE FUNCTION effectonce.refuse_commit() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  RAISE EXCEPTION 'who began the transaction ends it, not the handler' USING ERRCODE = 'EO002',
    HINT = 'Return nil to commit, or an error to roll back.';
END
$$;

-- ---------------------------------------------------------------------------------------------
-- Failures

-- Attempts at messages that failed or may have killed their consumer, written before each attempt. A row
-- goes with the success, or with the parking, of its message.
CREATE TABLE effectonce.message_attempts (
  consumer   integer     NOT NULL,
  message_id uuid        NOT NULL,
  attempts   integer     NOT NULL,
  error      text        CHECK (octet_length(error) <= 2048), -- of the last attempt that ended
  updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT message_attempts_pkey PRIMARY KEY (consumer, message_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

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
  released_at timestamptz,           -- when it was first tried since the last retry; the time of its children
  CONSTRAINT parked_messages_pkey PRIMARY KEY (seq),
  CONSTRAINT parked_messages_once UNIQUE (consumer, topic, partition, "offset", message_id)
);
CREATE INDEX parked_messages_head ON effectonce.parked_messages (consumer, topic, partition, seq) WHERE state <> 'behind';
CREATE INDEX parked_messages_key ON effectonce.parked_messages (consumer, topic, partition, sha256(key), seq);
CREATE INDEX parked_messages_message ON effectonce.parked_messages (message_id);

COMMENT ON TABLE effectonce.parked_messages IS
  'Messages that wait for an operator: see outbox-relay parked. UPDATE … SET state = ''retry'' hands one back to the running consumers.';

-- Every retry, discard and reset by a person.
CREATE TABLE effectonce.operator_actions (
  id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  who     text        NOT NULL CHECK (octet_length(who) BETWEEN 1 AND 255),
  what    text        NOT NULL CHECK (octet_length(what) BETWEEN 1 AND 64), -- parked.retry, parked.discard, …
  why     text        NOT NULL CHECK (octet_length(why) BETWEEN 1 AND 2048),
  "when"  timestamptz NOT NULL DEFAULT clock_timestamp(),
  subject jsonb       NOT NULL DEFAULT '{}',                                -- what it was done to
  db_role text        NOT NULL DEFAULT session_user
);
CREATE INDEX operator_actions_when ON effectonce.operator_actions ("when");

-- ---------------------------------------------------------------------------------------------
-- Fences

-- The newest version of a resource that was applied.
CREATE TABLE effectonce.fences (
  scope    text   NOT NULL CHECK (octet_length(scope) BETWEEN 1 AND 255),
  resource text   NOT NULL CHECK (octet_length(resource) BETWEEN 1 AND 1024),
  version  bigint NOT NULL,
  content  uuid,  -- the first 128 bits of SHA-256 of what was applied, where the caller gives it
  CONSTRAINT fences_pkey PRIMARY KEY (scope, resource)
) WITH (fillfactor = 70);
