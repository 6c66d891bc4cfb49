-- Removes what 0005_promise.up.sql made. Marks of what was forgotten are lost: the previous release judges by
-- windows alone. Orders and pauses of operators are lost, too.

SET search_path = pg_catalog, pg_temp;

DROP TRIGGER parked_promote ON effectonce.parked_messages;
DROP FUNCTION effectonce.parked_promote();
DROP INDEX effectonce.parked_messages_due;
ALTER TABLE effectonce.parked_messages DROP COLUMN keys, DROP COLUMN call_time;
ALTER TABLE effectonce.message_attempts DROP COLUMN keys;
DROP FUNCTION effectonce.check_position(text, text, integer, bigint, bigint);
DROP TABLE effectonce.consumer_pauses;
DROP TABLE effectonce.consumer_topics;
ALTER TABLE effectonce.consumer_positions
  DROP COLUMN handled_from, DROP COLUMN handled_by, DROP COLUMN handled_rule, DROP COLUMN keys_from, DROP COLUMN known_epoch,
  DROP COLUMN resume_at;
UPDATE effectonce.maintenance d SET lease_until = NULL, state = c.state - 'dropped_to', done_at = c.done_at
FROM effectonce.maintenance c WHERE d.job = 'dedup' AND c.job = 'claims';
DELETE FROM effectonce.maintenance WHERE job = 'claims';
ALTER TABLE effectonce.consumers DROP COLUMN forgotten_to, DROP COLUMN id_rule;
DROP TABLE effectonce.schema_compatibility;
