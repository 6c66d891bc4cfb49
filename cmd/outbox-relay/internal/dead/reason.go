package dead

import "github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"

// Reasons returns all reasons that the schema knows.
func Reasons() []string {
	return []string{"unknown_topic", "not_authorized", "too_large", "refused", "bad_headers", "bad_partition", "paused", "behind"}
}

// States returns all states that the schema knows.
func States() []string { return []string{"held", "behind", "retry"} }

// AdviceFor returns what a reason means and what to do; docs/runbook.md has more.
func AdviceFor(reason string) parked.Advice {
	switch reason {
	case "unknown_topic":
		return parked.Advice{What: "the topic does not exist", Do: "create the topic: its rows are then published automatically; if its name is a mistake, discard"}
	case "not_authorized":
		return parked.Advice{What: "the relay may not use the topic", Do: "grant the relay DESCRIBE and WRITE on the topic: its rows are then published automatically; if its name is a mistake, discard"}
	case "too_large":
		return parked.Advice{What: "the record is larger than the topic's max.message.bytes", Do: "raise max.message.bytes of the topic, then retry; else discard, and let its writer publish a reference to the body"}
	case "refused":
		return parked.Advice{What: "Kafka refused the record", Do: "correct what the error names (a policy of the topic), then retry; else discard"}
	case "bad_headers":
		return parked.Advice{What: "the column headers is not in the documented form", Do: "fix the column headers of its row in outbox_dead, then retry: the row keeps its place in the order; else discard"}
	case "bad_partition":
		return parked.Advice{What: "the partition that the row asks for does not exist, or is not a number", Do: "add partitions to the topic, or correct the header effectonce-partition of its row in outbox_dead, then retry; else discard"}
	case "paused":
		return parked.Advice{What: "its topic is paused, or has more rows than its rate", Do: "resume the topic: its rows are then published automatically, in order; rows above a rate need no action"}
	case "behind":
		return parked.Advice{What: "an earlier row of its key is dead", Do: "nothing: it follows when the first one is retried or discarded"}
	}
	return parked.Advice{What: "a newer version of the schema has this reason", Do: "see its documentation"}
}
