package pgtest_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// The clock of the tests' servers is as far from the tests' own as TEST_CLOCK_OFFSET says: the
// shared one's and a cluster's.
func TestClockIsAsFarAwayAsAsked(t *testing.T) {
	t.Parallel()
	offset, err := pgtest.ClockOffset()
	require.NoError(t, err)
	for name, address := range map[string]string{"shared": pgtest.Database(t), "own": pgtest.Cluster(t, nil).URL} {
		var there time.Time
		require.NoError(t, pgtest.Connect(t, address).QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&there))
		require.WithinDuration(t, time.Now().Add(offset), there, time.Minute, name)
	}
}

// What is no duration, or none that a test could mean, is refused.
func TestWrongClockOffset(t *testing.T) {
	t.Setenv("TEST_CLOCK_OFFSET", "")
	for _, wrong := range []string{"+1 h", "1", "10000h"} {
		t.Setenv("TEST_CLOCK_OFFSET", wrong)
		_, err := pgtest.ClockOffset()
		require.ErrorContains(t, err, "TEST_CLOCK_OFFSET")
	}
}
