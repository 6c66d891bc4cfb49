// Package bench measures the consumer and the relay, and compares them with the textbook way of
// doing the same.
//
// The compared variants run in turns in one process, against the same servers, in several rounds;
// each figure is the median of its rounds. So a slow or busy machine changes the figures, but their
// ratios much less.
//
// The textbook implementations are as fair as a careful reader of the textbook would write them:
// prepared statements, the same driver and Kafka client, the same durability, and the batch sizes
// that suit them. The effects of every run are counted afterwards: a run that lost or doubled
// something is an error, not a figure.
package bench
