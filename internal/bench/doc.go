// Package bench measures the consumer and the relay, and beside them the textbook way of doing the same.
//
// What is compared runs in turns in one process, against the same servers, several times over; each figure
// is the median of its rounds. So a machine that is slow or busy changes the figures, and their ratios
// much less.
//
// The textbook implementations are written as fairly as a careful reader of the textbook would: prepared
// statements, the same driver and Kafka client, the same durability, and the batch sizes that suit them.
// Every run is counted afterwards: a run that lost or doubled something is an error, not a figure.
package bench
