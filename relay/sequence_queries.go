package relay

// sequenceStateSQL reports whether numbers were assigned twice: see migrations/0006, "A sequence
// that is behind".
const sequenceStateSQL = `-- relay.sequence_state
SELECT behind FROM effectonce.outbox_sequence_state($1, 0)`

// reusedSQL reports whether a row was written from transaction $1 on with a number up to $2, behind a
// tick with that xmax and seqLast: the sequence was set back, and has passed again what it was at, before
// a look could notice. It walks the index on transactions, and compares both columns there. A copied row
// is no such row: see outbox_sequence_state, which has the same condition. It runs after
// fetchSettingsSQL.
const reusedSQL = `-- relay.reused
SELECT EXISTS (
  SELECT FROM (SELECT o.txid, o.xmin FROM effectonce.outbox o WHERE o.txid >= $1::text::xid8 AND o.seq <= $2 ORDER BY o.txid, o.seq) AS late
  WHERE pg_catalog.mod(late.xmin::text::numeric - pg_catalog.mod(late.txid::text::numeric, 4294967296::numeric) + 4294967296::numeric, 4294967296::numeric) < 1000000::numeric)`

// repairSettingsSQL removes the time limit for a repair of many rows, and makes it durable. The
// function limits how long it waits for locks.
const repairSettingsSQL = `-- relay.repair_settings
SELECT set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '30s', true),
  set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

const repairSequencesSQL = `-- relay.repair_sequences
SELECT repaired, seq_before, seq_after, tick_before, tick_after, renumbered FROM effectonce.repair_outbox_sequences($1, 0)`
