package consumer

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
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
	// Group is the Kafka consumer group. 1 to 255 bytes.
	Group string
	// Topics to consume. At least one.
	Topics []string
	// Name is the scope of the claims: an ID is processed once for each name. At most 600 bytes.
	// Default: the group and the topic, "billing/orders", for each topic, so that a writer of one
	// topic cannot use up the IDs of another. A name belongs to one group for ever. A group that gets another
	// name resumes at its position; what lies behind it was not handled by the new name, so that a rewind handles
	// it again.
	Name string
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Dedup says what stops a message that comes again. Default DedupByID.
	Dedup Dedup
	// Window is how long claims are kept: a message that is older, by its ID or by its record's
	// timestamp, cannot be proven fresh and is parked as expired. Choose it longer than the retention of
	// the topics. 1 minute to 10 years; default 7 days.
	Window time.Duration
	// Forever keeps claims for ever, in a table of their own; nothing expires. For ledgers. It is decided
	// once for each name. Not together with Window.
	Forever bool
	// IDHeaders are the names of the headers that may carry a message's ID; the first that is there and
	// not empty counts. At most 20 names of 1 to 255 visible ASCII characters without comma. Where such a
	// header is not message-id or ce_id, the same ID with another key or value is parked as a conflict, as
	// with DedupByIDAndPayload. Default: message-id and ce_id, and Debezium's id and Watermill's
	// _watermill_message_uuid where another header of theirs proves the producer; see IDProfiles.
	//
	// A consumer's name keeps the rule that it began with: IDHeaders and IDProfiles count for new names. Run
	// logs it where they differ. "outbox-relay consumer id-rule" switches.
	IDHeaders []string
	// IDProfiles vouch for the producers of the topics: ProfileDebezium, ProfileWatermill. Their headers then
	// count without proof, and payloads are not compared. Not together with IDHeaders.
	IDProfiles []IDProfile
	// IDFunc finds the ID of a message in which no header names it, for example in its body. It must
	// give the same answer for the same message always, and return within HandlerTimeout: a message with which
	// it panics or hangs is parked. Nil, or an empty answer: the message is identified by topic, partition
	// and offset, which stops redeliveries but not a producer's duplicates.
	IDFunc func(msg *Message) []byte
	// Start is where the partitions of a topic begin when the group meets the topic for the first time, if Kafka
	// has no offset for them. It is decided and stored for all partitions of the topic at once. What comes later
	// begins at its start, whatever Start is: partitions that are added, and a topic that is deleted and made
	// anew. With StartLatest a first contact waits until every partition of the topic has a leader. Default
	// StartEarliest.
	Start Start
	// MissingTopic says what Run does where one of Topics does not exist. Default MissingTopicFail.
	MissingTopic MissingTopic
	// BatchMax is how many messages share a transaction at most. 1 to 10,000; default 500.
	BatchMax int
	// Isolation of the transactions. Default pgx.ReadCommitted. The stricter levels report concurrent
	// claims as serialization failures, which are retried.
	Isolation pgx.TxIsoLevel
	// StatementTimeout bounds each statement of a transaction. 10 ms to 1 h; default 30 s.
	StatementTimeout time.Duration
	// LockTimeout bounds each wait for a lock, also the wait for a concurrent claim. 10 ms to 1 h;
	// default 10 s.
	LockTimeout time.Duration
	// IdleTimeout bounds the time between two statements of a transaction, that is also what a handler
	// may take between them. It is what frees the claims of a consumer that froze. 100 ms to 1 h; default 30 s.
	IdleTimeout time.Duration
	// HandlerTimeout bounds what a handler may take for one message (with Batch: for one batch), and with
	// Queued the round trip of a batch. Then its context is cancelled, and the attempt has failed; a handler
	// that does not end for all that loses its connection and is left behind. 1 ms to 1 h; default 30 s.
	HandlerTimeout time.Duration
	// OnFailure says what becomes of a message that cannot be handled. Default OnFailurePark.
	OnFailure OnFailure
	// DeadLetterTopic is where OnFailure OnFailureDeadLetter sends messages, through the outbox.
	DeadLetterTopic string
	// AttemptsMax is how often a message is tried at most, if its failure may pass. Attempts are counted
	// in the database, and begun ones count: a message that kills the process is parked, too. Trouble with
	// the database is no attempt. 1 to 1,000; default 10.
	AttemptsMax int
	// PermanentStates are SQLSTATE codes, or classes of two characters, that no further attempt can cure,
	// besides errors marked by Permanent: "23" stands for all constraint violations. Default: none.
	PermanentStates []string
	// AbandonedMax bounds the handlers that ignored the end of their context and still run, each with a connection of
	// its own: at this number no partition of this consumer begins another attempt until one of them returns.
	// 1 to 1,000; default 16.
	AbandonedMax int
	// ParkShareMax pauses a partition instead of parking when more than this share of its last 100
	// messages failed: an outage of something that the handler needs must not park a whole topic. 0.01
	// to 1, where 1 never pauses; default 0.2.
	ParkShareMax float64
	// Order says which messages wait for each other. Default OrderByPartition.
	Order Order
	// Workers is how many batches of one partition are in work at the same time, each with a connection
	// of its own, where Order is OrderByKey or OrderUnordered. 1 to 64; default 4, with OrderByPartition 1.
	Workers int
	// MessageBytesMax bounds key, value and headers of a message. A larger one is parked by reference, that
	// is without its payload. 1 KiB to 1 GiB; default 32 MiB.
	MessageBytesMax int
	// OutOfRange says what to do where a position is not in the topic any more. Default OutOfRangeHalt. With
	// DedupByPosition a partition whose end was lost halts in any case: without claims nothing would stop what
	// was handled from being handled again. "outbox-relay consumer resume-at" orders where a halted partition
	// resumes.
	OutOfRange OutOfRange
	// RetryMin and RetryMax bound the pauses between attempts; they double, with full jitter.
	// 1 ms to 1 h; defaults 100 ms and 30 s.
	RetryMin, RetryMax time.Duration
	// DrainMax is how long a partition that is taken away, and Run after its context was cancelled,
	// waits for the batch in progress before its handler's context is cancelled. Keep it below Kafka's
	// rebalance timeout (60 s unless changed). 1 ms to 10 min; default 20 s.
	DrainMax time.Duration
	// Logger gets assignments, failures and retries. A problem that lasts is logged once, then every 30 s with how often
	// it came. Default slog.Default().
	Logger *slog.Logger
	// Middleware runs around the handler, the first one outermost: see Around.
	Middleware []Middleware
	// Hooks are called synchronously; they must return quickly. A panic in one is logged.
	Hooks Hooks
}

// Dedup is what stops a message that comes again.
type Dedup uint8

// The levels.
const (
	// DedupByID claims the ID of every message: it stops redeliveries and duplicates of the producer, whatever
	// partition or offset they come with.
	DedupByID Dedup = iota
	// DedupByPosition writes no row for a message: the stored position of the partition stops redeliveries. It
	// does not stop a second copy at another offset. For topics that an exactly-once relay feeds.
	DedupByPosition
	// DedupByIDAndPayload is DedupByID, and tells a true duplicate from another message under the same ID: key and
	// value are compared by their hash, and what differs is parked as a conflict.
	DedupByIDAndPayload
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

// OnFailure is what becomes of a message that cannot be handled.
type OnFailure uint8

// The policies.
const (
	// OnFailurePark stores the message in parked_messages. Later messages of its key go behind it until an
	// operator retries or discards it; everything else flows.
	OnFailurePark OnFailure = iota
	// OnFailureBlock tries on until it succeeds; the partition waits.
	OnFailureBlock
	// OnFailureDeadLetter publishes the message to DeadLetterTopic, through the outbox. Its key does not wait: order per
	// key is given up. What Kafka would not take is parked.
	OnFailureDeadLetter
)

// past says what happened to a message.
func (f OnFailure) past() string {
	if f == OnFailureDeadLetter {
		return "sent to the dead letter topic"
	}
	return "parked"
}

// Order is which messages wait for each other.
type Order uint8

// The orders.
const (
	// OrderByPartition handles the messages of a partition one after the other.
	OrderByPartition Order = iota
	// OrderByKey handles the messages of a key one after the other, and Workers keys at the same time.
	OrderByKey
	// OrderUnordered handles messages as workers become free.
	OrderUnordered
)

// OutOfRange is what to do where a position is not in the topic any more: records were deleted before they
// were consumed, or the end of the topic was lost.
type OutOfRange uint8

// The answers.
const (
	// OutOfRangeHalt leaves the partition alone, and says so until an operator decides.
	OutOfRangeHalt OutOfRange = iota
	// OutOfRangeResumeEarliest resumes at the earliest record that is left, and logs it once.
	OutOfRangeResumeEarliest
)

// MissingTopic is what Run does where a topic does not exist.
type MissingTopic uint8

// The answers.
const (
	// MissingTopicFail makes Run return ErrUnknownTopic.
	MissingTopicFail MissingTopic = iota
	// MissingTopicWait waits for the topic, and names it in the log every minute.
	MissingTopicWait
)

// Start is where a partition begins without a position.
type Start uint8

// The starts. StartLatest is resolved and stored once, so that a restart before the first message skips nothing.
const (
	StartEarliest Start = iota
	StartLatest
)

var (
	topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)
	sqlState  = regexp.MustCompile(`^[0-9A-Z]{2}([0-9A-Z]{3})?$`)
)

// withDefaults fills in what is zero and returns all problems at once.
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
	if len(c.Name) > 600 {
		report("Name has %d bytes: want at most 600", len(c.Name))
	}
	for i, wrap := range c.Middleware {
		if wrap == nil {
			report("Middleware %d is nil", i)
		}
	}
	if c.Start > StartLatest {
		report("Start %d: want StartEarliest or StartLatest", c.Start)
	}
	if c.MissingTopic > MissingTopicWait {
		report("MissingTopic %d: want MissingTopicFail or MissingTopicWait", c.MissingTopic)
	}
	if c.OutOfRange > OutOfRangeResumeEarliest {
		report("OutOfRange %d: want OutOfRangeHalt or OutOfRangeResumeEarliest", c.OutOfRange)
	}
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

func (c *Config) dedup() (problems []error) {
	if c.Dedup > DedupByIDAndPayload {
		problems = append(problems, fmt.Errorf("Dedup %d: want DedupByID, DedupByPosition or DedupByIDAndPayload", c.Dedup))
	}
	if c.Forever && c.Window != 0 {
		problems = append(problems, bounds.Problem("Window", c.Window, "none together with Forever"))
		c.Window = 0
	}
	if !c.Forever {
		problems = append(problems, bounds.Durations(
			bounds.Duration{Field: "Window", Value: &c.Window, Default: dedup.WindowStandard, Min: dedup.WindowMin, Max: dedup.WindowMax})...)
	}
	return problems
}

func (c *Config) order() (problems []error) {
	problems = bounds.Ints(
		bounds.Int{Field: "BatchMax", Value: &c.BatchMax, Default: 500, Min: 1, Max: 10_000},
		bounds.Int{Field: "MessageBytesMax", Value: &c.MessageBytesMax, Default: 32 << 20, Min: 1 << 10, Max: 1 << 30})
	if c.Order > OrderUnordered {
		problems = append(problems, fmt.Errorf("Order %d: want OrderByPartition, OrderByKey or OrderUnordered", c.Order))
	}
	if c.Order == OrderByPartition {
		if c.Workers > 1 {
			problems = append(problems, bounds.Problem("Workers", c.Workers, "1 where Order is ByPartition"))
		}
		c.Workers = 1
		return problems
	}
	if c.Dedup == DedupByPosition {
		problems = append(problems, errors.New("Order: want OrderByPartition where Dedup is DedupByPosition: the position can only stop what is handled in its order"))
	}
	return append(problems, bounds.Ints(bounds.Int{Field: "Workers", Value: &c.Workers, Default: 4, Min: 1, Max: 64})...)
}

func (c *Config) failures() (problems []error) {
	problems = bounds.Ints(
		bounds.Int{Field: "AttemptsMax", Value: &c.AttemptsMax, Default: 10, Min: 1, Max: 1000},
		bounds.Int{Field: "AbandonedMax", Value: &c.AbandonedMax, Default: 16, Min: 1, Max: 1000})
	if c.OnFailure > OnFailureDeadLetter {
		problems = append(problems, fmt.Errorf("OnFailure %d: want OnFailurePark, OnFailureBlock or OnFailureDeadLetter", c.OnFailure))
	}
	switch named := c.DeadLetterTopic != ""; {
	case c.OnFailure != OnFailureDeadLetter && named:
		problems = append(problems, fmt.Errorf("DeadLetterTopic %.260q: want none unless OnFailure is DeadLetter", c.DeadLetterTopic))
	case c.OnFailure == OnFailureDeadLetter && !topicName.MatchString(c.DeadLetterTopic):
		problems = append(problems, fmt.Errorf("DeadLetterTopic %.260q: want 1 to 249 letters, digits, dots, underscores and hyphens", c.DeadLetterTopic))
	case named && slices.Contains(c.Topics, c.DeadLetterTopic):
		problems = append(problems, fmt.Errorf("DeadLetterTopic %q: want none of Topics: the message would come back", c.DeadLetterTopic))
	}
	for _, state := range c.PermanentStates {
		if !sqlState.MatchString(state) {
			problems = append(problems, fmt.Errorf("PermanentStates: %.20q: want a SQLSTATE, such as 23505, or a class, such as 23", state))
		}
	}
	c.ParkShareMax = cmp.Or(c.ParkShareMax, 0.2)
	if !(c.ParkShareMax >= 0.01 && c.ParkShareMax <= 1) { // also refuses what is no number
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
		bounds.Duration{Field: "RetryMin", Value: &c.RetryMin, Default: 100 * time.Millisecond, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "RetryMax", Value: &c.RetryMax, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "DrainMax", Value: &c.DrainMax, Default: 20 * time.Second, Min: time.Millisecond, Max: 10 * time.Minute},
	)
	if c.RetryMin > c.RetryMax {
		problems = append(problems, fmt.Errorf("RetryMin %v: want at most RetryMax, which is %v", c.RetryMin, c.RetryMax))
	}
	return problems
}
