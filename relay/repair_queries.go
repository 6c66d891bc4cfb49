package relay

// sequencesSQL and the statements after it are run by operators, not by relays: see Repair.
const sequencesSQL = `-- relay.sequences
SELECT behind, seq_last, seq_known, tick_last, tick_known, reused FROM effectonce.outbox_sequence_state()`

const noteRepairSQL = `-- relay.note_repair
INSERT INTO effectonce.operator_actions (who, what, why, subject)
VALUES ($1, 'outbox.repair', $2, pg_catalog.jsonb_build_object('seq_before', $3::bigint, 'seq_after', $4::bigint, 'tick_before', $5::bigint, 'tick_after', $6::bigint, 'renumbered', $7::bigint))`

// repairSettingsSQL removes the time limit for a repair of many rows, and makes it durable. The
// function limits how long it waits for locks.
const repairSettingsSQL = `-- relay.repair_settings
SELECT set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '30s', true),
  set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

const repairSequencesSQL = `-- relay.repair_sequences
SELECT repaired, seq_before, seq_after, tick_before, tick_after, renumbered FROM effectonce.repair_outbox_sequences()`
