-- Removes what 0001_pipeline.up.sql made. Outbox rows that are not published yet, and every claim, are
-- lost with it. The schema itself stays: the version table lives in it.

SET search_path = pg_catalog, pg_temp;

DROP FUNCTION effectonce.advance_position(text, text, integer, bigint, bigint, bigint, timestamptz);
DROP TABLE effectonce.consumer_positions;
DROP TABLE effectonce.processed_messages;
DROP TABLE effectonce.consumers;
DROP TABLE effectonce.outbox_dead;
DROP TABLE effectonce.outbox_progress;
DROP TABLE effectonce.outbox_ticks;
DROP TABLE effectonce.outbox;
DROP FUNCTION effectonce.message_id(text, text);
DROP FUNCTION effectonce.uuid_floor(timestamptz);
DROP FUNCTION effectonce.uuid_v7();
