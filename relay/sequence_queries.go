package relay

// sequenceStateSQL reports whether numbers were assigned twice, or will be.
const sequenceStateSQL = `-- relay.sequence_state
SELECT behind FROM effectonce.outbox_sequence_state()`
