package watermillsink

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/effectonce/effectonce/outbox"
)

// Names of metadata that the sink writes itself. A row whose own headers have one of them is
// refused: the header could be mistaken for the sink's metadata.
const (
	// MetadataTombstone is "true" if the row has no payload (Kafka's null), and absent if the
	// payload is only empty.
	MetadataTombstone = "effectonce_tombstone"
	// MetadataNullHeaders is a JSON array of the headers whose value is null, in their order; in
	// the metadata they are empty. It is absent if there are none.
	MetadataNullHeaders = "effectonce_null_headers"
)

// metadataUUID is where most publishers put the message's UUID. A header of this name would replace
// it, or be a permanent error of the publisher.
const metadataUUID = "_watermill_message_uuid"

const (
	batchMax     = 10_000
	nameBytesMax = 255
)

// Config of a Sink. The zero value works.
type Config struct {
	// Batch is the maximum number of consecutive messages of one topic in one call of the
	// publisher. It is only for publishers that stop at the first message that fails, or take all
	// or none. 1 to 10,000; default 1.
	Batch int
	// KeyName is the name of the metadata that has the row's key, for publishers that partition or
	// group by it. A row without a key has no such metadata. 1 to 255 bytes; default
	// "partition_key".
	KeyName string
	// HeaderSeparator is put between the values of a header that a row has several times: metadata
	// has one value for each name. A row with such a value that contains the separator, or is null,
	// is refused. At most 255 bytes; default: a row that has a header several times is refused.
	HeaderSeparator string
	// Final reports whether an error of the publisher is permanent for this message (too large, no
	// such queue), not temporary. The row then moves to outbox_dead and holds its key; all other
	// rows are published. If the error concerns more than the message, every row is moved. Final
	// may be called from several goroutines at once. Default: no error is final, and a message that
	// cannot be published holds back its shard.
	Final func(error) bool
}

// withDefaults fills in zero values and returns all problems at once.
func (c Config) withDefaults(publisher message.Publisher) (Config, error) {
	var problems []error
	report := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if publisher == nil {
		report("publisher is nil: want a publisher of Watermill")
	}
	c.Batch = cmp.Or(c.Batch, 1)
	if c.Batch < 1 || c.Batch > batchMax {
		report("Batch %d: want 1 to %d", c.Batch, batchMax)
	}
	c.KeyName = cmp.Or(c.KeyName, "partition_key")
	switch {
	case len(c.KeyName) > nameBytesMax:
		report("KeyName has %d bytes: want 1 to %d", len(c.KeyName), nameBytesMax)
	case !utf8.ValidString(c.KeyName) || strings.ContainsFunc(c.KeyName, unicode.IsControl):
		report("KeyName %q: want UTF-8 without control characters", c.KeyName)
	case reserved(c.KeyName) || c.KeyName == outbox.HeaderMessageID || c.KeyName == outbox.HeaderOccurredAt:
		report("KeyName %q: want a name that is not reserved", c.KeyName)
	}
	if len(c.HeaderSeparator) > nameBytesMax {
		report("HeaderSeparator has %d bytes: want at most %d", len(c.HeaderSeparator), nameBytesMax)
	}
	if c.Final == nil {
		c.Final = func(error) bool { return false }
	}
	return c, errors.Join(problems...)
}

func reserved(name string) bool {
	return name == MetadataTombstone || name == MetadataNullHeaders || name == metadataUUID
}
