package relay

// sequencesSQL and the statements after it are run by operators, not by relays: see Repair.
const sequencesSQL = `-- relay.sequences
SELECT behind, seq_last, seq_known, tick_last, tick_known, reused FROM effectonce.outbox_sequence_state(0, 0)`

const noteRepairSQL = `-- relay.note_repair
INSERT INTO effectonce.operator_actions (who, what, why, subject)
VALUES ($1, 'outbox.repair', $2, pg_catalog.jsonb_build_object('seq_before', $3::bigint, 'seq_after', $4::bigint, 'tick_before', $5::bigint, 'tick_after', $6::bigint, 'renumbered', $7::bigint))`
