package consumers_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
)

// Property: a place to resume at is earliest, latest or an offset that is not negative, and reads the
// same after it was written again.
func FuzzResumeAt(f *testing.F) {
	for _, text := range []string{"earliest", "latest", "0", "7", "-1", "-2", "+7", "9223372036854775807", "9223372036854775808", "", " 7", "0x7", "Latest"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		at, err := consumers.ParseAt(text)
		if err != nil {
			require.Zero(t, at)
			return
		}
		require.True(t, at >= 0 || text == "earliest" && at == consumers.AtEarliest || text == "latest" && at == consumers.AtLatest)
		again, err := consumers.ParseAt(consumers.AtText(at))
		require.NoError(t, err)
		require.Equal(t, at, again)
	})
}
