// Package scene says what one round of a torture run consists of: the configuration that is drawn from
// its seed, the tables of the workload and the bodies of its messages. It knows nothing of the engine.
package scene

import "time"

// Scene is the configuration of one round: everything that is drawn from the seed but the faults.
type Scene struct {
	// Rival is what takes the engine's place; empty: nothing does.
	Rival      string `json:"rival,omitempty"`
	Seconds    int    `json:"seconds"` // how long orders are written and faults are injected
	Partitions int    `json:"partitions"`
	Keys       int    `json:"keys"`
	Rate       int    `json:"rate"` // orders per second of all producers together, at most
	Backlog    int64  `json:"backlog"`
	Padding    int    `json:"padding"` // bytes in each payload besides its content
	// Trouble is how many of a million messages fail, panic, hang or kill their process.
	Trouble int `json:"trouble"`
	// Mild trouble only fails: nothing hangs, panics or kills, so that there can be much of it.
	Mild      bool      `json:"mild,omitempty"`
	Producers Producers `json:"producers"`
	Relay     Relay     `json:"relay"`
	Groups    []Group   `json:"groups"`
	Lazy      bool      `json:"lazy"` // the database does not flush commits by default: who needs that has to ask for it
	// SmallRecords: the topic refuses large records, until an operator raises its limit at the end.
	SmallRecords bool `json:"small_records"`
	Service      bool `json:"service"` // HTTP requests with idempotency keys
	Proxies      bool `json:"proxies"`
	// Pooler: all processes reach the database through PgBouncer in transaction mode, with this many
	// connections for each login; 0: they do not.
	Pooler int `json:"pooler,omitempty"`
}

// Producers are the processes that write orders.
type Producers struct {
	Processes int  `json:"processes"`
	Writers   int  `json:"writers"`   // of each
	BatchMax  int  `json:"batch_max"` // orders in a transaction
	Pauses    bool `json:"pauses"`    // inside of transactions, and savepoints that are rolled back
	Buffer    bool `json:"buffer"`    // publish as the last statement
	Later     int  `json:"later"`     // of a thousand messages are for later
	Old       int  `json:"old"`       // of a million messages have an ID that is days old
}

// Relay is the configuration of all relays.
type Relay struct {
	Replicas    int           `json:"replicas"`
	Shards      int16         `json:"shards"`
	ExactlyOnce bool          `json:"exactly_once"`
	PageRows    int           `json:"page_rows"`
	Keep        time.Duration `json:"keep"`
	Notify      bool          `json:"notify"`
}

// Rivals: how the pipeline is usually written by hand, with a claim in the transaction of the effect,
// and without.
const (
	RivalTextbook = "textbook"
	RivalNaive    = "naive"
)

// Foreign reports whether a rival of another program plays, whose outbox this one does not know.
func (s Scene) Foreign() bool {
	return s.Rival != "" && s.Rival != RivalTextbook && s.Rival != RivalNaive
}

// Shapes of handlers.
const (
	ShapeEach   = "each"
	ShapeBatch  = "batch"
	ShapeQueued = "queued"
)

// Group is a consumer group.
type Group struct {
	Number      int16  `json:"number"`
	Members     int    `json:"members"`
	Shape       string `json:"shape"`
	Order       string `json:"order"` // partition, key, none
	Workers     int    `json:"workers"`
	Dedup       string `json:"dedup"` // id, payload, position
	Forever     bool   `json:"forever"`
	Isolation   string `json:"isolation"`
	BatchMax    int    `json:"batch_max"`
	AttemptsMax int    `json:"attempts_max"`
	DeadLetter  bool   `json:"dead_letter"`
	Children    bool   `json:"children"` // publishes children, which a group of their own handles
	Calls       bool   `json:"calls"`    // calls the foreign system
	// Journal: some handlers publish an entry of the group's journal, and only then lock what orders it.
	Journal bool `json:"journal,omitempty"`
	Fences  bool `json:"fences,omitempty"` // some handlers write through dedup.Fence, twice each
	// Window is how long claims are kept; its members differ in it. 0: the default.
	Window time.Duration `json:"window,omitempty"`
	// Parent is the group whose children this one handles; 0: it handles orders.
	Parent int16 `json:"parent"`
}

// Kinds of messages: what a handler does with them, until they are cured.
const (
	KindPlain     = iota
	KindPermanent // fails with a permanent error
	KindTransient // fails at its first attempts
	KindPanic     // panics
	KindHang      // ignores its context for a while
	KindExit      // ends its process
	KindSQL       // a statement of its fails
	KindForever   // fails with a permanent error, also after the cure; an operator discards it
	KindLater     // plain, and published for later
	kinds
)

// Body is the value of a message about an order.
type Body struct {
	Order   int64  `json:"order"`
	Key     int32  `json:"key"`
	Version int64  `json:"version"`
	Amount  int64  `json:"amount"`
	Kind    int    `json:"kind,omitempty"`
	Group   int16  `json:"group,omitempty"` // of a child: its parent's handler
	Padding string `json:"padding,omitempty"`
	// Forged: it has the ID of an order that was handled before, and other content.
	Forged bool `json:"forged,omitempty"`
}

// ChildEvery is how many orders there are for each one that HasChild.
const ChildEvery = 4

// HasChild reports whether the handler of a group that publishes children publishes one for an order.
func HasChild(order int64) bool { return order%ChildEvery == 0 }

// IsCalled reports whether the handler of a group that calls the foreign system calls it for an
// order.
func IsCalled(order int64) bool { return order%64 == 0 }

// IsJournalled reports whether the handler of a group with a journal publishes an entry for an order:
// never for one with a child.
func IsJournalled(order int64) bool { return order%4 == 2 }

// IsFenced reports whether the handler of a group with fences writes through one for an order.
func IsFenced(b Body) bool { return b.Order%8 == 5 && b.Version > 0 }

// ChangesItsMind reports whether a handler of single messages publishes in a savepoint and rolls it
// back, before it publishes.
func ChangesItsMind(order int64) bool { return order%16 == 0 }

// Steps of the IDs that a message's handler derives for what it publishes and calls.
const (
	StepChild  = "child"  // of a handler of batches, which derives IDs itself
	StepCharge = "charge" // of the call
)

// ChildStep is the step in the ID of an order's child or journal entry: the number of those that its
// handler published before.
func (g Group) ChildStep(order int64) string {
	switch {
	case g.Shape == ShapeBatch:
		return StepChild
	case g.Shape == ShapeEach && ChangesItsMind(order):
		return "publish:1"
	}
	return "publish:0"
}

// ForgedPrefix begins what ledgers call a forged message; the order follows whose ID it has.
const ForgedPrefix = "forged-"

// Names that the service and the foreign system use.
const (
	Tenant           = "torture"
	OperationOrders  = "orders"
	OperationCharged = "charged"
	Requests         = "request" // what calls for requests are for
)

// Description is what the rivals' program says about a rival.
type Description struct {
	Name     string `json:"name"`
	Settings string `json:"settings"`
	// RelaysMax is how many relays may run; 0: as many as are drawn.
	RelaysMax int `json:"relays_max,omitempty"`
	// RealKafka: it cannot play on kfake.
	RealKafka bool `json:"real_kafka,omitempty"`
	// Missing is why it cannot play here; empty: it can.
	Missing string `json:"missing,omitempty"`
}
