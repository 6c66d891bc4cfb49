// Package operator acts on rows that wait for an operator, whichever [Table] they are in: it hands them back
// ([Table.Retry]) or gives them up ([Table.Discard]), writes down in operator_actions who did so and why, and
// follows what was handed back ([Wait]). Packages dead and parked are its two tables.
//
// Rows form queues in the order of seq, one for each key. Only the first row of a queue, the head, is acted
// on; the others follow it in their order. A row without a key stands alone.
package operator
