package relay

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/migrations"
)

// Config of a Relay. The zero value works.
type Config struct {
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Name of the relay. All replicas that share the work have the same name. Another name is
	// another reader of the same outbox, with its own progress. 1 to 255 bytes. Default "default".
	Name string
	// Owner names this replica in the lease, for operators. At most 255 bytes. Default: host name,
	// process number and four random bytes.
	Owner string
	// Shards is the number of shards that keys are divided into when the relay runs for the first
	// time. One replica at a time publishes a shard. Later, the number in the database counts, which
	// SetShards changes while no replica runs. Each shard reads the whole outbox and skips the rows
	// of other shards, so more shards than replicas cost and gain nothing. 1 to 256; default 1: one
	// replica publishes, the others stand by.
	Shards int16
	// ExactlyOnce writes records and progress in one Kafka transaction. Readers with
	// isolation.level read_committed see each row once, whatever is killed. Rows become visible
	// with the transaction. Default: at least once.
	ExactlyOnce bool
	// TransactionMax bounds how long a transaction collects rows of a backlog; other rows are committed
	// after half of it. Less means a shorter wait of readers, and more progress records. 1 ms to 10 s;
	// default 200 ms.
	TransactionMax time.Duration
	// ProgressTopic is the compacted topic that holds progress with ExactlyOnce. The relay creates
	// it if it does not exist. Relays may share it. Default "effectonce-relay-progress".
	ProgressTopic string
	// SkipDead lets later rows of a key pass a dead row that is itself wrong (ReasonTooLarge,
	// ReasonRefused, ReasonBadHeaders, ReasonBadPartition). The later rows are published; the dead
	// row, when it is retried, comes after them. All replicas must agree: rows that wait behind one
	// already, and later rows of their keys, follow when it is retried or discarded. Rows whose topic
	// is missing, paused or not allowed still wait in their order. Default: a dead row holds its key.
	SkipDead bool
	// TopicPrefix goes before the name of each topic in Kafka. At most 200 letters, digits, dots,
	// underscores and hyphens. Default: none.
	TopicPrefix string
	// Topic chooses the topic in Kafka of a row (or, with a Sink, the topic of its Message), without
	// the prefix; ok false: the row is not published and counts as published. The row's Headers are
	// those of its column, and its values are valid only until Topic returns. Topic may run several
	// times for a row, and at the same time for several shards; the same row must give the same
	// topic in all replicas. After a crash the last rows are published again as Topic decides then.
	// A panic ends Run with an error that names the row, and the row is published once that is
	// fixed. Operators, metrics and hooks use the row's own topic, and the order of a key is kept
	// among rows of one topic in the outbox. Default: the topic that the row names.
	Topic func(row Message) (topic string, ok bool)
	// Compression of records: "none", "gzip", "snappy", "lz4" or "zstd". Where the brokers refuse it,
	// the relay sends uncompressed and logs that. Default: that of the kafka options, and of the
	// client without any: snappy.
	Compression string
	// Sink takes the rows instead of Kafka. It cannot be combined with ExactlyOnce. Default: Kafka.
	Sink Sink
	// Lease is how long the other replicas wait before they take over from a replica that died. 1 s
	// to 10 min; default 10 s. The database's clock measures it.
	Lease time.Duration
	// PollMin is the pause between two polls of the table while rows arrive, and for 20 ms after
	// the last row. On systems other than Linux the scheduler may lengthen it, up to a millisecond.
	// 100 µs to 1 min, and at most PollMax; default 700 µs.
	PollMin time.Duration
	// PollMax is the longest pause on an idle outbox; pauses double up to it. 1 ms to 1 min;
	// default 250 ms.
	PollMax time.Duration
	// ProgressEvery bounds how often progress is stored, and so how much is published again after a
	// crash. 1 ms to 1 min; default 50 ms.
	ProgressEvery time.Duration
	// PageRowsMax is how many rows one statement reads, and how many a Sink gets at once. 1 to
	// 100,000; default 5,000, with a Sink 100.
	PageRowsMax int
	// RecordBytesMax is the largest record that the relay writes, in bytes: key, payload, headers and what
	// Kafka adds, as in outbox.Config. A larger row is dead. It is also the size of a batch, as in
	// max.message.bytes of topics and max.request.size of other producers; where a topic takes less,
	// batches become smaller. 1 KiB to 90,000,000; default 1,048,588, Kafka's own. With a Sink it has no
	// effect.
	RecordBytesMax int
	// InFlightBytesMax bounds the bytes of keys, payloads and headers in memory: rows that are read
	// and not yet acknowledged. A single larger row is still published. 64 KiB to 4 GiB; default 32
	// MiB.
	InFlightBytesMax int
	// Keep is the minimum time that published rows stay in the outbox, for operators, for
	// outbox-relay verify and for replays. Rows are removed by TRUNCATE of a quarter of the outbox
	// at a time, once every relay on it has published them. A relay that never runs again holds
	// them back. All relays on one outbox remove rows, so the smallest Keep counts: give all relays
	// the same. 100 ms to 30 days; default 10 min.
	Keep time.Duration
	// DrainMax is how long Run waits, after its context was cancelled, for records that the brokers
	// have not acknowledged yet. The next replica publishes again what is still not acknowledged.
	// 1 ms to 10 min; default 10 s.
	DrainMax time.Duration
	// Logger gets start, stop, lease changes, dead rows and problems. Default: none.
	Logger *slog.Logger
	// Hooks are called synchronously; they must return quickly.
	Hooks Hooks
}

// Hooks are optional callbacks, for metrics.
type Hooks struct {
	// Published is called after Kafka acknowledged rows and progress was stored.
	Published func(rows int64)
	// Delivered is called with rows of one topic, in order, once Kafka acknowledged them (with
	// ExactlyOnce: before the transaction is committed). created are the times at which the rows
	// were inserted. The slice is valid only until the hook returns. Progress is stored later:
	// after a crash the next holder publishes the last rows again.
	Delivered func(topic string, created []time.Time)
	// Interrupted is called when the relay must start over from its stored progress.
	Interrupted func(err error)
	// Lease is called when this replica takes a shard, and when it releases or loses it.
	Lease func(shard int16, held bool)
	// Heartbeat is called at each turn of the relay's loops, at least every few leases. It is also
	// called while no rows wait, and while the database or the brokers are unavailable. A relay
	// that makes no turn is stuck, and so is one with a shard that hangs: see Hung.
	Heartbeat func()
	// TruncateWaits is called when published rows cannot be removed because a lock is held on their
	// slot of the outbox. It is called at each attempt with how long that has lasted; 0 means that
	// the wait is over. Only the replica with shard 0 calls it.
	TruncateWaits func(slot int16, waiting time.Duration)
	// Away is called with the reason when this replica finds that Kafka, or the receiver of its
	// Sink, does not take rows, and with nil when it takes rows again.
	Away func(why error)
	// Hung is called when the worker of a shard gives no sign of life for longer than a Lease, and
	// when it gives one again or has ended. The lease of a hung shard is not renewed. Restart the
	// process.
	Hung func(shard int16, hung bool)
	// Dead is called after a row moved to outbox_dead.
	Dead func(topic string, reason Reason)
}

var (
	topicName   = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,249}$`)
	topicPrefix = regexp.MustCompile(`^[a-zA-Z0-9._-]{0,200}$`)
)

//nolint:gochecknoglobals // a table
var codecs = map[string]kgo.CompressionCodec{
	"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

// withDefaults fills in zero values and returns all problems at once.
func (c Config) withDefaults() (Config, error) {
	var problems []error
	schema, err := migrations.Options{Schema: c.Schema}.Resolve()
	problems = append(problems, err)
	c.Schema = schema
	c.Name = cmp.Or(c.Name, "default")
	if len(c.Name) > 255 {
		problems = append(problems, fmt.Errorf("%s has %d bytes: want 1 to 255", "Name", len(c.Name)))
	}
	c.Owner = cmp.Or(c.Owner, bounds.Owner())
	if len(c.Owner) > 255 {
		problems = append(problems, fmt.Errorf("%s has %d bytes: want 1 to 255", "Owner", len(c.Owner)))
	}
	problems = append(problems, bounds.Durations(
		bounds.Lease.Of("Lease", &c.Lease),
		bounds.PollMax.Of("PollMax", &c.PollMax),
		bounds.PollMin.Of("PollMin", &c.PollMin),
		bounds.Duration{Field: "ProgressEvery", Value: &c.ProgressEvery, Default: 50 * time.Millisecond, Min: time.Millisecond, Max: time.Minute},
		bounds.TransactionMax.Of("TransactionMax", &c.TransactionMax),
		bounds.Keep.Of("Keep", &c.Keep),
		bounds.DrainMax.Of("DrainMax", &c.DrainMax),
	)...)
	if c.PollMin > c.PollMax {
		problems = append(problems, fmt.Errorf("PollMin %v: want at most PollMax, which is %v", c.PollMin, c.PollMax))
	}
	count := func(field string, value *int, otherwise, least, most int) {
		if *value = cmp.Or(*value, otherwise); *value < least || *value > most {
			problems = append(problems, fmt.Errorf("%s %d: want %d to %d", field, *value, least, most))
		}
	}
	rows := 5000
	if c.Sink != nil {
		rows = 100
	}
	count("PageRowsMax", &c.PageRowsMax, rows, 1, 100_000)
	count("InFlightBytesMax", &c.InFlightBytesMax, 32<<20, 64<<10, 4<<30)
	count("RecordBytesMax", &c.RecordBytesMax, record.BytesDefault, 1024, record.BytesMax)
	shards := int(c.Shards)
	count("Shards", &shards, 1, 1, shardsMax)
	c.Shards = int16(shards)
	c.ProgressTopic = cmp.Or(c.ProgressTopic, "effectonce-relay-progress")
	if !topicName.MatchString(c.ProgressTopic) {
		problems = append(problems, fmt.Errorf("ProgressTopic %q: want 1 to 249 letters, digits, dots, underscores and hyphens", c.ProgressTopic))
	}
	if _, ok := codecs[c.Compression]; !ok && c.Compression != "" {
		problems = append(problems, bounds.Problem("Compression", c.Compression, "none, gzip, snappy, lz4 or zstd"))
	}
	if c.Sink != nil && c.ExactlyOnce {
		problems = append(problems, errors.New("ExactlyOnce with a Sink: its transactions are Kafka's: remove one of the two; receivers deduplicate by ID"))
	}
	if !topicPrefix.MatchString(c.TopicPrefix) {
		problems = append(problems, fmt.Errorf("TopicPrefix %.260q: want at most 200 letters, digits, dots, underscores and hyphens", c.TopicPrefix))
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(problems...)
}
