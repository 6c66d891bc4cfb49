package doctor

const deadTopicsSQL = `-- doctor.dead_topics
SELECT DISTINCT topic FROM (SELECT topic FROM effectonce.outbox_dead WHERE state IN ('held', 'behind', 'retry') LIMIT $1) bounded`

const parkedPartitionsSQL = `-- doctor.parked_partitions
SELECT topic, partition, count(*) FROM (SELECT topic, partition FROM effectonce.parked_messages LIMIT $1) p
GROUP BY topic, partition ORDER BY topic, partition`

// heldBackSQL finds positions that keep claims. Claims are forgotten when they are older than the
// longest window and every position of a group that forgets has passed them. A position is as old
// as the last record before it, or as the last time when it was at the end of its partition.
const heldBackSQL = `-- doctor.held_back
SELECT consumer_group, topic, count(*), extract(epoch FROM clock_timestamp() - greatest(least(pg_catalog.min(at), '2200-01-01'), '1970-01-01'))::float8
FROM (SELECT p.consumer_group, p.topic, coalesce(greatest(p.record_time, p.caught_up_at), p.updated_at) AS at
  FROM effectonce.consumer_positions p
  WHERE EXISTS (SELECT FROM effectonce.consumers c WHERE c.consumer_group = p.consumer_group AND c.dedup_window IS NOT NULL)) held
WHERE at < clock_timestamp() - (SELECT pg_catalog.max(dedup_window) FROM effectonce.consumers)
GROUP BY consumer_group, topic ORDER BY consumer_group, topic`

const serverSQL = `-- doctor.server
SELECT pg_catalog.current_setting('server_version_num')::int, pg_catalog.current_setting('server_version'), pg_is_in_recovery(),
  pg_catalog.current_setting('transaction_read_only')::bool`

const durabilitySQL = `-- doctor.durability
SELECT pg_catalog.current_setting('fsync')::bool, pg_catalog.current_setting('full_page_writes')::bool, pg_catalog.current_setting('synchronous_commit')`

const schemaExistsSQL = `-- doctor.schema_exists
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`

// rightsSQL writes the statements that would grant the rights that the role lacks. It reads the
// catalog, because looking up a table by its name needs the very rights that are checked. It leaves
// out what does not exist: the schema check reports that.
const rightsSQL = `-- doctor.rights
SELECT pg_catalog.format('GRANT %s ON %s %s TO %I', pg_catalog.string_agg(n.privilege || CASE WHEN n.columns <> '' THEN pg_catalog.format(' (%s)', replace(n.columns, ' ', ', ')) ELSE '' END,
    ', ' ORDER BY n.place), upper(n.kind),
  CASE n.kind WHEN 'schema' THEN pg_catalog.format('%I', n.name) WHEN 'function' THEN pg_catalog.format('%I.%s', $1::text, n.name) ELSE pg_catalog.format('%I.%I', $1::text, n.name) END, current_user)
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[]) WITH ORDINALITY AS n (kind, name, privilege, columns, place)
JOIN pg_namespace s ON s.nspname = $1
LEFT JOIN pg_class c ON c.relnamespace = s.oid AND c.relname = n.name
WHERE CASE
  WHEN n.kind = 'schema' THEN NOT pg_catalog.has_schema_privilege(s.oid, n.privilege)
  WHEN n.kind = 'function' THEN NOT pg_catalog.has_function_privilege((
    SELECT p.oid FROM pg_proc p WHERE p.pronamespace = s.oid AND p.proname = split_part(n.name, '(', 1)), n.privilege)
  WHEN n.kind = 'sequence' THEN NOT pg_catalog.has_sequence_privilege(c.oid, n.privilege)
  WHEN n.columns <> '' THEN EXISTS (SELECT FROM string_to_table(n.columns, ' ') AS col (name) WHERE NOT pg_catalog.has_column_privilege(c.oid, col.name, n.privilege))
  ELSE NOT pg_catalog.has_table_privilege(c.oid, n.privilege)
END
GROUP BY n.kind, n.name ORDER BY pg_catalog.min(n.place)`

const sequenceSQL = `-- doctor.sequence
SELECT seqcache FROM pg_sequence WHERE seqrelid = pg_catalog.pg_get_serial_sequence('effectonce.outbox', 'seq')::regclass::oid`

// openSQL finds the oldest open transactions, in sessions or prepared. Sessions of other roles are
// visible only with pg_read_all_stats.
const openSQL = `-- doctor.open_transactions
SELECT what, remedy, extract(epoch FROM clock_timestamp() - since)::float8, writes FROM (
  SELECT 'session ' || pid::text || ' (' || coalesce(nullif(application_name, ''), 'no application_name') || ')' AS what,
    pg_catalog.format('SELECT pg_terminate_backend(%s); -- it is %s; ask its owner (%s) first', pid, coalesce(state, '-'), usename) AS remedy, xact_start AS since, backend_xid IS NOT NULL AS writes
  FROM pg_stat_activity WHERE (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL) AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
    AND backend_type = 'client backend'
  UNION ALL
  SELECT pg_catalog.format('prepared transaction %s of %s in database %s', gid, owner, database),
    pg_catalog.format('SELECT * FROM pg_prepared_xacts WHERE gid = %L; -- its coordinator knows how it has to end: docs/runbook.md, "Long transactions"', gid), prepared, true FROM pg_prepared_xacts
) open ORDER BY since LIMIT 20`

// holdersSQL finds what keeps dead rows for another reader: slots, and standbys with
// hot_standby_feedback.
const holdersSQL = `-- doctor.holders
SELECT * FROM (
  SELECT pg_catalog.format('replication slot %s', slot_name) AS what, pg_catalog.format('SELECT * FROM pg_replication_slots WHERE slot_name = %L; -- start its reader; if that never comes back: docs/runbook.md, "Size"', slot_name) AS remedy, active,
    greatest(coalesce(age(xmin), 0), coalesce(age(catalog_xmin), 0))::bigint AS behind,
    coalesce(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, restart_lsn), 0)::bigint AS wal
  FROM pg_replication_slots WHERE NOT temporary
  UNION ALL
  SELECT pg_catalog.format('standby %s (%s)', application_name, coalesce(host(client_addr), 'local')),
    'SELECT pid, xact_start, query FROM pg_stat_activity WHERE backend_xmin IS NOT NULL ORDER BY xact_start; -- there; or hot_standby_feedback = off',
    true, age(backend_xmin)::bigint, 0
  FROM pg_stat_replication WHERE backend_xmin IS NOT NULL
) held ORDER BY behind DESC LIMIT 20`

const backendSQL = `-- doctor.backend
SELECT pg_backend_pid()`
