-- effectonce: group roles with the rights that each part needs, and no others. It may be run again at any time,
-- and has to be after each migration, in one transaction: what a role had in the schema is taken back first, so
-- that a right which a release does not need any more goes.
--
-- Run it as the owner of the tables. Making the roles asks for CREATEROLE; where they are there, they stay as they
-- are, with their members; one that gives its members more than rights in the schema is refused. Roles belong to the
-- whole cluster, so databases that must not share theirs need different names.

SET LOCAL search_path = pg_catalog, pg_temp;

DO $$
DECLARE
  roles CONSTANT text[] := ARRAY['effectonce_publisher', 'effectonce_relay', 'effectonce_consumer', 'effectonce_endpoint', 'effectonce_operator'];
  wanted text;
  given record;
BEGIN
  -- A member takes the attributes of a role with SET ROLE, and those of all roles that it is a member of.
  SELECT g.rolname AS role, r.rolname AS through, CASE WHEN r.rolsuper THEN 'is SUPERUSER' WHEN r.rolcreaterole THEN 'is CREATEROLE'
    WHEN r.rolbypassrls THEN 'is BYPASSRLS' WHEN r.rolreplication THEN 'is REPLICATION' ELSE 'owns the schema' END AS has INTO given
  FROM pg_roles g JOIN pg_roles r ON pg_has_role(g.oid, r.oid, 'MEMBER')
  WHERE g.rolname = ANY (roles) AND (r.rolsuper OR r.rolcreaterole OR r.rolbypassrls OR r.rolreplication
    OR r.oid = (SELECT nspowner FROM pg_namespace WHERE oid = 'effectonce'::regnamespace))
  ORDER BY r.oid <> g.oid LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION 'role % exists and %: all its members could do what that allows', given.role,
      CASE WHEN given.through = given.role THEN given.has ELSE format('is a member of %s, which %s', given.through, given.has) END
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Take that from the role (ALTER ROLE ... NOSUPERUSER NOCREATEROLE NOBYPASSRLS NOREPLICATION; '
      'REVOKE ... FROM ...; ALTER SCHEMA ... OWNER TO ...), or give the roles other names: "outbox-relay migrate roles --prefix".';
  END IF;
  FOREACH wanted IN ARRAY roles LOOP
    IF to_regrole(wanted) IS NULL THEN
      BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
      EXCEPTION WHEN duplicate_object OR unique_violation THEN
        NULL; -- made meanwhile, for another database
      END;
    END IF;
  END LOOP;
  -- pg_shdepend knows every table, sequence and column that such a role has a right on. REVOKE ... ON ALL TABLES would
  -- change each partition of claims, while consumers make and drop them.
  FOR given IN
    SELECT DISTINCT format('%I.%I', n.nspname, c.relname) AS relation, r.rolname
    FROM pg_shdepend d JOIN pg_class c ON c.oid = d.objid JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles r ON r.oid = d.refobjid
    WHERE d.dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND d.classid = 'pg_class'::regclass
      AND d.refclassid = 'pg_authid'::regclass AND d.deptype = 'a' AND c.relnamespace = 'effectonce'::regnamespace AND r.rolname = ANY (roles)
  LOOP
    EXECUTE format('REVOKE ALL ON %s FROM %I', given.relation, given.rolname);
  END LOOP;
END
$$;

REVOKE ALL ON SCHEMA effectonce FROM effectonce_publisher, effectonce_relay, effectonce_consumer, effectonce_endpoint, effectonce_operator;
GRANT USAGE ON SCHEMA effectonce TO effectonce_publisher, effectonce_relay, effectonce_consumer, effectonce_endpoint, effectonce_operator;
GRANT SELECT ON effectonce.schema_version, effectonce.schema_compatibility TO effectonce_publisher, effectonce_relay, effectonce_consumer, effectonce_endpoint, effectonce_operator;

-- === Publisher, which a consumer's and an endpoint's handlers are too

-- Whoever could give txid or seq could keep others from inserting. The default of slot reads the sequence; that is
-- everybody's to read, unless somebody took it away. A message for later is taken back by its id and topic; whose it is, the database
-- says: see the policy of outbox_scheduled.
GRANT INSERT (id, topic, key, payload, headers, created_at) ON effectonce.outbox TO effectonce_publisher, effectonce_consumer, effectonce_endpoint;
GRANT SELECT ON SEQUENCE effectonce.outbox_slot TO effectonce_publisher, effectonce_consumer, effectonce_endpoint;
GRANT INSERT (due_at, id, topic, key, payload, headers, created_at), DELETE, SELECT (due_at, id, topic) ON effectonce.outbox_scheduled TO effectonce_publisher, effectonce_consumer, effectonce_endpoint;
-- How much waits: a view, with its owner's rights, so that no row can be read.
GRANT SELECT ON effectonce.outbox_backlog TO effectonce_publisher, effectonce_relay, effectonce_consumer, effectonce_endpoint, effectonce_operator;
-- Functions are everybody's, unless somebody changed the defaults.
GRANT EXECUTE ON FUNCTION effectonce.uuid_v7() TO effectonce_publisher, effectonce_relay, effectonce_consumer, effectonce_endpoint;

-- === Relay

-- UPDATE: after a restore into another cluster. INSERT: messages for later.
GRANT SELECT, INSERT, UPDATE ON effectonce.outbox TO effectonce_relay;
GRANT SELECT, TRUNCATE ON effectonce.outbox_0, effectonce.outbox_1, effectonce.outbox_2, effectonce.outbox_3 TO effectonce_relay;
GRANT SELECT ON SEQUENCE effectonce.outbox_seq_seq TO effectonce_relay;
GRANT SELECT, UPDATE ON SEQUENCE effectonce.outbox_slot TO effectonce_relay;
GRANT SELECT, UPDATE ON effectonce.outbox_slots, effectonce.outbox_locks TO effectonce_relay;
GRANT SELECT, INSERT, DELETE ON effectonce.outbox_ticks TO effectonce_relay;
GRANT SELECT, INSERT, UPDATE ON effectonce.outbox_relays TO effectonce_relay;
GRANT SELECT, INSERT, UPDATE ON effectonce.outbox_progress TO effectonce_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON effectonce.outbox_replicas, effectonce.outbox_dead TO effectonce_relay;
GRANT SELECT, INSERT, DELETE ON effectonce.outbox_advances TO effectonce_relay;
GRANT SELECT ON effectonce.outbox_progress_now, effectonce.outbox_paused TO effectonce_relay;
-- A sequence that is behind: a relay only looks.
GRANT EXECUTE ON FUNCTION effectonce.outbox_sequence_state() TO effectonce_relay, effectonce_operator;
GRANT EXECUTE ON FUNCTION effectonce.repair_outbox_sequences() TO effectonce_operator;
GRANT SELECT, UPDATE, DELETE ON effectonce.outbox_scheduled TO effectonce_relay; -- UPDATE: to lock rows
-- For its metrics and "outbox-relay status": how far consumers are, and what is parked, without its content.
GRANT SELECT ON effectonce.consumers, effectonce.consumer_positions, effectonce.consumer_pauses, effectonce.maintenance TO effectonce_relay;
GRANT SELECT (consumer, topic, partition, key, reason, state, parked_at) ON effectonce.parked_messages TO effectonce_relay;
-- For its metrics, too: how many requests wait for a decision, and not which.
GRANT SELECT (state, created_at, retry_at, locked_until, expires_at) ON effectonce.idempotency_keys TO effectonce_relay;

-- === Consumer

-- Nobody but the owner takes claims away or changes them: "outbox-relay prune". A role that could take the lease of
-- this job, and then not do it, would only keep the owner from it; so it may not write in maintenance.
GRANT SELECT, INSERT ON effectonce.processed_messages, effectonce.processed_forever TO effectonce_consumer;
GRANT SELECT ON effectonce.maintenance TO effectonce_consumer;
GRANT SELECT, INSERT, UPDATE ON effectonce.consumers, effectonce.consumer_positions, effectonce.fences TO effectonce_consumer;
GRANT SELECT ON effectonce.consumer_pauses TO effectonce_consumer;
GRANT SELECT, INSERT, UPDATE, DELETE ON effectonce.parked_messages TO effectonce_consumer;
GRANT INSERT (who, what, why, subject, stated) ON effectonce.operator_actions TO effectonce_consumer;
GRANT EXECUTE ON FUNCTION effectonce.refuse_commit(),
  effectonce.advance_position(text, text, integer, bigint, bigint, bigint, timestamptz),
  effectonce.check_position(text, text, integer, bigint, bigint) TO effectonce_consumer;

-- === Endpoint: what executes requests by their idempotency keys

GRANT SELECT, INSERT, UPDATE, DELETE ON effectonce.idempotency_keys, effectonce.pending_requests TO effectonce_endpoint;
GRANT EXECUTE ON FUNCTION effectonce.refuse_commit(), effectonce.advance_key(text, text, text, bigint, text, bytea),
  effectonce.finish_key(text, text, text, bigint, text, integer, jsonb, bytea, boolean, interval) TO effectonce_endpoint;

-- === Operator

-- It sees everything, and changes what waits for a person; each change is written down.
GRANT SELECT ON effectonce.outbox, effectonce.outbox_0, effectonce.outbox_1, effectonce.outbox_2, effectonce.outbox_3, effectonce.outbox_slots,
  effectonce.outbox_ticks, effectonce.outbox_progress, effectonce.outbox_advances, effectonce.outbox_progress_now,
  effectonce.outbox_replicas, effectonce.outbox_relays, effectonce.outbox_locks, effectonce.outbox_dead,
  effectonce.outbox_paused, effectonce.outbox_scheduled, effectonce.consumers, effectonce.consumer_positions, effectonce.consumer_pauses,
  effectonce.processed_messages, effectonce.processed_forever, effectonce.maintenance, effectonce.parked_messages, effectonce.fences,
  effectonce.operator_actions, effectonce.idempotency_keys, effectonce.pending_requests TO effectonce_operator;
GRANT SELECT ON SEQUENCE effectonce.outbox_seq_seq, effectonce.outbox_slot TO effectonce_operator;
GRANT INSERT (id, topic, key, payload, headers, created_at) ON effectonce.outbox TO effectonce_operator; -- replay
-- Not the columns that say where in which key a dead row is: the rows behind it would wait for another one.
GRANT UPDATE (state, headers, payload) ON effectonce.outbox_dead TO effectonce_operator;
GRANT UPDATE, DELETE ON effectonce.parked_messages TO effectonce_operator;
GRANT INSERT, UPDATE, DELETE ON effectonce.outbox_paused TO effectonce_operator;
-- Orders to a consumer: where a partition resumes, what is paused, and from when on another rule names messages.
GRANT UPDATE (resume_at) ON effectonce.consumer_positions TO effectonce_operator;
GRANT INSERT, UPDATE, DELETE ON effectonce.consumer_pauses TO effectonce_operator;
GRANT UPDATE (id_rule) ON effectonce.consumers TO effectonce_operator;
-- Another number of shards, and a relay by an old name, which holds published rows back: "outbox-relay shards" and "relays delete".
GRANT UPDATE (shards) ON effectonce.outbox_relays TO effectonce_operator;
GRANT INSERT, UPDATE (epoch) ON effectonce.outbox_progress TO effectonce_operator; -- UPDATE: to lock rows
GRANT INSERT ON effectonce.outbox_advances TO effectonce_operator;
GRANT DELETE ON effectonce.outbox_relays, effectonce.outbox_progress, effectonce.outbox_advances, effectonce.outbox_replicas TO effectonce_operator;
GRANT INSERT (who, what, why, subject, stated) ON effectonce.operator_actions TO effectonce_operator;
-- Not the columns that say which request it is, what it asked for, what its phases hand on and which are done. What is
-- decided can be decided wrongly: state and DELETE, which is for what is over and cannot be limited to it, are enough to
-- have a request executed again.
GRANT UPDATE (state, lock_token, attempts, calling, call, calling_since, phase_since, locked_until, retry_at, error, status, headers, body, body_dropped,
  sealed, finished_at, expires_at), DELETE ON effectonce.idempotency_keys TO effectonce_operator;
GRANT EXECUTE ON FUNCTION effectonce.message_id(text, text) TO effectonce_operator;
