// Package operator acts on rows that wait for an operator, whichever [Table] they are in. It hands
// them back ([Table.Retry]) or deletes them ([Table.Discard]), records in operator_actions who did
// so and why, and follows the rows that were handed back ([Wait]). Packages dead and parked are its
// two tables.
//
// Rows form queues in the order of seq, one for each key. Only the first row of a queue, the head,
// is acted on; the others follow in their order. A row without a key is in no queue.
package operator
