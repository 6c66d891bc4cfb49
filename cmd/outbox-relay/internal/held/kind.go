package held

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
