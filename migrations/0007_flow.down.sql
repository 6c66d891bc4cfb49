-- Removes what 0007_flow.up.sql made: the previous release tells flows of one operation apart by their phases, and repeats calls
-- however old they are.

SET search_path = pg_catalog, pg_temp;

CREATE OR REPLACE FUNCTION effectonce.advance_key(
  p_scope text, p_operation text, p_key text, p_token bigint, p_phase text, p_data bytea) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  UPDATE effectonce.idempotency_keys SET
    phases = array_append(phases, p_phase), data = p_data, calling = NULL, attempts = 1, error = NULL
  WHERE scope = p_scope AND operation = p_operation AND key = p_key AND lock_token = p_token AND coalesce(state, '') = 'running'
    AND p_phase <> ALL (phases);
  IF NOT FOUND THEN
    RAISE EXCEPTION 'idempotency key of operation % is held by another worker', p_operation
      USING ERRCODE = 'EO003', HINT = format('token %s', p_token);
  END IF;
END
$$;

ALTER TABLE effectonce.idempotency_keys DROP COLUMN flow, DROP COLUMN phase_since, DROP COLUMN uncalled, DROP COLUMN retried_at;
