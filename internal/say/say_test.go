package say_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/say"
)

// Property: a lasting condition is logged at once, and then every 30 s with its number of
// occurrences; one that ended begins again.
func TestWhatLastsIsLoggedNowAndThen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		t.Helper()
		var l say.Lines
		var logged []int
		for range 650 { // 65 s
			if times, due := l.Due("database away", false); due {
				logged = append(logged, times)
			}
			<-time.After(100 * time.Millisecond)
		}
		require.Equal(t, []int{1, 301, 601}, logged)
		_, due := l.Due("something else", false)
		require.True(t, due)
		<-time.After(2*say.Every + time.Second)
		times, due := l.Due("database away", false)
		require.True(t, due)
		require.Equal(t, 1, times)
	})
}

// Property: with lasts, everything until End is one condition, however rarely it occurs, and End
// returns how long it lasted.
func TestEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		t.Helper()
		var l say.Lines
		_, ok := l.End("Kafka away")
		require.False(t, ok)
		l.Due("Kafka away", true)
		<-time.After(time.Hour)
		times, due := l.Due("Kafka away", true)
		require.True(t, due)
		require.Equal(t, 2, times)
		ended, ok := l.End("Kafka away")
		require.True(t, ok)
		require.Equal(t, say.Ended{Times: 2, Lasted: time.Hour}, ended)
	})
}

// Property: a relay that runs for a year remembers a bounded number of conditions, and each is
// still logged once.
func TestWhatIsRememberedIsBounded(t *testing.T) {
	t.Parallel()
	var l say.Lines
	for i := range 5000 {
		times, due := l.Due(fmt.Sprint("topic ", i), false)
		require.True(t, due)
		require.Equal(t, 1, times)
	}
}
