-- Removes what 0003_relay.up.sql made. Messages for later that are not due are lost, and relays with several
-- shards go on with one, at the slowest shard's progress: they publish again what the others had published.

SET search_path = pg_catalog, pg_temp;

DROP TABLE effectonce.outbox_scheduled;
DROP TABLE effectonce.outbox_paused;
DROP TABLE effectonce.outbox_replicas;
UPDATE effectonce.outbox_dead SET reason = 'refused' WHERE reason = 'paused';
ALTER TABLE effectonce.outbox_dead
  DROP COLUMN shard,
  DROP CONSTRAINT outbox_dead_reason_check,
  ADD CONSTRAINT outbox_dead_reason_check CHECK (reason IN ('unknown_topic', 'too_large', 'refused', 'bad_headers', 'behind'));

-- Of two snapshots the earlier one has the smaller xmax, or the same one and more transactions that are open.
UPDATE effectonce.outbox_progress p SET tick = s.tick, next_tick = NULL, seq = 0, floor = s.floor, lease_until = NULL, epoch = s.epoch + 1
FROM (SELECT g.relay, min(g.floor) AS floor, max(g.epoch) AS epoch,
    (array_agg(g.tick ORDER BY pg_snapshot_xmax(t.snapshot), (SELECT -count(*) FROM pg_snapshot_xip(t.snapshot))))[1] AS tick
  FROM effectonce.outbox_progress g JOIN effectonce.outbox_ticks t USING (tick) GROUP BY g.relay HAVING count(*) > 1) s
WHERE p.relay = s.relay AND p.shard = 0;
DELETE FROM effectonce.outbox_progress WHERE shard > 0;
ALTER TABLE effectonce.outbox_progress DROP COLUMN shards, DROP COLUMN timeline, DROP COLUMN advanced_epoch;
DROP TABLE effectonce.outbox_relays;
DROP TABLE effectonce.outbox_slots;

LOCK TABLE effectonce.outbox IN ACCESS EXCLUSIVE MODE;
ALTER TABLE effectonce.outbox RENAME TO outbox_slotted;
ALTER TABLE effectonce.outbox_slotted RENAME CONSTRAINT outbox_pkey TO outbox_slotted_pkey;
ALTER SEQUENCE effectonce.outbox_seq_seq RENAME TO outbox_slotted_seq_seq;
ALTER INDEX effectonce.outbox_txid RENAME TO outbox_slotted_txid;
CREATE TABLE effectonce.outbox (
  txid       xid8        NOT NULL DEFAULT pg_current_xact_id(),
  seq        bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1),
  id         uuid        NOT NULL DEFAULT effectonce.uuid_v7(),
  topic      text        NOT NULL,
  key        bytea,
  payload    bytea,
  headers    jsonb       NOT NULL DEFAULT '{}',
  shard      smallint    NOT NULL GENERATED ALWAYS AS (get_byte(sha256(coalesce(key, uuid_send(id))), 0)) STORED,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT outbox_pkey PRIMARY KEY (seq),
  CONSTRAINT outbox_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]{1,249}$' AND topic NOT IN ('.', '..')),
  CONSTRAINT outbox_headers_are_no_json_object CHECK (jsonb_typeof(headers) = 'object')
);
CREATE INDEX outbox_txid ON effectonce.outbox (txid, seq);
ALTER TABLE effectonce.outbox SET (
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000,
  autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 200000);
COMMENT ON TABLE effectonce.outbox IS
  'INSERT INTO outbox (topic, key, payload) is a complete publish. Hold the lock that orders a key before inserting its row.';
INSERT INTO effectonce.outbox (txid, seq, id, topic, key, payload, headers, created_at) OVERRIDING SYSTEM VALUE
SELECT txid, seq, id, topic, key, payload, headers, created_at FROM effectonce.outbox_slotted ORDER BY seq;
SELECT setval('effectonce.outbox_seq_seq', last_value, is_called) FROM effectonce.outbox_slotted_seq_seq;
-- The rights move back.
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
      SELECT format('(%I)', attname), 'TABLE effectonce.outbox', attacl FROM pg_attribute WHERE attrelid = c.oid AND NOT attisdropped AND attname <> 'slot'
      UNION ALL
      SELECT '', 'SEQUENCE effectonce.outbox_seq_seq', coalesce(relacl, acldefault('s', relowner)) FROM pg_class
      WHERE oid = 'effectonce.outbox_slotted_seq_seq'::regclass
    ) r, LATERAL aclexplode(r.acl) a
    WHERE c.oid = 'effectonce.outbox_slotted'::regclass AND n.oid = 'effectonce.outbox'::regclass AND a.grantee <> n.relowner
  LOOP
    EXECUTE format('GRANT %s %s ON %s TO %s%s', given.privilege_type, given.columns, given.target,
      CASE given.grantee WHEN 0 THEN 'PUBLIC' ELSE given.grantee::regrole::text END,
      CASE WHEN given.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
  END LOOP;
END
$$;
DROP TABLE effectonce.outbox_slotted;
DROP SEQUENCE effectonce.outbox_slot;
