SET search_path = pg_catalog, pg_temp;

DROP TABLE effectonce.fences;
DROP TABLE effectonce.parked_messages;
DROP TABLE effectonce.consumer_pauses;
DROP TABLE effectonce.consumer_positions;
DROP TABLE effectonce.maintenance;
DROP TABLE effectonce.processed_forever;
DROP TABLE effectonce.processed_messages;
DROP TABLE effectonce.consumers;
DROP FUNCTION effectonce.parked_promote();
DROP FUNCTION effectonce.refuse_commit();
DROP FUNCTION effectonce.check_position(text, text, integer, bigint, bigint);
DROP FUNCTION effectonce.advance_position(text, text, integer, bigint, bigint, bigint, timestamptz);
DROP FUNCTION effectonce.message_id(text, text);
DROP FUNCTION effectonce.uuid_floor(timestamptz);
