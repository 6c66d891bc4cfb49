SET search_path = pg_catalog, pg_temp;

DROP TABLE effectonce.pending_requests;
DROP TABLE effectonce.idempotency_keys;
DROP FUNCTION effectonce.finish_key(text, text, text, bigint, text, integer, jsonb, bytea, boolean, interval);
DROP FUNCTION effectonce.advance_key(text, text, text, bigint, text, bytea);
DROP DOMAIN effectonce.key_status;
DROP DOMAIN effectonce.key_state;
DROP DOMAIN effectonce.key_fingerprint;
DROP DOMAIN effectonce.key_name;
