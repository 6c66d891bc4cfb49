package held

import (
	"github.com/google/uuid"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

// Kind is one of the two kinds of rows that wait.
type Kind string

// The kinds. Each is also the name of its commands, and what its rows are.
const (
	Dead   Kind = "dead"
	Parked Kind = "parked"
)

// Words are what people are told of the rows of a kind.
type Words struct {
	Row     string // what one of them is called
	Filters string // the flags that choose rows
	WaitFor string // what a retry waits for
	Lost    string // the fate of a discarded row
	Behind  string // why a row was left alone that is not the first of its key
	// What became of rows that were handed back.
	Finished, Failed, Unfinished string
}

// Words returns the words of a kind.
func (k Kind) Words() Words {
	if k == Dead {
		return Words{
			Row: "row", Filters: "ID, --key, --topic, --reason, --state",
			WaitFor: "the relay has published them", Lost: "never published", Behind: "it waits behind another row, or the relay may be publishing it",
			Finished: "published", Failed: "held", Unfinished: "does a relay run?",
		}
	}
	return Words{
		Row: "message", Filters: "ID, --key, --topic, --consumer, --group, --reason",
		WaitFor: "the consumers have handled them", Lost: "never handled", Behind: "it now waits behind another message",
		Finished: "handled", Failed: "failed", Unfinished: "does a consumer hold their partitions?",
	}
}

// Rows is what several of them are called.
func (w Words) Rows() string { return w.Row + "s" }

// States returns all states that the schema knows. The first is that of a row that waits for an
// operator.
func (k Kind) States() []string {
	if k == Dead {
		return []string{"held", "behind", "retry"}
	}
	return []string{"parked", "behind", "retry"}
}

// statements are the SQL statements of a kind. Refs are the arguments of refArgs, queues those of
// queueArgs, a filter those of Filter.args.
type statements struct {
	list, targets string // filter, limit
	totals        string // filter
	show          string // ref, bytes of the payload
	next          string // ref, limit
	lock          string // refs
	lockQueues    string // refs
	retry         string // refs, subjects, who, what, why; returns refs and the last seq behind each
	discard       string // the same, whole keys; returns the same
	promoted      string // queues; its rows are the queues whose next row became the head
	progress      string // queues, seqs, last seqs, what, since when
}

func (k Kind) sql() statements {
	if k == Dead {
		return statements{
			deadListSQL, deadTargetsSQL, deadTotalsSQL, deadShowSQL, deadNextSQL, deadLockSQL, deadLockQueuesSQL, deadRetrySQL, deadDiscardSQL,
			deadPromotedSQL, deadProgressSQL,
		}
	}
	return statements{
		parkedListSQL, parkedTargetsSQL, parkedTotalsSQL, parkedShowSQL, parkedNextSQL, parkedLockSQL, parkedLockQueuesSQL, parkedRetrySQL, parkedDiscardSQL,
		parkedPromotedSQL, parkedProgressSQL,
	}
}

// ReasonTooLarge is the only reason of a parked message without a payload.
const ReasonTooLarge = "too_large"

// Advice is what a reason means and what to do about it; docs/runbook.md has more.
type Advice struct {
	What string `json:"what"`
	Do   string `json:"do"`
}

type reason struct {
	name string
	Advice
}

// commands are what an operator can do about a row, as command lines.
func (k Kind) commands(r *Row) []string {
	const prefix = "outbox-relay "
	of := " --relay " + human.Word(r.Relay)
	if k == Parked {
		of = " --consumer " + human.Word(r.Consumer)
	}
	command := func(verb string, id uuid.UUID, rest string) string {
		return prefix + string(k) + " " + verb + " " + id.String() + of + rest
	}
	retry, discard := command("retry", r.ID, " --wait"), command("discard", r.ID, " --why …")
	switch {
	case r.Head != nil:
		return []string{command("show", *r.Head, "")}
	case r.State == "retry":
		return []string{}
	case r.Reason == "paused":
		return []string{prefix + "topics resume " + human.Word(r.Topic) + of}
	case r.Reason == "unknown_topic", r.Reason == "not_authorized", k == Parked && r.Reason == ReasonTooLarge:
		return []string{discard}
	}
	return []string{retry, discard}
}

// Reasons returns all reasons that the schema knows.
func (k Kind) Reasons() (names []string) {
	for _, r := range k.reasons() {
		names = append(names, r.name)
	}
	return names
}

// Advice returns the advice for a reason.
func (k Kind) Advice(name string) Advice {
	for _, r := range k.reasons() {
		if r.name == name {
			return r.Advice
		}
	}
	return Advice{"a newer version of the schema has this reason", "see its documentation"}
}

func (k Kind) reasons() []reason {
	if k == Dead {
		return []reason{
			{"unknown_topic", Advice{"the topic does not exist", "create the topic: its rows are then published automatically; if its name is a mistake, discard"}},
			{"not_authorized", Advice{"the relay may not use the topic", "grant the relay DESCRIBE and WRITE on the topic: its rows are then published automatically; if its name is a mistake, discard"}},
			{"too_large", Advice{"the record is larger than the topic's max.message.bytes", "raise max.message.bytes of the topic, then retry; else discard, and let its writer publish a reference to the body"}},
			{"refused", Advice{"Kafka refused the record", "correct what the error names (a policy of the topic), then retry; else discard"}},
			{"bad_headers", Advice{"the column headers is not in the documented form", "fix the column headers of its row in outbox_dead, then retry: the row keeps its place in the order; else discard"}},
			{"bad_partition", Advice{"the partition that the row asks for does not exist, or is not a number", "add partitions to the topic, or correct the header effectonce-partition of its row in outbox_dead, then retry; else discard"}},
			{"paused", Advice{"its topic is paused", "resume the topic: its rows are then published automatically, in order"}},
			{"behind", Advice{"an earlier row of its key is dead", "nothing: it follows when the first one is retried or discarded"}},
		}
	}
	return []reason{
		{"failed", Advice{"the handler failed at every attempt", "fix what the error names, then retry"}},
		{"permanent", Advice{"the handler, or the SQLSTATE, says that a retry cannot succeed", "fix the data or deploy a handler that accepts it, then retry; else discard"}},
		{"undecodable", Advice{"the payload does not have the form that the handler reads", "deploy a decoder that reads it, then retry; else discard, and let the producer send it again under a new ID"}},
		{"unknown_type", Advice{"there is no handler for its type", "deploy a consumer that has one, then retry; else discard"}},
		{"invalid", Advice{"its ID cannot be determined, so a duplicate could not be recognised", "make sure that it had no effect yet, then retry: its ID is then its topic, partition and offset; else discard"}},
		{ReasonTooLarge, Advice{"it is larger than MessageBytesMax; only its coordinates and key are stored", "it cannot be retried: read it from Kafka while it is there; let the producer send it again under a new ID, in a smaller form or after you raised MessageBytesMax; then discard"}},
		{"expired", Advice{"it is older than the dedup window: it may have been handled before, and its claim may be forgotten", "check in your own tables whether it had its effect; if not, retry; else discard"}},
		{"conflict", Advice{"another message with the same ID but other content was handled before", "its producer used an ID twice: compare both; retry if this one also has to have its effect, else discard"}},
		{"crashed", Advice{"the process ended at every attempt", "find out from its log why the process ended (memory, fatal error), deploy a fixed one, then retry; else discard"}},
		{"behind", Advice{"an earlier message of its key is parked", "nothing: it follows when the first one is retried or discarded"}},
	}
}
