-- effectonce, schema version 7: the flow of a key, and since when its phase may have asked a foreign system.
--
-- Additive: programs of the previous release that are running, or start, work with this schema.

SET search_path = pg_catalog, pg_temp;

ALTER TABLE effectonce.idempotency_keys
  -- The flow that claimed the key, so that no other one of the operation takes it. Null: the previous release, or work in one
  -- transaction, claimed it.
  ADD COLUMN flow        varchar(255),
  -- No call of the phase under way was made before. Null: none before created_at. The previous release takes keys without
  -- setting it: then it is too early, and a key goes to a person sooner than it need.
  ADD COLUMN phase_since timestamptz,
  -- lock_token of a holder that gave the key up when no call of the phase under way had been made, neither by itself nor before:
  -- whoever takes it under that token begins phase_since anew. Any other takeover, also by the previous release, makes
  -- lock_token grow, so that this says nothing any more.
  ADD COLUMN uncalled    bigint,
  -- When the key was taken that a person or a reconciler had given back: from then on it has AgeMax again.
  ADD COLUMN retried_at  timestamptz;

-- As in version 4; it also says when the next phase began.
CREATE OR REPLACE FUNCTION effectonce.advance_key(
  p_scope text, p_operation text, p_key text, p_token bigint, p_phase text, p_data bytea) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  UPDATE effectonce.idempotency_keys SET
    phases = array_append(phases, p_phase), data = p_data, calling = NULL, attempts = 1, error = NULL,
    phase_since = clock_timestamp(), uncalled = NULL
  WHERE scope = p_scope AND operation = p_operation AND key = p_key AND lock_token = p_token AND coalesce(state, '') = 'running'
    AND p_phase <> ALL (phases);
  IF NOT FOUND THEN
    RAISE EXCEPTION 'idempotency key of operation % is held by another worker', p_operation
      USING ERRCODE = 'EO003', HINT = format('token %s', p_token);
  END IF;
END
$$;
