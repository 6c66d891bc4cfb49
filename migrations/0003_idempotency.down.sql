SET search_path = pg_catalog, pg_temp;

DROP TABLE effectonce.pending_requests;
DROP TABLE effectonce.idempotency_keys;
DROP FUNCTION effectonce.finish_key(text, text, text, bigint, text, integer, jsonb, bytea, boolean, interval);
DROP FUNCTION effectonce.advance_key(text, text, text, bigint, text, bytea);
DROP DOMAIN effectonce.key_status, effectonce.key_call, effectonce.key_state, effectonce.key_fingerprint, effectonce.key_name;
