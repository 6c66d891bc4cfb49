package consumer

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/migrations"
)

// Config of a Consumer. Group and Topics are required; the zero value of everything else works.
type Config struct {
	// Group is the Kafka consumer group. 1 to 255 bytes. A partition for which it has neither a stored
	// position nor an offset in Kafka begins at its start. To begin elsewhere, set the group's offsets
	// with Kafka's tools before it first runs: see docs/how-to/consume.md.
	Group string
	// Topics to consume. At least one.
	Topics []string
	// Name is the scope of the claims: an ID is processed once for each name. At most 600 bytes.
	// Default: the group and the topic, "billing/orders", for each topic, so that a writer of one
	// topic cannot use up the IDs of another. A name belongs to one group forever. A group that
	// gets another name resumes at its position, once no message waits in parked_messages under the
	// earlier one. The new name has handled nothing before that position, so a rewind handles it again.
	Name string
	// Aliases are the names under which topics count in Name and in the scope of IDs, by the topic's
	// name: {"us-east.orders": "orders"} makes a mirrored topic the same as its source, so that a
	// failover to it repeats nothing that was claimed. Default: none.
	Aliases map[string]string
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Dedup is what stops a message that is redelivered. Default DedupByID.
	Dedup Dedup
	// Window is how long claims are kept: a message that is older, by its ID or by its record's
	// timestamp, cannot be proven fresh and is parked as expired. Choose it longer than the
	// retention of the topics. 1 minute to 10 years; default 7 days.
	Window time.Duration
	// Forever keeps claims forever, in a separate table; nothing expires. For ledgers. It is
	// decided once for each name. Not together with Window.
	Forever bool
	// IDHeaders are the names of the headers that may carry a message's ID; the first one that is
	// present and not empty counts. At most 20 names of 1 to 255 visible ASCII characters without
	// comma. Default: message-id and ce_id, and
	// Debezium's id and Watermill's _watermill_message_uuid where another header of theirs proves
	// the producer; see IDProfiles.
	//
	// A consumer's name keeps the rule that it was first registered with: IDHeaders and IDProfiles
	// count for new names only. Run logs a difference. "outbox-relay consumer id-rule" changes the
	// rule.
	IDHeaders []string
	// IDProfiles vouch for the producers of the topics: ProfileDebezium, ProfileWatermill. Their
	// headers then count without proof. Not together with IDHeaders.
	IDProfiles []IDProfile
	// IDFunc returns the ID of a message that has none in its headers, for example from its body.
	// It must always return the same ID for the same message, and within HandlerTimeout: a message
	// on which it panics or hangs is parked. It is called in each attempt, before the message can be
	// parked: one that ends the process ends it again after each restart, until it is repaired. If
	// IDFunc is nil or returns nothing, topic, partition and offset identify the message. That stops
	// redeliveries but not a producer's duplicates.
	IDFunc func(msg *Message) []byte
	// BatchMax is how many messages share a transaction at most. 1 to 10,000; default 500.
	BatchMax int
	// BatchTimeMax is how long a transaction should take: the number of its messages adapts, from 16
	// up to BatchMax. So much work is repeated after a stop that cannot wait. 10 ms to 10 min;
	// default 2 s.
	BatchTimeMax time.Duration
	// Isolation of the transactions. Default pgx.ReadCommitted. The stricter levels report
	// concurrent claims as serialization failures, which are retried. They need OrderByPartition.
	Isolation pgx.TxIsoLevel
	// StatementTimeout bounds each statement of a transaction. 10 ms to 1 h; default 30 s.
	StatementTimeout time.Duration
	// LockTimeout bounds each wait for a lock, also the wait for a concurrent claim. 10 ms to 1 h;
	// default 10 s.
	LockTimeout time.Duration
	// IdleTimeout bounds the time between two statements of a transaction, which includes the
	// handler's own work between them. It releases the claims of a consumer that froze. 100 ms to 1
	// h; default 30 s.
	IdleTimeout time.Duration
	// HandlerTimeout bounds what a handler may take for one message (with Batch: for one batch),
	// and with Queued the round trip of a batch. After that its context is cancelled and the
	// attempt has failed. A handler that still does not return loses its connection and is
	// abandoned. 1 ms to 1 h; default 30 s.
	HandlerTimeout time.Duration
	// OnFailure is what happens to a message that cannot be handled. Default OnFailurePark.
	OnFailure OnFailure
	// OnConflict is what happens to a message whose ID another message has: the fingerprints of key
	// and value differ. Default OnConflictPark.
	OnConflict OnConflict
	// OnTombstone is what happens to a message without a value (Kafka's null). Default
	// OnTombstoneHandle.
	OnTombstone OnTombstone
	// DeadLetterTopic is where OnFailure OnFailureDeadLetter sends messages, through the outbox.
	DeadLetterTopic string
	// AttemptsMax is the maximum number of attempts for a message whose failure may be temporary. It
	// is tried again in place for up to a second, and then from parked_messages, after pauses: only
	// messages of its key wait for it. There an attempt is counted before it begins, so a message
	// that kills the process is found, too. A failure of the database is not an attempt, and neither
	// are the first ten deadlocks or serialization failures in a row. 1 to 1,000; default 10.
	AttemptsMax int
	// AbandonedMax bounds the handlers that ignored the end of their context and still run. Each
	// holds a connection. At this number no partition of this consumer begins another attempt until
	// one of them returns. 1 to 1,000; default 16.
	AbandonedMax int
	// ParkShareMax pauses a partition instead of parking when more than this share of its last 100
	// messages failed. An outage of a service that the handler needs must not park a whole topic.
	// 0.01 to 1, where 1 never pauses; default 0.2.
	ParkShareMax float64
	// Order is which messages wait for each other. Default OrderByPartition.
	Order Order
	// Workers is how many batches of one partition run at the same time if Order is OrderByKey or
	// OrderUnordered. Each uses one connection. 1 to 64; default 4, with OrderByPartition 1.
	Workers int
	// MessageBytesMax bounds key, value and headers of a message. A larger one is parked by
	// reference, without its payload. 1 KiB to 1 GiB; default 32 MiB. A compressed batch may
	// inflate to twice this size, or to 64 MiB if that is more, unless kgo.MaxDecompressBatchBytes
	// is passed to New. A batch beyond that halts its partition.
	MessageBytesMax int
	// RetryMin and RetryMax bound the pauses between attempts. A pause is RetryMin/2 plus a random
	// part below a limit, which doubles from RetryMin to RetryMax. 1 ms to 1 h; defaults 100 ms and
	// 30 s. For what no message made fail they count as at most 1 s and 30 s.
	RetryMin, RetryMax time.Duration
	// DrainMax is how long a revoked partition, or Run after its context was cancelled, waits for
	// the batch in progress before the handler's context is cancelled. Keep it below Kafka's
	// rebalance timeout (60 s unless changed). 1 ms to 10 min; default 20 s.
	DrainMax time.Duration
	// Logger receives assignments, failures and retries. A lasting problem is logged once, then
	// every 30 s with a count. Default slog.Default().
	Logger *slog.Logger
	// Middleware runs around the handler, the first one outermost: see Around.
	Middleware []Middleware
	// Hooks are called synchronously; they must return quickly. A panic in one is logged.
	Hooks Hooks
}

// Dedup is what stops a message that is redelivered.
type Dedup uint8

// The levels.
const (
	// DedupByID claims the ID of every message, with a fingerprint of its key and value: it stops
	// redeliveries and the producer's duplicates, at any partition and offset, and finds other
	// messages under the same ID (OnConflict).
	DedupByID Dedup = iota
	// DedupByPosition writes no row per message: the stored position of the partition stops
	// redeliveries. It does not stop a second copy at another offset. Use it for topics that an
	// exactly-once relay feeds.
	DedupByPosition
)

// IDProfile vouches for the producer of the topics.
type IDProfile = dedup.IDProfile

// The profiles.
const (
	// ProfileDebezium: the header id is written by Debezium's outbox event router.
	ProfileDebezium = dedup.ProfileDebezium
	// ProfileWatermill: the header _watermill_message_uuid is written by a publisher of Watermill.
	ProfileWatermill = dedup.ProfileWatermill
)

// OnFailure is what happens to a message that cannot be handled.
type OnFailure uint8

// The policies.
const (
	// OnFailurePark stores the message in parked_messages after its last attempt. Later messages of
	// its key are parked behind it until an operator retries or discards it. All other messages
	// continue.
	OnFailurePark OnFailure = iota
	// OnFailureBlock retries in place until the message succeeds. The partition waits; with
	// OrderByKey and OrderUnordered only its key, or the message alone, until 10 * BatchMax
	// messages or 8 MiB wait, or 200,000 later messages are done.
	OnFailureBlock
	// OnFailureDeadLetter publishes the message to DeadLetterTopic after its last attempt, through
	// the outbox. Then its key continues, so order per key is lost. A message that Kafka would not
	// accept is parked.
	OnFailureDeadLetter
)

// OnConflict is what happens to a message whose ID another message has.
type OnConflict uint8

// The policies.
const (
	// OnConflictPark stores the message in parked_messages, or makes it a dead letter, as OnFailure
	// says. It is claimed under its coordinates: a redelivery is a duplicate, and what it publishes
	// or calls has IDs of its own.
	OnConflictPark OnConflict = iota
	// OnConflictDrop drops the message, counts it (Processed.Conflicts) and logs it. Use it only
	// where a producer is known to use IDs twice for what must have one effect.
	OnConflictDrop
)

// OnTombstone is what happens to a message without a value. A tombstone is legal in a compacted topic,
// so one that a decoder rejects never counts for ParkShareMax.
type OnTombstone uint8

// The policies.
const (
	// OnTombstoneHandle gives it to the handler. One that its decoder rejects is parked as undecodable.
	OnTombstoneHandle OnTombstone = iota
	// OnTombstoneSkip treats it as handled, without any effect.
	OnTombstoneSkip
)

// Order is which messages wait for each other.
type Order uint8

// The orders.
const (
	// OrderByPartition handles the messages of a partition one after the other.
	OrderByPartition Order = iota
	// OrderByKey handles the messages of a key one after the other, and Workers keys at the same
	// time.
	OrderByKey
	// OrderUnordered handles messages as workers become free.
	OrderUnordered
)

var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

// alias is the name under which a topic counts.
func (c *Config) alias(topic string) string { return cmp.Or(c.Aliases[topic], topic) }

// withDefaults fills in zero fields and returns all problems at once.
func (c Config) withDefaults() (Config, error) {
	var problems []error
	report := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	schema, err := migrations.Options{Schema: c.Schema}.Resolve()
	problems = append(problems, err)
	c.Schema = schema
	if len(c.Group) < 1 || len(c.Group) > 255 {
		report("Group %.300q: want 1 to 255 bytes", c.Group)
	}
	if len(c.Topics) == 0 {
		report("Topics is empty: want at least one")
	}
	for _, topic := range c.Topics {
		if !topicName.MatchString(topic) {
			report("Topics: %.260q: want 1 to 249 letters, digits, dots, underscores and hyphens", topic)
		}
	}
	for _, topic := range slices.Sorted(maps.Keys(c.Aliases)) {
		if alias := c.Aliases[topic]; !slices.Contains(c.Topics, topic) || !topicName.MatchString(alias) {
			report("Aliases: %.260q: %.260q: want one of Topics and the name of a topic", topic, alias)
		}
	}
	if len(c.Name) > 600 {
		report("Name has %d bytes: want at most 600", len(c.Name))
	}
	for i, wrap := range c.Middleware {
		if wrap == nil {
			report("Middleware %d is nil", i)
		}
	}
	problems = append(problems, c.enums()...)
	if _, err := c.idRule(); err != nil {
		problems = append(problems, err)
	}
	c.Isolation = cmp.Or(c.Isolation, pgx.ReadCommitted)
	switch c.Isolation {
	case pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		report("Isolation %q: want read committed, repeatable read or serializable", c.Isolation)
	}
	problems = append(problems, c.dedup()...)
	problems = append(problems, c.order()...)
	problems = append(problems, c.failures()...)
	problems = append(problems, c.durations()...)
	if c.Logger == nil {
		c.Logger = slog.Default() //nolint:forbidigo // the documented default
	}
	return c, errors.Join(problems...)
}

func (c *Config) enums() (problems []error) {
	for _, enum := range []struct {
		field       string
		value, last uint8
		want        string
	}{
		{"Dedup", uint8(c.Dedup), uint8(DedupByPosition), "DedupByID or DedupByPosition"},
		{"OnTombstone", uint8(c.OnTombstone), uint8(OnTombstoneSkip), "OnTombstoneHandle or OnTombstoneSkip"},
		{"OnConflict", uint8(c.OnConflict), uint8(OnConflictDrop), "OnConflictPark or OnConflictDrop"},
		{"Order", uint8(c.Order), uint8(OrderUnordered), "OrderByPartition, OrderByKey or OrderUnordered"},
		{"OnFailure", uint8(c.OnFailure), uint8(OnFailureDeadLetter), "OnFailurePark, OnFailureBlock or OnFailureDeadLetter"},
	} {
		if enum.value > enum.last {
			problems = append(problems, fmt.Errorf("%s %d: want %s", enum.field, enum.value, enum.want))
		}
	}
	return problems
}

func (c *Config) dedup() []error {
	switch {
	case !c.Forever:
		return bounds.Durations(bounds.Duration{Field: "Window", Value: &c.Window, Default: dedup.WindowStandard, Min: dedup.WindowMin, Max: dedup.WindowMax})
	case c.Window != 0:
		return []error{bounds.Problem("Window", c.Window, "none together with Forever")}
	}
	return nil
}

func (c *Config) order() (problems []error) {
	problems = bounds.Ints(
		bounds.Int{Field: "BatchMax", Value: &c.BatchMax, Default: 500, Min: 1, Max: 10_000},
		bounds.Int{Field: "MessageBytesMax", Value: &c.MessageBytesMax, Default: 32 << 20, Min: 1 << 10, Max: 1 << 30})
	if c.Order == OrderByPartition {
		if c.Workers > 1 {
			problems = append(problems, bounds.Problem("Workers", c.Workers, "1 where Order is ByPartition"))
		}
		c.Workers = 1
		return problems
	}
	if c.Isolation != pgx.ReadCommitted {
		problems = append(problems, bounds.Problem("Isolation", c.Isolation, "read committed where Order is not OrderByPartition: lanes would not see each other's positions"))
	}
	if c.Dedup == DedupByPosition {
		problems = append(problems, errors.New("Order: want OrderByPartition where Dedup is DedupByPosition: the position can only stop messages that are handled in its order"))
	}
	return append(problems, bounds.Ints(bounds.Int{Field: "Workers", Value: &c.Workers, Default: 4, Min: 1, Max: 64})...)
}

func (c *Config) failures() (problems []error) {
	problems = bounds.Ints(
		bounds.Int{Field: "AttemptsMax", Value: &c.AttemptsMax, Default: 10, Min: 1, Max: 1000},
		bounds.Int{Field: "AbandonedMax", Value: &c.AbandonedMax, Default: 16, Min: 1, Max: 1000})
	switch named := c.DeadLetterTopic != ""; {
	case c.OnFailure != OnFailureDeadLetter && named:
		problems = append(problems, fmt.Errorf("DeadLetterTopic %.260q: want none unless OnFailure is DeadLetter", c.DeadLetterTopic))
	case c.OnFailure == OnFailureDeadLetter && !topicName.MatchString(c.DeadLetterTopic):
		problems = append(problems, fmt.Errorf("DeadLetterTopic %.260q: want 1 to 249 letters, digits, dots, underscores and hyphens", c.DeadLetterTopic))
	case named && slices.Contains(c.Topics, c.DeadLetterTopic):
		problems = append(problems, fmt.Errorf("DeadLetterTopic %q: want none of Topics: the message would come back", c.DeadLetterTopic))
	}
	c.ParkShareMax = cmp.Or(c.ParkShareMax, 0.2)
	if !(c.ParkShareMax >= 0.01 && c.ParkShareMax <= 1) { // also refuses NaN
		problems = append(problems, fmt.Errorf("ParkShareMax %v: want 0.01 to 1", c.ParkShareMax))
	}
	return problems
}

func (c *Config) durations() (problems []error) {
	problems = bounds.Durations(
		bounds.Duration{Field: "StatementTimeout", Value: &c.StatementTimeout, Default: 30 * time.Second, Min: 10 * time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "LockTimeout", Value: &c.LockTimeout, Default: 10 * time.Second, Min: 10 * time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "IdleTimeout", Value: &c.IdleTimeout, Default: 30 * time.Second, Min: 100 * time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "HandlerTimeout", Value: &c.HandlerTimeout, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "BatchTimeMax", Value: &c.BatchTimeMax, Default: 2 * time.Second, Min: 10 * time.Millisecond, Max: 10 * time.Minute},
		bounds.Duration{Field: "RetryMin", Value: &c.RetryMin, Default: 100 * time.Millisecond, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "RetryMax", Value: &c.RetryMax, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "DrainMax", Value: &c.DrainMax, Default: 20 * time.Second, Min: time.Millisecond, Max: 10 * time.Minute},
	)
	if c.RetryMin > c.RetryMax {
		problems = append(problems, fmt.Errorf("RetryMin %v: want at most RetryMax, which is %v", c.RetryMin, c.RetryMax))
	}
	return problems
}
