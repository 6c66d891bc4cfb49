package bench

import (
	"cmp"
	"errors"
	"fmt"
)

// Bounds and defaults of Options.
const (
	MessagesMin     = 2000 // runs, and says that its figures mean nothing
	MessagesDefault = 100_000
	MessagesMax     = 5_000_000

	RowsMin     = 2000
	RowsDefault = 500_000
	RowsMax     = 5_000_000

	// Below these the start and the end of a run are a good part of it: ratios are random.
	messagesTelling = 50_000
	rowsTelling     = 100_000

	RoundsMin     = 1
	RoundsDefault = 3
	RoundsMax     = 25
)

const (
	consumePartitions = 4
	relayPartitions   = 6
	payloadBytes      = 256 // of an outbox row
	consumeValueBytes = 100 // of a message
	keysDistinct      = 1000
)

// Options are the options of Consume and Relay. All fields but the first two may be zero.
type Options struct {
	// DatabaseURL is the URL of the PostgreSQL database. The benchmark creates its own schema there
	// and drops it.
	DatabaseURL string
	// Brokers are the seed brokers of the Kafka cluster. The benchmark creates its own topics and
	// deletes them.
	Brokers []string

	// Messages that the fastest variants of Consume handle in a round; the textbook handles a
	// fortieth of them. 2,000 to 5,000,000; default 100,000.
	Messages int
	// Rows of the backlog that each variant of Relay drains. 2,000 to 5,000,000; default 500,000.
	Rows int
	// Rounds in which the variants take turns. 1 to 25; default 3.
	Rounds int
	// Progress gets one line at a time. Default: none.
	Progress func(line string)
}

func (o Options) withDefaults() (Options, error) {
	o.Messages = cmp.Or(o.Messages, MessagesDefault)
	o.Rows = cmp.Or(o.Rows, RowsDefault)
	o.Rounds = cmp.Or(o.Rounds, RoundsDefault)
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	problem := errors.Join(
		inBounds("messages", o.Messages, MessagesMin, MessagesMax),
		inBounds("rows", o.Rows, RowsMin, RowsMax),
		inBounds("rounds", o.Rounds, RoundsMin, RoundsMax),
	)
	if o.DatabaseURL == "" || len(o.Brokers) == 0 {
		problem = errors.Join(problem, errors.New("bench: DatabaseURL and Brokers are required"))
	}
	return o, problem
}

func inBounds(what string, value, lowest, highest int) error {
	if value < lowest || value > highest {
		return fmt.Errorf("%s %d: want %d to %d", what, value, lowest, highest)
	}
	return nil
}

func (o Options) note(format string, args ...any) { o.Progress(fmt.Sprintf(format, args...)) }
