package bench

import "fmt"

// Bounds and defaults of Options: the flags have them.
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

// Options are the options of Consume and Relay.
type Options struct {
	// DatabaseURL is the URL of the PostgreSQL database. The benchmark creates its own schema there
	// and drops it.
	DatabaseURL string
	// Brokers are the seed brokers of the Kafka cluster. The benchmark creates its own topics and
	// deletes them.
	Brokers []string

	// Messages that the fastest variants of Consume handle in a round; the textbook handles a
	// fortieth of them.
	Messages int
	// Rows of the backlog that each variant of Relay drains.
	Rows int
	// Rounds in which the variants take turns.
	Rounds int
	// Progress gets one line at a time.
	Progress func(line string)
}

func (o Options) note(format string, args ...any) { o.Progress(fmt.Sprintf(format, args...)) }
