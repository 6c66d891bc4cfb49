package relay

// sequencesSQL is run by relays and by operators.
const sequencesSQL = `-- relay.sequences
SELECT behind, seq_last, seq_known, tick_last, tick_known, reused FROM effectonce.outbox_sequence_state()`
