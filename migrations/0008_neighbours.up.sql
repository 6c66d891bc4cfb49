-- effectonce, schema version 8: what other roles and logins of the database cannot do.
--
-- Additive: programs of the previous release that are running, or start, work with this schema.

SET search_path = pg_catalog, pg_temp;

-- ---------------------------------------------------------------------------------------------
-- Values from other roles are bounded

-- Of rows that a publisher inserts. Rows that are there are not read: the relay copes with them. One CHECK for all
-- bounds: each INSERT prepares each CHECK anew. The text of headers may be much longer than what is stored: a number of some bytes
-- has up to 131,072 digits. Transaction id 1 is that of rows from another cluster (see relay, recover.go), which came before the
-- bounds; publishers cannot set it.
ALTER TABLE effectonce.outbox
  ADD CONSTRAINT outbox_row_is_out_of_bounds CHECK (txid = '1'
    OR octet_length(payload) <= 100000000 AND octet_length(key) <= 1048576
    AND pg_column_size(headers) <= 2097152 AND octet_length(headers::text) <= 8388608
    AND created_at >= '0001-01-01+00' AND created_at < '9999-01-01+00') NOT VALID;
ALTER TABLE effectonce.outbox_scheduled
  ADD CONSTRAINT outbox_scheduled_row_is_out_of_bounds CHECK (
    octet_length(payload) <= 100000000 AND octet_length(key) <= 1048576
    AND pg_column_size(headers) <= 2097152 AND octet_length(headers::text) <= 8388608
    AND created_at >= '0001-01-01+00' AND created_at < '9999-01-01+00' AND due_at >= '0001-01-01+00' AND due_at < '9999-01-01+00') NOT VALID;
ALTER TABLE effectonce.consumers
  ADD CONSTRAINT consumers_topics_are_too_many CHECK (pg_column_size(topics) <= 1048576) NOT VALID;

-- ---------------------------------------------------------------------------------------------
-- Publishers: whose a message for later is

-- Publishers may read due_at, id and topic, and delete; the policy limits that to their own messages. Roles that may read all columns (the
-- relay, operators) see all messages, and so does the owner of the table. Nothing is known about the messages that are there: the
-- owner may give them to their publishers (UPDATE … SET publisher = …), who could not take them back otherwise.
ALTER TABLE effectonce.outbox_scheduled ADD COLUMN publisher name NOT NULL DEFAULT '';
ALTER TABLE effectonce.outbox_scheduled ALTER COLUMN publisher SET DEFAULT current_user;
-- An ID that another publisher took first would keep the message away.
ALTER TABLE effectonce.outbox_scheduled DROP CONSTRAINT outbox_scheduled_pkey,
  ADD CONSTRAINT outbox_scheduled_pkey PRIMARY KEY (id, topic, publisher);
CREATE POLICY outbox_scheduled_own ON effectonce.outbox_scheduled
  USING (publisher = current_user OR (SELECT has_table_privilege('effectonce.outbox_scheduled', 'SELECT')));
ALTER TABLE effectonce.outbox_scheduled ENABLE ROW LEVEL SECURITY;

-- ---------------------------------------------------------------------------------------------
-- Publishers: which topics a role may publish to

-- A role that is listed here publishes to these topics and no others: a name, or the beginning of names followed by *. A member of
-- several listed roles has the topics of all of them; who is a member of none is not limited. An empty list: no topic, so that only
-- members that have a list of their own publish. Names of roles, since a restore may bring their list before the role.
CREATE TABLE effectonce.outbox_publishers (
  role   name   NOT NULL,
  topics text[] NOT NULL,
  CONSTRAINT outbox_publishers_pkey PRIMARY KEY (role),
  CONSTRAINT outbox_publishers_topics_are_too_many CHECK (cardinality(topics) <= 1000),
  CONSTRAINT outbox_publishers_topics_are_no_names CHECK (coalesce(array_ndims(topics), 1) = 1
    AND array_to_string(topics, ' ', '/') ~ '^([A-Za-z0-9._-]{0,248}([A-Za-z0-9._-]|[*])( |$))*$')
);

-- The role that acts counts, and the login that took the role with SET ROLE: else a login would leave its lists by taking another one. In a
-- function with the rights of its owner only the owner counts. A role that may update the outbox (the relay, the owner) could give a row
-- another topic, and moves messages of others: it is not limited.
CREATE FUNCTION effectonce.outbox_topic_allowed() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  acting name := current_user;
  listed boolean; -- null: no list is for this role (or the topic is null, which the column refuses)
BEGIN
  LOOP
    SELECT bool_or(NEW.topic = ANY (p.topics) OR EXISTS (
        SELECT FROM unnest(p.topics) AS t (topic) WHERE right(t.topic, 1) = '*' AND starts_with(NEW.topic, left(t.topic, -1)))) INTO listed
    FROM effectonce.outbox_publishers p WHERE pg_has_role(acting, to_regrole(quote_ident(p.role)), 'MEMBER');
    IF NOT listed AND NOT has_table_privilege(acting, 'effectonce.outbox', 'UPDATE') THEN
      RAISE EXCEPTION 'role % may not publish to topic %', acting, left(NEW.topic, 249) USING ERRCODE = 'insufficient_privilege',
        HINT = 'Its topics, and those of the roles that it is a member of, are listed in effectonce.outbox_publishers; the owner changes them: "outbox-relay publishers limit".';
    END IF;
    EXIT WHEN acting = session_user OR current_setting('role') <> current_user;
    acting := session_user;
  END LOOP;
  RETURN NEW;
END
$$;

-- A list that would limit nobody is refused.
CREATE FUNCTION effectonce.outbox_publisher_checked() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF to_regrole(quote_ident(NEW.role)) IS NULL THEN
    RAISE EXCEPTION 'role % does not exist', quote_ident(NEW.role) USING ERRCODE = 'undefined_object';
  END IF;
  IF has_table_privilege(NEW.role, 'effectonce.outbox', 'UPDATE') THEN
    RAISE EXCEPTION 'role % may update the outbox: a list of topics does not limit it', quote_ident(NEW.role) USING ERRCODE = 'invalid_parameter_value',
      HINT = 'Give publishers INSERT alone. A relay, the owner of the tables and superusers cannot be limited.';
  END IF;
  RETURN NEW;
END
$$;
CREATE TRIGGER outbox_publisher_checked BEFORE INSERT OR UPDATE ON effectonce.outbox_publishers
  FOR EACH ROW EXECUTE FUNCTION effectonce.outbox_publisher_checked();

-- Inserts are looked at only while there is a list: the triggers come with the first one, and go with the last.
CREATE FUNCTION effectonce.outbox_publishers_changed() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '1500ms'
AS $$
DECLARE
  listed boolean;
  looked_at boolean;
  relation regclass;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'want a transaction that is read committed: one that is % does not see what the lock waited for', current_setting('transaction_isolation')
      USING ERRCODE = 'invalid_transaction_state';
  END IF;
  -- One change at a time: of two, one that takes the last list away must not take the triggers of the other.
  PERFORM FROM effectonce.schema_version FOR UPDATE;
  listed := EXISTS (SELECT FROM effectonce.outbox_publishers);
  FOREACH relation IN ARRAY ARRAY['effectonce.outbox'::regclass, 'effectonce.outbox_scheduled'::regclass] LOOP
    looked_at := EXISTS (SELECT FROM pg_trigger WHERE tgrelid = relation AND tgname = 'outbox_topic_allowed');
    IF listed AND NOT looked_at THEN
      EXECUTE format('CREATE TRIGGER outbox_topic_allowed BEFORE INSERT %s ON %s FOR EACH ROW EXECUTE FUNCTION effectonce.outbox_topic_allowed()',
        CASE WHEN relation = 'effectonce.outbox_scheduled'::regclass THEN 'OR UPDATE OF topic' END, relation);
    ELSIF looked_at AND NOT listed THEN
      EXECUTE format('DROP TRIGGER outbox_topic_allowed ON %s', relation);
    END IF;
  END LOOP;
  -- The triggers read the lists with the rights of who inserts.
  IF listed THEN
    GRANT SELECT ON effectonce.outbox_publishers TO PUBLIC;
  ELSE
    REVOKE SELECT ON effectonce.outbox_publishers FROM PUBLIC;
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER outbox_publishers_changed AFTER INSERT OR UPDATE OR DELETE ON effectonce.outbox_publishers
  FOR EACH STATEMENT EXECUTE FUNCTION effectonce.outbox_publishers_changed();

-- ---------------------------------------------------------------------------------------------
-- The operator's log is written by the database

-- who is the login, db_role the role it acted as, and stated the name that the person or program gave.
ALTER TABLE effectonce.operator_actions
  ADD COLUMN stated text CONSTRAINT operator_actions_stated_is_out_of_bounds CHECK (octet_length(stated) BETWEEN 1 AND 255);
UPDATE effectonce.operator_actions SET stated = who WHERE who <> '';
-- Behind the UPDATE, which would check entries that are there.
ALTER TABLE effectonce.operator_actions
  ADD CONSTRAINT operator_actions_subject_is_too_large CHECK (pg_column_size(subject) <= 1048576) NOT VALID;

CREATE FUNCTION effectonce.operator_action_written() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  -- The owner restores rows of a dump as they are. It could disable the trigger as well.
  IF NEW.stated IS NOT NULL AND NEW."when" < transaction_timestamp()
    AND pg_has_role((SELECT c.relowner FROM pg_class c WHERE c.oid = TG_RELID), 'USAGE') THEN
    RETURN NEW;
  END IF;
  NEW.stated := coalesce(NEW.stated, NEW.who);
  NEW.who := session_user;
  NEW.db_role := current_user;
  NEW."when" := clock_timestamp();
  RETURN NEW;
END
$$;
CREATE TRIGGER operator_action_written BEFORE INSERT ON effectonce.operator_actions
  FOR EACH ROW EXECUTE FUNCTION effectonce.operator_action_written();

-- Also for the owner, who has to remove the trigger first.
CREATE FUNCTION effectonce.operator_actions_stay() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF TG_OP = 'TRUNCATE' AND NOT EXISTS (SELECT FROM effectonce.operator_actions) THEN
    RETURN NULL; -- as programs do that prepare a copy
  END IF;
  RAISE EXCEPTION 'operator_actions is only added to' USING ERRCODE = 'insufficient_privilege',
    HINT = 'The owner may disable the triggers operator_actions_stay and operator_actions_all_stay to remove old entries.';
END
$$;
CREATE TRIGGER operator_actions_stay BEFORE UPDATE OR DELETE ON effectonce.operator_actions
  FOR EACH ROW EXECUTE FUNCTION effectonce.operator_actions_stay();
CREATE TRIGGER operator_actions_all_stay BEFORE TRUNCATE ON effectonce.operator_actions
  FOR EACH STATEMENT EXECUTE FUNCTION effectonce.operator_actions_stay();

-- ---------------------------------------------------------------------------------------------
-- Locks that only our roles can take

-- Any login can take an advisory lock, and keep it. The lock of a row needs the right to update the table.
CREATE TABLE effectonce.outbox_locks (
  name text NOT NULL,
  CONSTRAINT outbox_locks_pkey PRIMARY KEY (name),
  CONSTRAINT outbox_locks_name_is_unknown CHECK (name IN ('promote', 'stamps'))
);
INSERT INTO effectonce.outbox_locks (name) VALUES ('promote'), ('stamps');
DO $$
DECLARE
  given record;
BEGIN
  -- Relays need it from now on.
  FOR given IN
    SELECT a.grantee FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
    WHERE c.oid = 'effectonce.outbox_slots'::regclass AND a.privilege_type = 'UPDATE' AND a.grantee NOT IN (0, c.relowner)
  LOOP
    EXECUTE format('GRANT SELECT, INSERT, UPDATE ON effectonce.outbox_locks TO %s', given.grantee::regrole);
  END LOOP;
END
$$;

-- As in version 6, with the lock of a row.
CREATE OR REPLACE FUNCTION effectonce.repair_outbox_sequences(
  more_seq bigint, more_tick bigint,
  OUT repaired boolean, OUT seq_before bigint, OUT seq_after bigint, OUT tick_before bigint, OUT tick_after bigint, OUT renumbered bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '3s'
AS $$
DECLARE
  largest CONSTANT bigint := 4611686018427387904; -- half of what there is
  ahead CONSTANT bigint := 1000000000000;
  state record;
  tables record;
BEGIN
  -- The stamps of a recovery first: it takes its locks in this order. And one repair at a time: reading a sequence takes a lock that
  -- another repair would wait for.
  INSERT INTO effectonce.outbox_locks (name) VALUES ('stamps') ON CONFLICT DO NOTHING; -- a copy may not have it
  PERFORM FROM effectonce.outbox_locks WHERE name = 'stamps' FOR UPDATE;
  SELECT * INTO state FROM effectonce.outbox_sequence_state(more_seq, more_tick);
  IF state.behind THEN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      RAISE EXCEPTION 'want a transaction that is read committed: one that is % does not see what the locks waited for', current_setting('transaction_isolation')
        USING ERRCODE = 'invalid_transaction_state';
    END IF;
    LOCK TABLE effectonce.outbox IN EXCLUSIVE MODE;
    LOCK TABLE effectonce.outbox_ticks IN EXCLUSIVE MODE;
    SELECT * INTO state FROM effectonce.outbox_sequence_state(more_seq, more_tick);
  END IF;
  repaired := state.behind;
  seq_before := state.seq_last; seq_after := state.seq_last; tick_before := state.tick_last; tick_after := state.tick_last; renumbered := 0;
  IF NOT repaired THEN
    RETURN;
  END IF;
  SELECT * INTO tables FROM effectonce.outbox_sequence_state(0, 0);
  IF more_seq - ahead > greatest(tables.seq_known, tables.seq_last) OR more_tick - ahead > greatest(tables.tick_known, tables.tick_last)
    OR greatest(state.seq_known, state.seq_last, state.tick_known, state.tick_last) > largest THEN
    RAISE EXCEPTION 'numbers are too large to be true: row %, tick %; the sequences are at % and %', state.seq_known, state.tick_known, state.seq_last, state.tick_last
      USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Look for a number that was written by hand: in outbox_progress, outbox_dead, outbox_ticks, outbox.';
  END IF;
  -- RESTART, since setval would outlive a rollback; and a number is taken, so that the sequence says what it gave last. The locks of both,
  -- in the order of outbox_sequence_state: a reader has a lock on the first and would wait with it for the second
  -- while rows are renumbered.
  IF state.seq_last < state.seq_known OR state.reused IS NOT NULL THEN
    seq_after := greatest(state.seq_known, state.seq_last);
    EXECUTE format('ALTER SEQUENCE effectonce.outbox_seq_seq RESTART WITH %s', greatest(seq_after, 1));
  END IF;
  IF state.tick_last < state.tick_known THEN
    tick_after := state.tick_known;
    EXECUTE format('ALTER SEQUENCE effectonce.outbox_ticks_tick_seq RESTART WITH %s', tick_after);
    PERFORM nextval('effectonce.outbox_ticks_tick_seq');
  END IF;
  IF state.seq_last < state.seq_known OR state.reused IS NOT NULL THEN
    PERFORM FROM effectonce.outbox_progress ORDER BY relay, shard FOR UPDATE;
    UPDATE effectonce.outbox_progress p SET
      tick = n.tick, next_tick = n.next_tick, seq = n.seq, floor = n.floor, published = n.published,
      epoch = greatest(p.epoch, n.advanced_epoch) + 1, advanced_epoch = greatest(p.epoch, n.advanced_epoch) + 1, owner = NULL, lease_until = NULL
    FROM effectonce.outbox_progress_now n WHERE n.relay = p.relay AND n.shard = p.shard;
    renumbered := effectonce.renumber_outbox(state.seq_last, seq_after, state.reused_since);
    seq_after := seq_after + renumbered;
    EXECUTE format('ALTER SEQUENCE effectonce.outbox_seq_seq RESTART WITH %s', greatest(seq_after, 1));
    PERFORM nextval('effectonce.outbox_seq_seq');
  END IF;
END
$$;

-- As in version 6, with times that the CHECK of new rows takes.
CREATE OR REPLACE FUNCTION effectonce.renumber_outbox(reached bigint, largest bigint, reused_since timestamptz) RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  moved bigint;
BEGIN
  WITH back AS MATERIALIZED (
    SELECT coalesce((SELECT max(o.created_at) FROM effectonce.outbox o WHERE o.seq > reached), reused_since - interval '1 microsecond', 'infinity') AS at
  ), proof AS MATERIALIZED (
    SELECT p.shards, p.shard, t.snapshot
    FROM effectonce.outbox_progress_now p CROSS JOIN effectonce.this_cluster() c
    LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick AND t.seq_last >= p.floor AND p.system_identifier = c.system AND p.timeline = c.timeline
    UNION ALL -- a shard that was never leased has published nothing, nor has anything where there is no relay
    SELECT 1, 0, NULL WHERE NOT EXISTS (SELECT FROM effectonce.outbox_progress) OR EXISTS (
      SELECT FROM effectonce.outbox_relays r WHERE r.shards > (SELECT count(*) FROM effectonce.outbox_progress p WHERE p.relay = r.relay))
  ), unproven AS MATERIALIZED (
    SELECT o.seq, o.slot, row_number() OVER (
      ORDER BY mod(o.xmin::text::numeric - mod(o.txid::text::numeric, 4294967296) + 4294967296, 4294967296) < 1000000, o.created_at > (SELECT at FROM back), o.seq, o.created_at) AS n
    FROM effectonce.outbox o
    WHERE EXISTS (SELECT FROM proof f WHERE o.shard % f.shards = f.shard AND (f.snapshot IS NULL OR NOT pg_visible_in_snapshot(o.txid, f.snapshot)))
  ), gone AS (
    DELETE FROM effectonce.outbox o USING unproven u WHERE o.seq = u.seq AND o.slot = u.slot
    RETURNING u.n, o.id, o.topic, o.key, o.payload, o.headers, o.created_at
  )
  INSERT INTO effectonce.outbox (txid, seq, id, topic, key, payload, headers, created_at) OVERRIDING SYSTEM VALUE
  SELECT pg_current_xact_id(), largest + g.n, g.id, g.topic, g.key, g.payload, g.headers, greatest(least(g.created_at, '9998-12-31'), '0001-01-01') FROM gone g ORDER BY g.n;
  GET DIAGNOSTICS moved = ROW_COUNT;
  RETURN moved;
END
$$;

-- ---------------------------------------------------------------------------------------------
-- Definitions that were bound under another search path

-- Functions, views and checks keep the functions and operators that were found when they were made: before version 8 under the
-- search path of the role that migrated. They are found again, among those of PostgreSQL alone.
CREATE OR REPLACE FUNCTION effectonce.uuid_v7() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN encode(
  set_bit(set_bit(
    overlay(uuid_send(gen_random_uuid())
      PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
      FROM 1 FOR 6),
    52, 1), 53, 1),
  'hex')::uuid;

CREATE OR REPLACE FUNCTION effectonce.uuid_floor(at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid;

ALTER DOMAIN effectonce.key_name DROP CONSTRAINT is_empty;
ALTER DOMAIN effectonce.key_name ADD CONSTRAINT is_empty CHECK (VALUE <> '') NOT VALID;

CREATE OR REPLACE VIEW effectonce.outbox_progress_now AS
SELECT p.relay, p.shard, p.shards, coalesce(a.tick, p.tick) AS tick, CASE WHEN a.n IS NULL THEN p.next_tick ELSE a.next_tick END AS next_tick,
  coalesce(a.seq, p.seq) AS seq, greatest(a.floor, p.floor) AS floor, coalesce(a.published, p.published) AS published,
  p.system_identifier, p.timeline, p.owner, p.lease_until, p.epoch, coalesce(a.advanced_epoch, p.advanced_epoch) AS advanced_epoch,
  a.journal_offset, coalesce(a.n, p.advance) AS advance, coalesce(a.at, p.updated_at) AS updated_at
FROM effectonce.outbox_progress p
LEFT JOIN LATERAL (
  SELECT newest.* FROM (SELECT * FROM effectonce.outbox_advances n WHERE n.relay = p.relay AND n.shard = p.shard ORDER BY n.n DESC LIMIT 1) AS newest
  WHERE newest.epoch >= p.advanced_epoch AND newest.n > p.advance) AS a ON true;

-- oldest_seconds also where an old row has an infinite time.
CREATE OR REPLACE VIEW effectonce.outbox_backlog AS
WITH sequence AS (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END AS last FROM effectonce.outbox_seq_seq),
relays AS (
  SELECT relay, shards FROM effectonce.outbox_relays
  UNION ALL SELECT 'default' AS relay, 1 AS shards WHERE NOT EXISTS (SELECT FROM effectonce.outbox_relays)
), places AS (
  SELECT r.relay, r.shards, s.shard, p.next_tick IS NOT NULL AS within, coalesce(p.seq, 0) AS seq,
    coalesce(pg_snapshot_xmax(t.snapshot), '0'::xid8) AS xmax, ARRAY(SELECT pg_snapshot_xip(t.snapshot)) AS xip,
    CASE WHEN p.next_tick IS NULL THEN coalesce(t.seq_last, 0) ELSE p.seq END AS published_to
  FROM relays r CROSS JOIN LATERAL generate_series(0, r.shards - 1) AS s (shard)
  LEFT JOIN effectonce.outbox_progress_now p ON p.relay = r.relay AND p.shard = s.shard
  LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick
)
SELECT p.relay, max(CASE WHEN oldest.at IS NULL THEN 0 ELSE greatest(sequence.last - p.published_to, 1) END)::bigint AS rows,
  greatest(extract(epoch FROM clock_timestamp() - greatest(least(min(oldest.at), '2200-01-01'), '1970-01-01')), 0)::double precision AS oldest_seconds,
  (SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('effectonce.outbox'::regclass))::bigint AS bytes
FROM places p CROSS JOIN sequence CROSS JOIN LATERAL (
  SELECT min(created_at) AS at FROM (
    (SELECT o.created_at FROM effectonce.outbox o
     WHERE NOT p.within AND o.txid >= p.xmax AND o.shard % p.shards = p.shard ORDER BY o.txid, o.seq LIMIT 1)
    UNION ALL
    (SELECT o.created_at FROM effectonce.outbox o
     WHERE p.within AND o.seq > p.seq AND o.txid >= p.xmax AND o.shard % p.shards = p.shard ORDER BY o.seq LIMIT 1)
    UNION ALL
    (SELECT late.created_at FROM unnest(p.xip) AS open (txid) CROSS JOIN LATERAL (
       SELECT o.created_at FROM effectonce.outbox o
       WHERE o.txid = open.txid AND o.seq > CASE WHEN p.within THEN p.seq ELSE 0 END AND o.shard % p.shards = p.shard ORDER BY o.txid, o.seq LIMIT 1) late)
  ) firsts
) oldest
GROUP BY p.relay;
