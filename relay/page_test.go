package relay_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/relay"
)

// Property: a record's time is that of its row to the microsecond, whatever times the rows before it have.
func TestTimesOfAPage(t *testing.T) {
	t.Parallel()
	at := func(s string) time.Time {
		v, err := time.Parse(time.RFC3339Nano, s)
		assert.NoError(t, err)
		return v
	}
	times := []time.Time{
		at("0000-12-31T23:59:59.999999Z"), at("2026-03-01T00:00:00Z"), at("2026-03-01T00:00:00.000001Z"), at("2026-03-01T00:00:00.120Z"),
		at("2026-03-01T01:00:00.99999999+01:00"), at("2026-02-28T23:59:59.654321Z"), at("1969-12-31T23:59:59.999999Z"),
		at("1970-01-01T00:00:00.5Z"), time.UnixMicro(1 << 58),
	}
	for i, text := range relay.Times(times...) {
		assert.Equal(t, times[i].UTC().Format("2006-01-02T15:04:05.000000Z"), text)
	}
}
