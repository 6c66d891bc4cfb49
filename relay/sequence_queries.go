package relay

// sequenceStateSQL reports whether numbers were assigned twice: see migrations/0006, "A sequence
// that is behind".
const sequenceStateSQL = `-- relay.sequence_state
SELECT behind FROM effectonce.outbox_sequence_state($1, 0)`

// repairSettingsSQL removes the time limit for a repair of many rows, and makes it durable. The
// function limits how long it waits for locks.
const repairSettingsSQL = `-- relay.repair_settings
SELECT set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '30s', true),
  set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

const repairSequencesSQL = `-- relay.repair_sequences
SELECT repaired, seq_before, seq_after, tick_before, tick_after, renumbered FROM effectonce.repair_outbox_sequences($1, 0)`
