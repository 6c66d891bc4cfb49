package consumer

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/nodedup"
	"github.com/effectonce/effectonce/migrations"
)

// Config of a Consumer. Group and Topics are required; the zero value of everything else works.
type Config struct {
	// Group is the Kafka consumer group. 1 to 255 bytes.
	Group string
	// Topics to consume. At least one.
	Topics []string
	// Name is the scope of the claims: an ID is processed once for each name. At most 600 bytes.
	// Default: the group and the topic, "billing/orders", for each topic, so that whoever writes to one
	// topic cannot use up the IDs of another. A name belongs to one group for ever.
	Name string
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Dedup says what stops a message that comes again. Default ByID.
	Dedup Dedup
	// IDHeaders are the names of the headers that may carry a message's ID; the first that is there and
	// not empty counts. Default: message-id, ce_id, id, _watermill_message_uuid, idempotency-key.
	IDHeaders []string
	// IDFunc finds the ID of a message that has none of IDHeaders, for example in its body. It must
	// give the same answer for the same message always. Nil, or an empty answer: the message is
	// identified by topic, partition and offset, which stops redeliveries but not a producer's duplicates.
	IDFunc func(msg *Message) []byte
	// Start is where a partition begins for which neither the database nor Kafka knows a position.
	// Default Earliest.
	Start Start
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
	// RetryMin and RetryMax bound the pauses between attempts; they double, with full jitter.
	// 1 ms to 1 h; defaults 100 ms and 30 s.
	RetryMin, RetryMax time.Duration
	// DrainMax is how long a partition that is taken away, and Run after its context was cancelled,
	// waits for the batch in progress before its handler's context is cancelled. Keep it below Kafka's
	// rebalance timeout (60 s unless changed). 1 ms to 10 min; default 20 s.
	DrainMax time.Duration
	// Logger gets assignments, failures and retries. Default: none.
	Logger *slog.Logger
	// Hooks are called synchronously; they must return quickly.
	Hooks Hooks
}

// Hooks are optional callbacks, for metrics.
type Hooks struct {
	// Processed is called after a commit.
	Processed func(topic string, fresh, duplicates int)
	// Failed is called after each failed attempt at a single message.
	Failed func(msg *Message, attempt int, err error)
	// WithoutID is called for each message that is identified by its coordinates alone.
	WithoutID func(msg *Message)
}

// Dedup is what stops a message that comes again.
type Dedup uint8

// ByID claims the ID of every message: it stops redeliveries and duplicates of the producer, whatever
// partition or offset they come with.
const ByID Dedup = 0

// Start is where a partition begins without a position.
type Start uint8

// The starts. Latest is resolved and stored once, so that a restart before the first message skips nothing.
const (
	Earliest Start = iota
	Latest
)

var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

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
	if c.Dedup != ByID && c.Dedup != nodedup.Level {
		report("Dedup %d: want ByID", c.Dedup)
	}
	if c.Start > Latest {
		report("Start %d: want Earliest or Latest", c.Start)
	}
	if c.IDHeaders == nil {
		c.IDHeaders = []string{"message-id", "ce_id", "id", "_watermill_message_uuid", "idempotency-key"}
	}
	c.BatchMax = cmp.Or(c.BatchMax, 500)
	if c.BatchMax < 1 || c.BatchMax > 10_000 {
		report("BatchMax %d: want 1 to 10000", c.BatchMax)
	}
	c.Isolation = cmp.Or(c.Isolation, pgx.ReadCommitted)
	switch c.Isolation {
	case pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		report("Isolation %q: want read committed, repeatable read or serializable", c.Isolation)
	}
	problems = append(problems, c.durations()...)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(problems...)
}

func (c *Config) durations() (problems []error) {
	problems = bounds.Durations(
		bounds.Duration{Field: "StatementTimeout", Value: &c.StatementTimeout, Default: 30 * time.Second, Min: 10 * time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "LockTimeout", Value: &c.LockTimeout, Default: 10 * time.Second, Min: 10 * time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "IdleTimeout", Value: &c.IdleTimeout, Default: 30 * time.Second, Min: 100 * time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "RetryMin", Value: &c.RetryMin, Default: 100 * time.Millisecond, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "RetryMax", Value: &c.RetryMax, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "DrainMax", Value: &c.DrainMax, Default: 20 * time.Second, Min: time.Millisecond, Max: 10 * time.Minute},
	)
	if c.RetryMin > c.RetryMax {
		problems = append(problems, fmt.Errorf("RetryMin %v: want at most RetryMax, which is %v", c.RetryMin, c.RetryMax))
	}
	return problems
}
