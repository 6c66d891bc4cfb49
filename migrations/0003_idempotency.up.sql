-- effectonce, schema version 3: idempotency keys of requests.

SET search_path = pg_catalog, pg_temp;

-- A row is claimed by its INSERT: the primary key decides who executes. Work in one transaction inserts it as
-- finished, together with its effect. Work in phases inserts it as running and commits each phase with its recovery
-- point, under lock_token, which grows whenever somebody takes the lock: who lost it cannot write any more.

-- What holds for values is said by types: a CHECK of the table would be parsed for each INSERT and UPDATE, on the path
-- of each request. Names are compared byte by byte.
CREATE DOMAIN effectonce.key_name AS varchar(255) COLLATE "C" CONSTRAINT is_empty CHECK (VALUE <> '');
CREATE DOMAIN effectonce.key_fingerprint AS bytea CONSTRAINT is_no_hash CHECK (octet_length(VALUE) BETWEEN 32 AND 400);
CREATE DOMAIN effectonce.key_state AS text CONSTRAINT is_no_state CHECK (VALUE IN ('running', 'finished', 'indeterminate', 'abandoned'));
CREATE DOMAIN effectonce.key_call AS text CONSTRAINT is_no_call CHECK (VALUE IN ('repeatable', 'once', 'happened'));
CREATE DOMAIN effectonce.key_status AS smallint CONSTRAINT is_no_status CHECK (VALUE BETWEEN 0 AND 999);

CREATE TABLE effectonce.idempotency_keys (
  scope          effectonce.key_name NOT NULL,       -- the tenant
  operation      effectonce.key_name NOT NULL,
  key            effectonce.key_name NOT NULL,
  fingerprint    effectonce.key_fingerprint NOT NULL, -- SHA-256 of what was asked for, 32 zero bytes: there is none; longer: a keyed hash
  -- running: not finished; somebody works on it while locked_until lies ahead. finished: the outcome is stored.
  -- indeterminate: whether a foreign system acted is unknown, and it cannot be asked again: a person or a reconciler
  -- decides. abandoned: it was tried for long enough: a person decides. Where a program does not know the recovery point, the
  -- key stays running, and waits for a program that does.
  state          effectonce.key_state NOT NULL,
  phases         text[]      NOT NULL DEFAULT '{}',  -- that are done, in order; the last one is the recovery point
  calling        varchar(255),                       -- phase whose foreign call may have been made; null: none
  call           effectonce.key_call,                -- whether it may be repeated, or, by a decision, happened: its Write is next
  calling_since  timestamptz,                        -- when it may first have been made; null where it happened
  data           bytea,                              -- what phases hand on to later ones
  request        bytea,                              -- what was asked for, where the completer needs it
  lock_token     bigint      NOT NULL DEFAULT 1,
  locked_until   timestamptz,
  locked_by      varchar(255),
  attempts       integer     NOT NULL DEFAULT 0,     -- begun since the last phase that is done
  error          varchar(2000),                      -- of the last attempt
  retry_at       timestamptz,                        -- the completer leaves it alone until then
  status         effectonce.key_status,
  headers        jsonb,
  body           bytea,
  body_dropped   boolean     NOT NULL DEFAULT false, -- it was too large to be stored
  sealed         boolean     NOT NULL DEFAULT false, -- data, request, headers and body are encrypted, each with the name of its key
  created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
  finished_at    timestamptz,
  -- A key is forgotten then; null: never. An unfinished one of which something may have happened is abandoned instead.
  expires_at     timestamptz,
  -- The flow that claimed the key, so that no other one of the operation takes it. Null: work in one transaction claimed it.
  flow           varchar(255),
  phase_since    timestamptz,                        -- when the last phase, or a decision, was stored; null: created_at
  CONSTRAINT idempotency_keys_pkey PRIMARY KEY (scope, operation, key)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

CREATE INDEX idempotency_keys_unfinished ON effectonce.idempotency_keys (coalesce(retry_at, created_at)) WHERE state = 'running';
CREATE INDEX idempotency_keys_undecided ON effectonce.idempotency_keys (created_at) WHERE state IN ('indeterminate', 'abandoned');
CREATE INDEX idempotency_keys_resumable ON effectonce.idempotency_keys (coalesce(retry_at, created_at)) WHERE state = 'running' AND request IS NOT NULL;
CREATE INDEX idempotency_keys_expiry ON effectonce.idempotency_keys (expires_at) WHERE expires_at IS NOT NULL;

COMMENT ON TABLE effectonce.idempotency_keys IS
  'Requests by their idempotency keys, with their recovery points and outcomes: see outbox-relay keys.';

-- Writes a phase of a key down, or its outcome, and raises EO003 where the caller does not hold the key any more. It is
-- called last in the transaction of a phase, so that the phase is rolled back then. Where a server lost a claim with its
-- last commits, two may have one token: a phase that is done is not done again then either. (coalesce keeps the planner from
-- the partial index of all running keys, which looks cheaper than the primary key on an empty table.)
CREATE FUNCTION effectonce.advance_key(
  p_scope text, p_operation text, p_key text, p_token bigint, p_phase text, p_data bytea) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE effectonce.idempotency_keys SET
    phases = array_append(phases, p_phase), data = p_data, calling = NULL, call = NULL, calling_since = NULL, attempts = 1, error = NULL,
    phase_since = clock_timestamp()
  WHERE scope = p_scope AND operation = p_operation AND key = p_key AND lock_token = p_token AND coalesce(state, '') = 'running'
    AND p_phase <> ALL (phases);
  IF NOT FOUND THEN
    RAISE EXCEPTION 'idempotency key of operation % is held by another worker', p_operation
      USING ERRCODE = 'EO003', HINT = format('token %s', p_token);
  END IF;
END
$$;

CREATE FUNCTION effectonce.finish_key(
  p_scope text, p_operation text, p_key text, p_token bigint, p_phase text, p_status integer, p_headers jsonb, p_body bytea,
  p_dropped boolean, p_window interval) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE effectonce.idempotency_keys SET
    state = 'finished', phases = CASE WHEN p_phase IS NULL THEN phases ELSE array_append(phases, p_phase) END,
    status = p_status, headers = p_headers, body = p_body, body_dropped = p_dropped,
    data = NULL, request = NULL, -- nobody needs them any more
    calling = NULL, call = NULL, calling_since = NULL, locked_until = NULL, retry_at = NULL, error = NULL,
    finished_at = clock_timestamp(), expires_at = clock_timestamp() + p_window
  WHERE scope = p_scope AND operation = p_operation AND key = p_key AND lock_token = p_token AND coalesce(state, '') = 'running'
    AND (p_phase IS NULL OR p_phase <> ALL (phases));
  IF NOT FOUND THEN
    RAISE EXCEPTION 'idempotency key of operation % is held by another worker', p_operation
      USING ERRCODE = 'EO003', HINT = format('token %s', p_token);
  END IF;
END
$$;

-- Keys that a client made for requests whose answer it does not have yet, so that it asks again under the same key
-- after a restart.
CREATE TABLE effectonce.pending_requests (
  client     text        NOT NULL CHECK (octet_length(client) BETWEEN 1 AND 255),
  request    text        NOT NULL CHECK (octet_length(request) BETWEEN 1 AND 255), -- what the client calls it: "charge order 4127"
  key        text        NOT NULL CHECK (octet_length(key) BETWEEN 1 AND 255),
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  CONSTRAINT pending_requests_pkey PRIMARY KEY (client, request)
);
