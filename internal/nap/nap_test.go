package nap_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/nap"
)

// Property: a nap lasts at least as long as requested, and never much longer than Max if more is
// requested.
func TestNapIsNeverTooShort(t *testing.T) {
	t.Parallel()
	n := nap.New()
	t.Cleanup(n.Close)
	zero := &nap.Napper{}
	for _, by := range []*nap.Napper{n, zero} {
		for _, d := range []time.Duration{-1, 0, 100 * time.Microsecond, 700 * time.Microsecond, nap.Max} {
			begun := time.Now()
			by.Nap(d)
			require.GreaterOrEqual(t, time.Since(begun), d)
		}
	}
	begun := time.Now()
	n.Nap(time.Hour)
	require.Less(t, time.Since(begun), time.Minute)
	zero.Close()
}

// Property: a closed Napper still naps.
func TestNapBehindClose(t *testing.T) {
	t.Parallel()
	n := nap.New()
	n.Close()
	begun := time.Now()
	n.Nap(nap.Max)
	require.GreaterOrEqual(t, time.Since(begun), nap.Max)
}
