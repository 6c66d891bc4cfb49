-- Removes what 0004_idempotency.up.sql made, with all keys: what was asked for under them can be executed again.

SET search_path = pg_catalog, pg_temp;

DROP TABLE effectonce.pending_requests;
DROP FUNCTION effectonce.finish_key(text, text, text, bigint, text, integer, jsonb, bytea, boolean, interval);
DROP FUNCTION effectonce.advance_key(text, text, text, bigint, text, bytea);
DROP TABLE effectonce.idempotency_keys;
DROP DOMAIN effectonce.key_status;
DROP DOMAIN effectonce.key_state;
DROP DOMAIN effectonce.key_fingerprint;
DROP DOMAIN effectonce.key_name;
