package human_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

// Property: one is singular and everything else plural; a duration has its two largest units, and
// never a unit of nothing.
func TestTexts(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0 rows", 1: "1 row", 2: "2 rows", -1: "-1 rows", 1_000_000: "1000000 rows"} {
		assert.Equal(t, want, human.Count(n, "row"))
	}
	for d, want := range map[time.Duration]string{
		0: "0s", 340 * time.Microsecond: "340µs", 12345 * time.Microsecond: "12ms", 999_600 * time.Microsecond: "1s", 1500 * time.Millisecond: "1.5s", 2 * time.Second: "2s",
		9_990 * time.Millisecond: "10s", 45 * time.Second: "45s", 59_600 * time.Millisecond: "59s", 90 * time.Second: "1m30s", 10 * time.Minute: "10m",
		time.Hour - time.Second: "59m59s", time.Hour - time.Millisecond: "59m59s", 200 * time.Minute: "3h20m", 24 * time.Hour: "1d", 216 * time.Hour: "9d", 51 * time.Hour: "2d3h",
		24*time.Hour - time.Second: "23h59m", -90 * time.Second: "-1m30s",
	} {
		assert.Equal(t, want, human.Duration(d), d)
	}
	assert.Equal(t, "2.5s", human.Seconds(2.5))
	for d, want := range map[time.Duration]string{0: "0s", 168 * time.Hour: "168h", 168*time.Hour - time.Second: "167h59m59s", 90 * time.Minute: "1h30m"} {
		assert.Equal(t, want, human.Exact(d))
	}
}

// What is shown of a key names this key and no other, and does nothing to a terminal.
func FuzzKeyText(f *testing.F) {
	for _, key := range []string{"", "order-7", "base64:", "base64:AP8=", "\x00\xff", "a\x1b[31mb", "ä ö", "a\nb", "\u202e", "a\u00a0b"} {
		f.Add([]byte(key))
	}
	f.Fuzz(func(t *testing.T, key []byte) {
		text := human.Key(key).String()
		require.True(t, human.Printable(text), "%q", text)
		again, err := human.ParseKey(text)
		require.NoError(t, err)
		require.Equal(t, string(key), string(again))
	})
}
