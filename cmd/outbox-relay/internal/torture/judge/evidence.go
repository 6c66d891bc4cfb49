package judge

import (
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// Order is a row of the workload's own table: what was committed.
type Order struct {
	MessageID string
	Key       int32
	Version   int64 // 0: for later, without order
	Amount    int64
	Kind      int
	Request   string
}

// Effect is a row that a handler wrote, in the order in which those of one key were committed.
type Effect struct {
	Order   int64
	Key     int32
	Version int64
	Amount  int64
}

// Record is a record of a topic.
type Record struct {
	Topic      string
	Partition  int32
	Offset     int64
	ID         string // header message-id
	Key        string
	Body       scene.Body
	Unreadable string
}

// Batch is a line of a producer's ledger.
type Batch struct {
	First, Count, Sum int64
}

// Balance is a row of the workload's balances.
type Balance struct {
	Group   int16
	Key     int32
	Balance int64
	Effects int64
}

// Answer is the final answer that a client got for a key.
type Answer struct {
	Key    string
	Status int
	Order  string
}

// Move is a stored position, as it was seen, or an order to move it.
type Move struct {
	Partition string // group, topic and partition
	Next      int64
	Ordered   bool
}

// Pause is a range of offsets that were given out while the topic of orders was paused.
type Pause struct {
	Partition int32
	From, To  int64
}

// Resumption is an operator's order to resume a partition elsewhere, as it was carried out.
type Resumption struct {
	Partition     string // group, topic and partition
	Ordered, Next int64
}

// Version is that of a key.
type Version struct {
	Key     int32
	Version int64
}

// Resume is where a group began to read a partition, or an order to begin there.
type Resume struct {
	Group, Topic string
	Partition    int32
	Offset       int64
	At           int64 // nanoseconds
}

// Expired is the message of an order that a group parked because it may have been handled before.
type Expired struct {
	Group int16
	Order int64
}

// Evidence is everything that Judge looks at.
type Evidence struct {
	Scene scene.Scene
	Topic string // of orders
	// ChildTopic and DeadTopic name the topics of a group.
	ChildTopic, DeadTopic, JournalTopic func(group int16) string
	// Consumer is the name of a group's consumer: part of the keys of its calls.
	Consumer func(group int16) string

	Acked, Unknown, Undone []Batch
	Calls                  map[string]map[string]int // what a call was for: its keys, and how often each
	Answers                []Answer
	Asked                  []string
	Garbage                map[string]struct{} // message IDs
	Forged                 map[int64]struct{}  // orders under whose ID another message was published from outside
	Paused                 []Pause
	Frozen                 map[string]int // roles of processes that were frozen
	Struck                 map[string]int // by kind and point
	Moves                  []Move
	Resumes, Rewinds       []Resume
	Grown                  map[string]bool     // topics
	Copied                 map[string]int      // message IDs published again from outside
	Discarded              map[string]struct{} // group/order
	Expired                []Expired           // what an operator found
	Replayed               bool
	SequenceBack           bool
	Restored               bool
	LostCommits            bool

	Orders   map[int64]Order
	Effects  map[int16][]Effect
	Balances []Balance
	Records  []Record
	Entries  map[int16][]int64   // of journals: orders in the order of the versions
	Fenced   map[int16][]Version // what fences let through, in the order in which it was committed
	Resumed  []Resumption
	// Left is what the system's own tables still hold at the end: parked, dead, unpublished rows.
	Left []string
	// Stuck is what the run itself saw: what did not drain or end in time.
	Stuck []string
	// Leaked names the files of the processes' output in which a password is.
	Leaked []string
}
