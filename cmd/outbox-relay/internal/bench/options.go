package bench

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Bounds and defaults of ConsumeOptions and RelayOptions.
const (
	MessagesMin     = 2000 // runs, and says that its figures mean nothing
	MessagesDefault = 100_000
	MessagesMax     = 5_000_000

	RowsMin     = 2000
	RowsDefault = 500_000
	RowsMax     = 5_000_000

	// Below these, or with one round, the start and the end of a run are a good part of it: ratios
	// are random.
	messagesTelling = 50_000
	rowsTelling     = 100_000

	LargeRowsMax = 100_000_000

	BacklogRowsMin   = 2000
	BacklogRowsMax   = 100_000_000
	ShardRowsMin     = 2000
	ShardRowsDefault = 3_000_000
	ShardRowsMax     = 100_000_000

	IdleSecondsMin     = 1
	IdleSecondsDefault = 15
	IdleSecondsMax     = 600

	RoundsMin     = 1
	RoundsDefault = 3
	RoundsMax     = 25

	LatencySecondsMin     = 1
	LatencySecondsDefault = 10
	LatencySecondsMax     = 600

	PartitionsMin            = 1
	ConsumePartitionsDefault = 4
	RelayPartitionsDefault   = 6
	PartitionsMax            = 100
)

const (
	latencyPerSecond  = 500
	payloadBytes      = 256 // of an outbox row
	consumeValueBytes = 100 // of a message
	keysDistinct      = 1000
)

// Servers are the servers that a benchmark uses. Both are required.
type Servers struct {
	// DatabaseURL is the URL of the PostgreSQL database. The benchmark creates its own schema there
	// and drops it.
	DatabaseURL string
	// Brokers are the seed brokers of the Kafka cluster. The benchmark creates its own topics and
	// deletes them.
	Brokers []string
}

func (s Servers) check() error {
	if s.DatabaseURL == "" || len(s.Brokers) == 0 {
		return errors.New("bench: DatabaseURL and Brokers are required")
	}
	return nil
}

// ConsumeOptions are the options of Consume. All fields but Servers may be zero.
type ConsumeOptions struct {
	Servers

	// Messages that the fastest variants handle in a round; slower ones handle a fraction of them.
	// 2,000 to 5,000,000; default 100,000.
	Messages int
	// Partitions of the topics. 1 to 100; default 1, since the textbook loop is a single one.
	Partitions int
	// Rounds in which the variants take turns. 1 to 25; default 3.
	Rounds int
	// Progress gets one line at a time. Default: none.
	Progress func(line string)
}

func (o ConsumeOptions) withDefaults() (ConsumeOptions, error) {
	o.Messages = cmp.Or(o.Messages, MessagesDefault)
	o.Partitions = cmp.Or(o.Partitions, ConsumePartitionsDefault)
	o.Rounds = cmp.Or(o.Rounds, RoundsDefault)
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	return o, errors.Join(
		o.check(),
		inBounds("messages", o.Messages, MessagesMin, MessagesMax),
		inBounds("partitions", o.Partitions, PartitionsMin, PartitionsMax),
		inBounds("rounds", o.Rounds, RoundsMin, RoundsMax),
	)
}

// RelayOptions are the options of Relay. All fields but Servers may be zero.
type RelayOptions struct {
	Servers

	// Rows of the backlog that each variant drains. 2,000 to 5,000,000; default 500,000.
	Rows int
	// LargeRows is a backlog that only the relay drains, once, for comparison. 0 to 100,000,000;
	// default 0: it is not measured.
	LargeRows int
	// IdleSeconds is how long an idle relay is measured. 1 to 600; default 15.
	IdleSeconds int
	// Command starts a process that calls RelayProcess, in which a relay runs alone. Default: none;
	// then figures that need such a process (CPU, memory, a large backlog) are left out.
	Command []string
	// Partitions of the topic. 1 to 100; default 6.
	Partitions int
	// Rounds in which the variants take turns. 1 to 25; default 3.
	Rounds int
	// LatencySeconds is how long messages are published at a steady rate for the latencies. 1 to
	// 600; default 10.
	LatencySeconds int
	// Scenarios are the scenarios to measure; they run in their own order. Default: those that
	// Scenarios returns as standard. Without Command, those that need a separate process are left
	// out.
	Scenarios []string
	// BacklogRows are the sizes that ScenarioBacklog drains. 2,000 to 100,000,000 each; default
	// 1,000,000 and 10,000,000.
	BacklogRows []int
	// ShardRows is the backlog that ScenarioShards drains. 2,000 to 100,000,000; default 3,000,000.
	ShardRows     int
	shardPageRows int // for tests, which have few rows
	// Progress gets one line at a time. Default: none.
	Progress func(line string)
}

func (o RelayOptions) withDefaults() (RelayOptions, error) {
	o.Rows = cmp.Or(o.Rows, RowsDefault)
	o.Partitions = cmp.Or(o.Partitions, RelayPartitionsDefault)
	o.Rounds = cmp.Or(o.Rounds, RoundsDefault)
	o.LatencySeconds = cmp.Or(o.LatencySeconds, LatencySecondsDefault)
	o.IdleSeconds = cmp.Or(o.IdleSeconds, IdleSecondsDefault)
	o.ShardRows = cmp.Or(o.ShardRows, ShardRowsDefault)
	if len(o.BacklogRows) == 0 {
		o.BacklogRows = BacklogRowsDefault()
	}
	if len(o.Scenarios) == 0 {
		_, o.Scenarios = Scenarios()
	}
	var backlogs []error
	for _, rows := range o.BacklogRows {
		backlogs = append(backlogs, inBounds("backlog rows", rows, BacklogRowsMin, BacklogRowsMax))
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	return o, errors.Join(
		o.check(),
		inBounds("rows", o.Rows, RowsMin, RowsMax),
		inBounds("partitions", o.Partitions, PartitionsMin, PartitionsMax),
		inBounds("rounds", o.Rounds, RoundsMin, RoundsMax),
		inBounds("large rows", o.LargeRows, 0, LargeRowsMax),
		inBounds("idle seconds", o.IdleSeconds, IdleSecondsMin, IdleSecondsMax),
		inBounds("latency seconds", o.LatencySeconds, LatencySecondsMin, LatencySecondsMax),
		inBounds("shard rows", o.ShardRows, ShardRowsMin, ShardRowsMax),
		errors.Join(backlogs...),
	)
}

// BacklogRowsDefault is the default of RelayOptions.BacklogRows.
func BacklogRowsDefault() []int { return []int{1_000_000, 10_000_000} }

// has reports whether a scenario runs.
func (o RelayOptions) has(scenario string) bool { return slices.Contains(o.Scenarios, scenario) }

func inBounds(what string, value, lowest, highest int) error {
	if value < lowest || value > highest {
		return fmt.Errorf("%s %d: want %d to %d", what, value, lowest, highest)
	}
	return nil
}
