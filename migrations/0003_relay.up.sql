-- effectonce, schema version 3: slots of the outbox, shards and replicas of relays, topics that wait, messages
-- for later.

SET search_path = pg_catalog, pg_temp;

-- ---------------------------------------------------------------------------------------------
-- Outbox: slots that take turns

-- Published rows leave by TRUNCATE of a whole slot, never row by row. New rows go to the slot that the sequence
-- outbox_slot names; a relay turns it. The sequence only chooses: a row is right in every slot, and what may be
-- truncated is looked up under the slot's lock.
LOCK TABLE effectonce.outbox IN ACCESS EXCLUSIVE MODE;
ALTER TABLE effectonce.outbox RENAME TO outbox_unslotted;
ALTER TABLE effectonce.outbox_unslotted RENAME CONSTRAINT outbox_pkey TO outbox_unslotted_pkey;
ALTER SEQUENCE effectonce.outbox_seq_seq RENAME TO outbox_unslotted_seq_seq;
ALTER INDEX effectonce.outbox_txid RENAME TO outbox_unslotted_txid;

CREATE SEQUENCE effectonce.outbox_slot AS smallint MINVALUE 0 MAXVALUE 3 START 0;
SELECT setval('effectonce.outbox_slot', 0);
-- The column's default reads it with the rights of whoever inserts. Without any, PostgreSQL refuses the row up to
-- version 17, and fills slot 0 for ever from 18 on. SELECT does not turn it, as USAGE would.
GRANT SELECT ON SEQUENCE effectonce.outbox_slot TO PUBLIC;

-- Append-only: the relay neither updates nor deletes a row, so there are no dead tuples.
-- The order of the first two columns matters: defaults are computed in this order, so a row has its
-- transaction id before it has its seq. The relay's floor relies on it.
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
  CONSTRAINT outbox_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]{1,249}$' AND topic NOT IN ('.', '..')),
  CONSTRAINT outbox_headers_are_no_json_object CHECK (jsonb_typeof(headers) = 'object')
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

-- What is there moves, with its place in the order; and so do the rights on the table, its columns and its sequence.
INSERT INTO effectonce.outbox (txid, seq, id, topic, key, payload, headers, created_at, slot) OVERRIDING SYSTEM VALUE
SELECT txid, seq, id, topic, key, payload, headers, created_at, 0 FROM effectonce.outbox_unslotted ORDER BY seq;
SELECT setval('effectonce.outbox_seq_seq', last_value, is_called) FROM effectonce.outbox_unslotted_seq_seq;
DO $$
DECLARE
  given record;
BEGIN
  -- Without an ACL the owner alone has rights; the new table may be somebody else's.
  FOR given IN
    SELECT a.privilege_type, r.columns, r.target, a.grantee, a.is_grantable
    FROM pg_class c, pg_class n, LATERAL (
      SELECT '' AS columns, 'TABLE effectonce.outbox' AS target, coalesce(c.relacl, acldefault('r', c.relowner)) AS acl
      UNION ALL
      SELECT format('(%I)', attname), 'TABLE effectonce.outbox', attacl FROM pg_attribute WHERE attrelid = c.oid AND NOT attisdropped
      UNION ALL
      SELECT '', 'SEQUENCE effectonce.outbox_seq_seq', coalesce(relacl, acldefault('s', relowner)) FROM pg_class
      WHERE oid = 'effectonce.outbox_unslotted_seq_seq'::regclass
    ) r, LATERAL aclexplode(r.acl) a
    WHERE c.oid = 'effectonce.outbox_unslotted'::regclass AND n.oid = 'effectonce.outbox'::regclass AND a.grantee <> n.relowner
  LOOP
    EXECUTE format('GRANT %s %s ON %s TO %s%s', given.privilege_type, given.columns, given.target,
      CASE given.grantee WHEN 0 THEN 'PUBLIC' ELSE given.grantee::regrole::text END,
      CASE WHEN given.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
  END LOOP;
END
$$;
DROP TABLE effectonce.outbox_unslotted;

-- When each slot was last turned to, and away from.
CREATE TABLE effectonce.outbox_slots (
  slot         smallint    NOT NULL,
  turned_to    timestamptz NOT NULL DEFAULT clock_timestamp(),
  turned_away  timestamptz,
  truncated_at timestamptz,
  CONSTRAINT outbox_slots_pkey PRIMARY KEY (slot)
);
INSERT INTO effectonce.outbox_slots (slot, turned_away) VALUES (0, NULL), (1, clock_timestamp()), (2, clock_timestamp()), (3, clock_timestamp());

-- ---------------------------------------------------------------------------------------------
-- Relays: shards and replicas

CREATE TABLE effectonce.outbox_relays (
  relay         text     NOT NULL,
  shards        smallint NOT NULL DEFAULT 1,
  shards_wanted smallint,                      -- a change that is under way; null: none
  created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_relays_pkey PRIMARY KEY (relay),
  CONSTRAINT outbox_relays_relay_is_too_long CHECK (octet_length(relay) BETWEEN 1 AND 255),
  CONSTRAINT outbox_relays_shards_are_out_of_bounds CHECK (shards BETWEEN 1 AND 256 AND shards_wanted BETWEEN 1 AND 256)
);
INSERT INTO effectonce.outbox_relays (relay) SELECT relay FROM effectonce.outbox_progress GROUP BY relay;

ALTER TABLE effectonce.outbox_progress
  ADD COLUMN shards         smallint NOT NULL DEFAULT 1, -- the row is about the rows with outbox.shard % shards = shard
  ADD COLUMN timeline       integer,                     -- of the cluster that the ticks belong to
  ADD COLUMN advanced_epoch bigint NOT NULL DEFAULT 0;   -- the epoch under which progress was stored last

-- The processes that share a relay's shards.
CREATE TABLE effectonce.outbox_replicas (
  relay       text        NOT NULL,
  owner       text        NOT NULL,
  alive_until timestamptz NOT NULL,
  CONSTRAINT outbox_replicas_pkey PRIMARY KEY (relay, owner),
  CONSTRAINT outbox_replicas_owner_is_too_long CHECK (octet_length(owner) BETWEEN 1 AND 255)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- ---------------------------------------------------------------------------------------------
-- Rows that wait

-- Topics whose rows wait, in outbox_dead, until the topic is resumed.
CREATE TABLE effectonce.outbox_paused (
  relay     text        NOT NULL CHECK (octet_length(relay) BETWEEN 1 AND 255),
  topic     text        NOT NULL CHECK (octet_length(topic) BETWEEN 1 AND 249),
  who       text        NOT NULL CHECK (octet_length(who) <= 255),
  why       text        NOT NULL CHECK (octet_length(why) <= 2048),
  paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_paused_pkey PRIMARY KEY (relay, topic)
);
ALTER TABLE effectonce.outbox_dead
  ADD COLUMN shard smallint NOT NULL GENERATED ALWAYS AS (get_byte(sha256(coalesce(key, uuid_send(id))), 0)) STORED,
  DROP CONSTRAINT outbox_dead_reason_check,
  ADD CONSTRAINT outbox_dead_reason_check CHECK (reason IN ('unknown_topic', 'too_large', 'refused', 'bad_headers', 'paused', 'behind'));

-- Messages for later: a relay moves them to the outbox when they are due.
CREATE TABLE effectonce.outbox_scheduled (
  due_at     timestamptz NOT NULL,
  id         uuid        NOT NULL DEFAULT effectonce.uuid_v7(),
  topic      text        NOT NULL,
  key        bytea,
  payload    bytea,
  headers    jsonb       NOT NULL DEFAULT '{}',
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_scheduled_pkey PRIMARY KEY (id, topic),
  CONSTRAINT outbox_scheduled_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]{1,249}$' AND topic NOT IN ('.', '..')),
  CONSTRAINT outbox_scheduled_headers_are_no_json_object CHECK (jsonb_typeof(headers) = 'object')
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
CREATE INDEX outbox_scheduled_due ON effectonce.outbox_scheduled (due_at);
