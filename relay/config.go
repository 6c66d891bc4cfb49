package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/migrations"
)

// Config of a Relay. The zero value works.
type Config struct {
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Name of the relay: all replicas that share the work have the same one; another name is another
	// reader of the same outbox, with its own progress. 1 to 255 bytes. Default "default".
	Name string
	// Owner names this replica in the lease, for people. At most 255 bytes. Default: host name,
	// process number and four random bytes.
	Owner string
	// Shards is into how many shards keys are divided when the relay runs for the first time: each is published
	// by one replica at a time. Later the number in the database counts; SetShards changes it. Each shard reads
	// the whole outbox and leaves out what is not its own, so more shards than replicas cost and gain nothing.
	// 1 to 256; default 1: one replica publishes, the others stand by.
	Shards int16
	// ExactlyOnce writes records and progress in one Kafka transaction: readers with isolation.level
	// read_committed see each row once, whatever is killed. Rows become visible with the transaction, every
	// TransactionMax or sooner. Default: at least once.
	ExactlyOnce bool
	// TransactionMax bounds how long a transaction gathers rows of a backlog. 1 ms to 10 s; default 200 ms.
	TransactionMax time.Duration
	// ProgressTopic is where progress is kept with ExactlyOnce: a compacted topic, which is made if it is not
	// there. Relays may share it. Default "effectonce-relay-progress".
	ProgressTopic string
	// SkipDead lets the later rows of a key pass a dead one that is wrong itself (ReasonTooLarge, ReasonRefused,
	// ReasonBadHeaders, ReasonBadPartition): they are published, and the dead row, when it is retried, comes after them. It counts for rows
	// that wait, too, so all replicas should agree. Rows whose topic is missing, paused or not allowed wait in their order all the
	// same. Default: a dead row holds its key.
	SkipDead bool
	// Routes send rows into topics of other names, and drop some. Default: each row goes into the topic that it names.
	Routes Routes
	// Rates bound how many rows of a topic are published in a second, by the topic's name in the outbox: rows above it wait in
	// outbox_dead with ReasonPaused, in their order, and hold up no other topic. Each shard has its part of the rate. It is
	// met over a few seconds, not within each. Above 0 to 1,000,000. Default: no bounds.
	Rates map[string]float64
	// DurableHorizon makes publishing wait until standbys have flushed what is published, so that no event outlives a failover
	// that loses its commit: "any" (one of those that are connected), "a,b" (one of these by application_name), "2 of any",
	// "2 of a,b,c". Only streaming standbys count, no backups and no subscribers of logical replication. While too few are
	// connected nothing is published, and the log says so. The role has to be a member of pg_read_all_stats. Each page costs
	// one more statement and the standby's flush. At most 10,000 bytes; default: publishing waits for no standby.
	DurableHorizon string
	// Sink takes the rows instead of Kafka. Not with ExactlyOnce. Default: Kafka.
	Sink Sink
	// Lease is how long a replica that died keeps the others waiting. 1 s to 10 min; default 10 s. It
	// runs on the database's clock.
	Lease time.Duration
	// PollMin is the pause between two looks at the table while rows arrive, and for 20 ms behind the last one. Elsewhere than on
	// Linux the scheduler may make it longer, up to a millisecond. 100 µs to PollMax; default 700 µs.
	PollMin time.Duration
	// PollMax is the longest pause on an idle outbox; pauses double up to it. Up to 1 min; default 250 ms.
	PollMax time.Duration
	// WakeOnNotify makes the relay look at the outbox when a program calls outbox.Notify, over one connection more of the
	// pool's settings, which must not go through PgBouncer in transaction mode (nothing would be heard). Rows that
	// nobody tells of wait for PollMax at most, as without. Default: only polling.
	WakeOnNotify bool
	// ProgressEvery bounds how often progress is stored, and with it what a crash publishes again.
	// 1 ms to 1 min; default 50 ms.
	ProgressEvery time.Duration
	// PageRowsMax is how many rows one statement reads, and a Sink is handed at once. 1 to 100,000; default 5,000,
	// with a Sink 100.
	PageRowsMax int
	// InFlightBytesMax bounds the keys, payloads and headers in memory: read and not acknowledged.
	// A single larger row is still published. 64 KiB to 4 GiB; default 32 MiB.
	InFlightBytesMax int
	// Keep is how long published rows stay in the outbox at least, for people, for outbox-relay verify and for
	// replays. They leave by TRUNCATE of a quarter of the outbox at a time, once every relay on it has published
	// them: one that never runs again holds them back. Relays by several names on one outbox all do so, so the
	// smallest of their Keeps counts: give all the same. 100 ms to 30 days; default 10 min.
	Keep time.Duration
	// DrainMax is how long Run waits, after its context was cancelled, for records that are with the
	// broker. What is not acknowledged by then is published again by the next replica. Default 10 s.
	DrainMax time.Duration
	// Logger gets start, stop, lease changes, dead rows and trouble. Default: none.
	Logger *slog.Logger
	// Hooks are called synchronously; they must return quickly.
	Hooks Hooks
}

// Hooks are optional callbacks, for metrics.
type Hooks struct {
	// Published is called after Kafka acknowledged rows and progress was stored.
	Published func(rows int64)
	// Delivered is called for rows of one topic, in order, once Kafka acknowledged them (with ExactlyOnce: before the
	// transaction is committed), with the times at which they were inserted. The slice is the hook's only until it returns. Progress is stored later: after a crash the next holder publishes the last rows again.
	Delivered func(topic string, created []time.Time)
	// Interrupted is called when the relay has to start over from its stored progress.
	Interrupted func(err error)
	// Lease is called when this replica takes a shard, and when it gave it up or lost it.
	Lease func(shard int16, held bool)
	// Turn is called at each turn of the relay's loops: also while nothing waits and while the database or the
	// brokers are away, at least every few leases. A relay that makes no turn is stuck; so is one whose Sink goes on
	// though its context ended, and Turn is not called meanwhile.
	Turn func()
	// TruncateWaits is called where published rows cannot be removed because something else holds a lock on their slot of the
	// outbox, with how long that is so, at each attempt; 0: it is not so any more. The replica with shard 0 looks after it.
	TruncateWaits func(slot int16, waiting time.Duration)
	// Dropped is called for a row that a rule of Config.Routes drops, with its topic in the outbox. After a crash it is
	// called again for the last ones.
	Dropped func(topic string)
	// Away is called with the reason when this replica finds that Kafka, or the receiver of its Sink, does not take rows
	// now, and with nil when it does again. Leases are kept meanwhile, unless another replica reaches it.
	Away func(why error)
	// Hung is called when the work on a shard gives no sign of life for longer than a Lease, and when it does again or
	// has ended. The lease of a hung shard is not renewed; the process has to be restarted.
	Hung func(shard int16, hung bool)
	// Dead is called after a row moved to outbox_dead.
	Dead func(topic string, reason Reason)
}

var topicName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)

// withDefaults fills in what is zero and returns all problems at once.
func (c Config) withDefaults() (Config, error) {
	var problems []error
	schema, err := migrations.Options{Schema: c.Schema}.Resolve()
	problems = append(problems, err)
	c.Schema = schema
	c.Name = cmp.Or(c.Name, "default")
	if len(c.Name) > 255 {
		problems = append(problems, fmt.Errorf("%s has %d bytes: want 1 to 255", "Name", len(c.Name)))
	}
	if c.Owner == "" {
		c.Owner = bounds.Owner()
	}
	if len(c.Owner) > 255 {
		problems = append(problems, fmt.Errorf("%s has %d bytes: want 1 to 255", "Owner", len(c.Owner)))
	}
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "Lease", Value: &c.Lease, Default: 10 * time.Second, Min: time.Second, Max: 10 * time.Minute},
		bounds.Duration{Field: "PollMax", Value: &c.PollMax, Default: 250 * time.Millisecond, Min: time.Millisecond, Max: time.Minute},
		bounds.Duration{Field: "PollMin", Value: &c.PollMin, Default: 700 * time.Microsecond, Min: 100 * time.Microsecond, Max: time.Minute},
		bounds.Duration{Field: "ProgressEvery", Value: &c.ProgressEvery, Default: 50 * time.Millisecond, Min: time.Millisecond, Max: time.Minute},
		bounds.Duration{Field: "TransactionMax", Value: &c.TransactionMax, Default: 200 * time.Millisecond, Min: time.Millisecond, Max: 10 * time.Second},
		bounds.Duration{Field: "Keep", Value: &c.Keep, Default: 10 * time.Minute, Min: 100 * time.Millisecond, Max: 30 * 24 * time.Hour},
		bounds.Duration{Field: "DrainMax", Value: &c.DrainMax, Default: 10 * time.Second, Min: time.Millisecond, Max: 10 * time.Minute},
	)...)
	if c.PollMin > c.PollMax {
		problems = append(problems, fmt.Errorf("PollMin %v: want at most PollMax, which is %v", c.PollMin, c.PollMax))
	}
	c.Shards = cmp.Or(c.Shards, 1)
	if c.Shards < 1 || c.Shards > shardsMax {
		problems = append(problems, fmt.Errorf("%s %d: want 1 to %d", "Shards", c.Shards, shardsMax))
	}
	c.ProgressTopic = cmp.Or(c.ProgressTopic, "effectonce-relay-progress")
	if !topicName.MatchString(c.ProgressTopic) {
		problems = append(problems, fmt.Errorf("ProgressTopic %q: want 1 to 249 letters, digits, dots, underscores and hyphens", c.ProgressTopic))
	}
	if _, err := parseHorizon(c.DurableHorizon); err != nil || len(c.DurableHorizon) > 10_000 {
		problems = append(problems, cmp.Or(err, errors.New("DurableHorizon: want at most 10000 bytes")))
	}
	if c.Sink != nil && c.ExactlyOnce {
		problems = append(problems, errors.New("ExactlyOnce with a Sink: its transactions are Kafka's: remove one of the two; receivers deduplicate by ID"))
	}
	rows := 5000
	if c.Sink != nil {
		rows = 100
	}
	c.PageRowsMax = cmp.Or(c.PageRowsMax, rows)
	if c.PageRowsMax < 1 || c.PageRowsMax > 100_000 {
		problems = append(problems, fmt.Errorf("PageRowsMax %d: want 1 to 100000", c.PageRowsMax))
	}
	c.InFlightBytesMax = cmp.Or(c.InFlightBytesMax, 32<<20)
	if c.InFlightBytesMax < 64<<10 || c.InFlightBytesMax > 4<<30 {
		problems = append(problems, fmt.Errorf("InFlightBytesMax %d: want %d to %d", c.InFlightBytesMax, 64<<10, 4<<30))
	}
	problems = append(problems, c.Routes.Validate(), validateRates(c.Rates))
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(problems...)
}

// pause waits or returns false when ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
