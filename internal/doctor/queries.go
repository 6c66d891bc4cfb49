package doctor

import "github.com/effectonce/effectonce/migrations"

// progressSQL reads every relay's cursor with its two ticks taken apart. seq counts only while a batch
// takes several pages, that is while next_tick is set. The epoch of the clock comes with it, so that a
// rate is computed from the database's time. A shard that no replica ever took has no cursor: it stands at the beginning.
const progressSQL = `-- doctor.progress
SELECT p.relay, p.shard, coalesce(p.owner, ''),
  coalesce(extract(epoch FROM p.lease_until - clock_timestamp()), 0)::float8, p.epoch, p.published,
  p.tick, p.floor, CASE WHEN p.next_tick IS NULL THEN 0 ELSE p.seq END,
  t.seq_last, pg_snapshot_xmax(t.snapshot)::text, ARRAY(SELECT x::text FROM pg_snapshot_xip(t.snapshot) x),
  pg_snapshot_xmax(n.snapshot)::text, ARRAY(SELECT x::text FROM pg_snapshot_xip(n.snapshot) x),
  p.system_identifier, extract(epoch FROM clock_timestamp())::float8, p.shards
FROM (
  SELECT relay, shard, owner, lease_until, epoch, published, tick, floor, next_tick, seq, system_identifier, shards FROM effectonce.outbox_progress_now
  UNION ALL
  SELECT r.relay, s.shard, NULL, NULL, 0, 0, 0, 0, NULL, 0, NULL, r.shards
  FROM effectonce.outbox_relays r CROSS JOIN LATERAL generate_series(0, r.shards - 1) AS s (shard)
  WHERE NOT EXISTS (SELECT FROM effectonce.outbox_progress p WHERE p.relay = r.relay AND p.shard = s.shard)
) p
LEFT JOIN effectonce.outbox_ticks t ON t.tick = p.tick
LEFT JOIN effectonce.outbox_ticks n ON n.tick = p.next_tick
ORDER BY p.relay, p.shard`

// waitingRows are the committed rows that a relay has not published yet; $1 to $8 are a waitingRange. A
// row is published if it is visible in the tick behind the cursor or, while a batch takes several pages,
// up to seq ($4, else 0) if it is visible in the next tick. Turned around, what waits is
//
//   - rows of transactions that were open at a tick and that its snapshot names, each transaction looked
//     up by its id, within its own range of seq;
//   - between batches: rows with a transaction id from the tick's xmax ($2) on;
//   - inside a batch: those of them behind seq, found by seq, because the part of the batch that is
//     published already has such ids too; and, up to seq, rows from the next tick's xmax ($5) on.
//
// $10 is into how many shards the relay divides the rows, $11 the one that is asked for.
//
// Each branch walks one index, and what could make the planner take the other one is hidden from it
// (pairs, coalesce). Each stops at $9 rows, so that the cost is bounded whatever the backlog.
const waitingRows = `
  SELECT * FROM (
    (SELECT late.*
     FROM unnest($6::text[]::xid8[], $7::bigint[], $8::bigint[]) AS open (txid, low, high) CROSS JOIN LATERAL (
       SELECT o.seq, o.topic, o.key, o.payload, o.headers, o.created_at FROM effectonce.outbox o
       WHERE (o.txid, o.seq) > (open.txid, open.low) AND (o.txid, o.seq) <= (open.txid, open.high) AND o.shard % $10::int = $11::int
       ORDER BY o.txid, o.seq LIMIT $9) late)
    UNION ALL
    (SELECT o.seq, o.topic, o.key, o.payload, o.headers, o.created_at FROM effectonce.outbox o
     WHERE $4 = 0 AND (o.txid, o.seq) > ($2::text::xid8, $3) AND o.seq > $3 AND o.shard % $10::int = $11::int
     ORDER BY o.txid, o.seq LIMIT $9)
    UNION ALL
    (SELECT o.seq, o.topic, o.key, o.payload, o.headers, o.created_at FROM effectonce.outbox o
     WHERE $4 > 0 AND o.seq > $1 AND coalesce(o.txid, '0'::xid8) >= $2::text::xid8 AND o.shard % $10::int = $11::int
     ORDER BY o.seq LIMIT $9)
    UNION ALL
    (SELECT fresh.* FROM (
       SELECT o.seq, o.topic, o.key, o.payload, o.headers, o.created_at FROM effectonce.outbox o
       WHERE $4 > 0 AND (o.txid, o.seq) > ($5::text::xid8, $3) AND o.shard % $10::int = $11::int ORDER BY o.txid, o.seq LIMIT $9) fresh
     WHERE fresh.seq > $3 AND fresh.seq <= $4)
  ) waiting LIMIT $9`

// countSQL also reads the first row and the end of the sequence, for an estimate where the count stopped
// at its limit.
const countSQL = `-- doctor.count
SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8,
  coalesce(min(seq), 0), coalesce(pg_sequence_last_value('effectonce.outbox_seq_seq'), 0)
FROM (` + waitingRows + `) counted`

// waitingTopicsSQL estimates what of a record comes from the row: the JSON text of headers is about as
// long as they are on the wire.
const waitingTopicsSQL = `-- doctor.waiting_topics
SELECT topic, max(coalesce(octet_length(key), 0) + coalesce(octet_length(payload), 0) + octet_length(headers::text))
FROM (` + waitingRows + `) sized GROUP BY topic`

// deadSQL counts each dead row in its shard.
const deadSQL = `-- doctor.dead
SELECT d.relay, (d.shard % coalesce(r.shards, 1))::smallint, d.reason, count(*)
FROM (SELECT relay, shard, reason FROM effectonce.outbox_dead LIMIT $1) d LEFT JOIN effectonce.outbox_relays r USING (relay)
GROUP BY 1, 2, 3`

// pausedTopicsSQL: an empty $1 is every relay. Rows are counted with a bound for each topic.
const pausedTopicsSQL = `-- doctor.paused_topics
SELECT p.relay, p.topic, (SELECT count(*) FROM (SELECT FROM effectonce.outbox_dead d WHERE d.relay = p.relay AND d.topic = p.topic LIMIT $2) bounded), p.who, p.why, p.paused_at
FROM effectonce.outbox_paused p WHERE $1 = '' OR p.relay = $1 ORDER BY p.relay, p.topic`

const deadTopicsSQL = `-- doctor.dead_topics
SELECT DISTINCT topic FROM (SELECT topic FROM effectonce.outbox_dead LIMIT $1) bounded`

const countConsumersSQL = `-- doctor.count_consumers
SELECT (SELECT count(*) FROM effectonce.consumers), (SELECT count(*) FROM effectonce.consumer_positions)`

// consumersSQL: a group may have several names, one for each topic.
const consumersSQL = `-- doctor.consumers
SELECT c.name, c.consumer_group, c.topics, c.id_rule, (SELECT count(*) FROM effectonce.consumer_positions p
  WHERE p.consumer_group = c.consumer_group AND p.topic = ANY (c.topics))
FROM effectonce.consumers c ORDER BY c.name`

const troubleSQL = `-- doctor.trouble
SELECT c.name, p.topic, p.partition, coalesce(p.owner, ''), p.trouble, extract(epoch FROM clock_timestamp() - coalesce(p.trouble_since, p.updated_at))::float8
FROM effectonce.consumer_positions p JOIN effectonce.consumers c ON c.consumer_group = p.consumer_group AND p.topic = ANY (c.topics)
WHERE p.trouble IS NOT NULL ORDER BY c.name, p.topic, p.partition LIMIT $1`

// parkedSQL counts at most $1 rows. A key is held by its first row, which is behind none.
const parkedSQL = `-- doctor.parked
SELECT c.name, p.reason, count(*),
  count(DISTINCT (p.topic, p.partition, sha256(p.key))) FILTER (WHERE p.state <> 'behind' AND p.key IS NOT NULL),
  extract(epoch FROM clock_timestamp() - min(p.parked_at))::float8
FROM (SELECT consumer, topic, partition, key, reason, state, parked_at FROM effectonce.parked_messages LIMIT $1) p
JOIN effectonce.consumers c ON c.id = p.consumer
GROUP BY c.name, p.reason`

const windowsSQL = `-- doctor.windows
SELECT name, topics, extract(epoch FROM dedup_window)::float8 FROM effectonce.consumers ORDER BY name`

const parkedPartitionsSQL = `-- doctor.parked_partitions
SELECT topic, partition, count(*) FROM (SELECT topic, partition FROM effectonce.parked_messages LIMIT $1) p
GROUP BY topic, partition ORDER BY topic, partition`

// heldBackSQL: claims are forgotten when they are older than the longest window and every position of a
// group that forgets has passed them. A position is as old as the last record before it, or as the last time
// when it was at the end of its partition.
const heldBackSQL = `-- doctor.held_back
SELECT consumer_group, topic, count(*), extract(epoch FROM clock_timestamp() - min(at))::float8
FROM (SELECT p.consumer_group, p.topic, coalesce(greatest(p.record_time, p.caught_up_at), p.updated_at) AS at
  FROM effectonce.consumer_positions p
  WHERE EXISTS (SELECT FROM effectonce.consumers c WHERE c.consumer_group = p.consumer_group AND c.dedup_window IS NOT NULL)) held
WHERE at < clock_timestamp() - (SELECT max(dedup_window) FROM effectonce.consumers)
GROUP BY consumer_group, topic ORDER BY consumer_group, topic`

const serverSQL = `-- doctor.server
SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),
  current_setting('transaction_read_only')::bool`

const durabilitySQL = `-- doctor.durability
SELECT current_setting('fsync')::bool, current_setting('full_page_writes')::bool, current_setting('synchronous_commit')`

const schemaExistsSQL = `-- doctor.schema_exists
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`

// rightsSQL writes the statements that would give the role what it lacks, from the catalog: looking a table up by its name needs the rights
// that are asked for. What does not exist is left out; the schema check tells.
const rightsSQL = `-- doctor.rights
SELECT format('GRANT %s ON %s %s TO %I', string_agg(n.privilege || CASE WHEN n.columns <> '' THEN format(' (%s)', replace(n.columns, ' ', ', ')) ELSE '' END,
    ', ' ORDER BY n.place), upper(n.kind),
  CASE n.kind WHEN 'schema' THEN format('%I', n.name) WHEN 'function' THEN format('%I.%s', $1::text, n.name) ELSE format('%I.%I', $1::text, n.name) END, current_user)
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[]) WITH ORDINALITY AS n (kind, name, privilege, columns, place)
JOIN pg_namespace s ON s.nspname = $1
LEFT JOIN pg_class c ON c.relnamespace = s.oid AND c.relname = n.name
WHERE CASE
  WHEN n.kind = 'schema' THEN NOT has_schema_privilege(s.oid, n.privilege)
  WHEN n.kind = 'function' THEN NOT has_function_privilege((
    SELECT p.oid FROM pg_proc p WHERE p.pronamespace = s.oid AND p.proname = split_part(n.name, '(', 1)), n.privilege)
  WHEN n.kind = 'sequence' THEN NOT has_sequence_privilege(c.oid, n.privilege)
  WHEN n.columns <> '' THEN EXISTS (SELECT FROM string_to_table(n.columns, ' ') AS col (name) WHERE NOT has_column_privilege(c.oid, col.name, n.privilege))
  ELSE NOT has_table_privilege(c.oid, n.privilege)
END
GROUP BY n.kind, n.name ORDER BY min(n.place)`

const sequenceSQL = `-- doctor.sequence
SELECT seqcache FROM pg_sequence WHERE seqrelid = pg_get_serial_sequence('effectonce.outbox', 'seq')::regclass`

const clockSQL = `-- doctor.clock
SELECT clock_timestamp()`

// openSQL finds the oldest transactions: in sessions, or prepared. Sessions of others are only seen with
// pg_read_all_stats.
const openSQL = `-- doctor.open_transactions
SELECT what, remedy, extract(epoch FROM clock_timestamp() - since)::float8, writes FROM (
  SELECT 'session ' || pid || ' (' || coalesce(nullif(application_name, ''), 'no application_name') || ')' AS what,
    format('SELECT pg_terminate_backend(%s); -- it is %s; ask its owner (%s) first', pid, coalesce(state, '-'), usename) AS remedy, xact_start AS since, backend_xid IS NOT NULL AS writes
  FROM pg_stat_activity WHERE (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL) AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
    AND backend_type = 'client backend'
  UNION ALL
  SELECT format('prepared transaction %s of %s in database %s', gid, owner, database),
    format('SELECT * FROM pg_prepared_xacts WHERE gid = %L; -- its coordinator knows how it has to end: docs/operations.md, "Long transactions"', gid), prepared, true FROM pg_prepared_xacts
) open ORDER BY since LIMIT 20`

// holdersSQL finds what keeps dead rows for somebody else: slots, and standbys with hot_standby_feedback.
const holdersSQL = `-- doctor.holders
SELECT * FROM (
  SELECT format('replication slot %s', slot_name) AS what, format('SELECT * FROM pg_replication_slots WHERE slot_name = %L; -- start its reader; if that never comes back: docs/operations.md, "Size"', slot_name) AS remedy, active,
    greatest(coalesce(age(xmin), 0), coalesce(age(catalog_xmin), 0))::bigint AS behind,
    coalesce(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, restart_lsn), 0)::bigint AS wal
  FROM pg_replication_slots WHERE NOT temporary
  UNION ALL
  SELECT format('standby %s (%s)', application_name, coalesce(host(client_addr), 'local')),
    'SELECT pid, xact_start, query FROM pg_stat_activity WHERE backend_xmin IS NOT NULL ORDER BY xact_start; -- there; or hot_standby_feedback = off',
    true, age(backend_xmin)::bigint, 0
  FROM pg_stat_replication WHERE backend_xmin IS NOT NULL
) held ORDER BY behind DESC LIMIT 20`

const autovacuumSQL = `-- doctor.autovacuum
SELECT current_setting('autovacuum')::bool, current_setting('track_counts')::bool`

// starvedSQL finds tables for which autovacuum is off, or does not keep up: with $2 times the dead rows at which it
// begins, at least $3. Each setting is the table's own, or else the server's.
const starvedSQL = `-- doctor.starved
SELECT relname, off, dead > $3 AND dead > $2 * (threshold + factor * greatest(rows, 0)), dead, extract(epoch FROM clock_timestamp() - vacuumed)::float8
FROM (
  SELECT c.relname, c.reltuples AS rows, coalesce(s.n_dead_tup, 0) AS dead, greatest(s.last_autovacuum, s.last_vacuum) AS vacuumed,
    coalesce(o.off, false) AS off,
    coalesce(o.threshold, current_setting('autovacuum_vacuum_threshold')::float8) AS threshold,
    coalesce(o.factor, current_setting('autovacuum_vacuum_scale_factor')::float8) AS factor
  FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
  CROSS JOIN LATERAL (
    SELECT bool_or(NOT option_value::bool) FILTER (WHERE option_name = 'autovacuum_enabled') AS off,
      max(option_value::float8) FILTER (WHERE option_name = 'autovacuum_vacuum_threshold') AS threshold,
      max(option_value::float8) FILTER (WHERE option_name = 'autovacuum_vacuum_scale_factor') AS factor
    FROM pg_options_to_table(c.reloptions)
  ) o
  WHERE c.relnamespace = to_regnamespace(quote_ident($1)) AND c.relkind = 'r'
) tables
WHERE off OR dead > $3 AND dead > $2 * (threshold + factor * greatest(rows, 0))
ORDER BY relname LIMIT 50`

const backendSQL = `-- doctor.backend
SELECT pg_backend_pid()`

const scheduledSQL = `-- doctor.scheduled
SELECT (SELECT count(*) FROM (SELECT FROM effectonce.outbox_scheduled LIMIT $1) bounded),
  (SELECT count(*) FROM (SELECT FROM effectonce.outbox_scheduled WHERE due_at <= (SELECT clock_timestamp()) LIMIT $1) bounded),
  greatest(extract(epoch FROM clock_timestamp() - (SELECT due_at FROM effectonce.outbox_scheduled ORDER BY due_at LIMIT 1)), 0)::float8`

// keysSQL counts $1 keys of each kind at most, and reads nothing of those that are finished and not over. $2: since when
// nobody works on what is stuck. What has expires_at and no lock only counts failures of work in one transaction, and had no
// effect: a reaper forgets it then.
const keysSQL = `-- doctor.keys
SELECT running.n, coalesce(extract(epoch FROM clock_timestamp() - running.oldest), 0)::float8, running.stuck, running.failing, undecided.indeterminate, undecided.abandoned,
  greatest(coalesce(extract(epoch FROM clock_timestamp() - (
    SELECT expires_at FROM effectonce.idempotency_keys WHERE state = 'finished' AND expires_at IS NOT NULL ORDER BY expires_at LIMIT 1)), 0), 0)::float8
FROM (
  SELECT count(*) FILTER (WHERE NOT counts) AS n, min(created_at) FILTER (WHERE NOT counts) AS oldest, count(*) FILTER (
    WHERE NOT counts AND due <= clock_timestamp() - $2::interval AND (locked_until IS NULL OR locked_until <= clock_timestamp() - $2::interval)) AS stuck,
    count(*) FILTER (WHERE NOT counts AND due > clock_timestamp() AND created_at <= clock_timestamp() - $2::interval AND (locked_until IS NULL OR locked_until <= clock_timestamp())) AS failing
  FROM (SELECT created_at, locked_until, coalesce(retry_at, created_at) AS due,
      locked_until IS NULL AND coalesce(expires_at > clock_timestamp() - $2::interval, false) AS counts FROM effectonce.idempotency_keys
    WHERE state = 'running' ORDER BY coalesce(retry_at, created_at) LIMIT $1) first
) running, (
  SELECT count(*) FILTER (WHERE state = 'indeterminate') AS indeterminate, count(*) FILTER (WHERE state = 'abandoned') AS abandoned
  FROM (SELECT state FROM effectonce.idempotency_keys WHERE state IN ('indeterminate', 'abandoned') ORDER BY created_at LIMIT $1) first
) undecided`

// slotsSQL: how old the first row of each slot is, and which one is filled now.
const slotsSQL = `-- doctor.slots
SELECT s.slot, s.slot = c.last_value, pg_relation_size(('effectonce.outbox_' || s.slot)::regclass),
  coalesce(extract(epoch FROM clock_timestamp() - (
    SELECT o.created_at FROM effectonce.outbox o WHERE o.slot = s.slot ORDER BY o.seq LIMIT 1)), 0)::float8
FROM effectonce.outbox_slots s, effectonce.outbox_slot c
ORDER BY s.slot`

// slotHoldersSQL finds who holds a lock on a slot that is not filled now and has rows, for longer than $2, or for an unknown
// time where the slot was turned away from longer than $1 ago. The doctor's own lock is none.
const slotHoldersSQL = `-- doctor.slot_holders
SELECT l.pid, CASE WHEN l.pid IS NULL THEN 'a prepared transaction'
    ELSE format('session %s (%s, role %s)', l.pid, coalesce(nullif(a.application_name, ''), 'no application_name'), coalesce(a.usename, '?')) END,
  array_agg(DISTINCT s.slot ORDER BY s.slot), extract(epoch FROM clock_timestamp() - a.xact_start)::float8,
  (sum(s.bytes) / count(DISTINCT l.mode))::bigint, bool_or(s.overdue)
FROM (
  SELECT slot, turned_away, ('effectonce.outbox_' || slot)::regclass AS part, pg_total_relation_size(('effectonce.outbox_' || slot)::regclass) AS bytes,
    turned_away + $1::interval < clock_timestamp() AS overdue
  FROM effectonce.outbox_slots WHERE slot <> (SELECT last_value FROM effectonce.outbox_slot) AND pg_relation_size(('effectonce.outbox_' || slot)::regclass) > 0
) s
JOIN pg_locks l ON l.locktype = 'relation' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.relation = s.part
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
GROUP BY l.pid, l.virtualtransaction, a.application_name, a.usename, a.xact_start
HAVING a.xact_start < clock_timestamp() - $2::interval OR (a.xact_start IS NULL AND bool_or(s.overdue))
ORDER BY a.xact_start NULLS LAST, l.pid LIMIT 20`

const systemSQL = `-- doctor.system
SELECT system_identifier FROM pg_control_system()`

func inSchema(sql, schema string) string { return migrations.InSchema(sql, schema) }

// sequencesSQL says whether numbers were given twice: see migrations/0006, "A sequence that is behind".
const sequencesSQL = `-- doctor.sequences
SELECT behind, seq_last, seq_known, tick_last, tick_known, reused FROM effectonce.outbox_sequence_state(0, 0)`
