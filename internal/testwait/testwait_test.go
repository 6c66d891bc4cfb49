package testwait_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/testwait"
)

// recorder is a test that notes how a wait ends.
type recorder struct {
	testing.TB
	ctx    context.Context
	failed string
	logged []string
}

func (r *recorder) Context() context.Context   { return r.ctx }
func (r *recorder) Logf(f string, args ...any) { r.logged = append(r.logged, fmt.Sprintf(f, args...)) }

func (r *recorder) Fatalf(f string, args ...any) {
	r.failed = fmt.Sprintf(f, args...)
	panic(r)
}

// ends runs a wait on a recorder, which it returns.
func ends(t *testing.T, wait func(tb testing.TB)) *recorder {
	t.Helper()
	r := &recorder{TB: t, ctx: t.Context()}
	func() {
		defer func() {
			if p := recover(); p != nil && p != any(r) {
				panic(p)
			}
		}()
		wait(r)
	}()
	return r
}

// Property: a condition that holds is seen at once, one that comes to hold soon after, and a test
// that fails inside a look ends with its own message.
func TestWaitEndsWhenTheConditionHolds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		testwait.True(t, "at once", func() bool { return true })
		require.Zero(t, time.Since(begun))
		n := testwait.For(t, "later", func() (time.Duration, bool) { return time.Since(begun), time.Since(begun) > time.Minute })
		require.Less(t, n, time.Minute+time.Second)
		testwait.Equal(t, 3, "looks", func() int { return min(3, int(time.Since(begun)/time.Minute)) })
		c := make(chan int, 1)
		c <- 7
		require.Equal(t, 7, testwait.Chan(t, "a value", c))
		r := ends(t, func(tb testing.TB) {
			tb.Helper()
			testwait.True(tb, "a look that fails", func() bool { tb.Fatalf("its own message"); return false })
		})
		require.Equal(t, "its own message", r.failed)
	})
}

// Property: what never holds fails behind the bound, with the last value, the number of looks, the
// load and what the test and the one around it explain; a look never comes more often than each
// 5 ms.
func TestWaitThatFailsExplainsItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		testwait.Explain(t, "log", func() string { return strings.Repeat("line\n", 500) + "the last line" })
		testwait.Explain(t, "hangs", func() string { time.Sleep(time.Hour); return "" }) //nolint:forbidigo // on the bubble's clock
		begun, looks := time.Now(), 0
		r := ends(t, func(tb testing.TB) {
			tb.Helper()
			testwait.For(tb, "what never holds", func() (int, bool) { looks++; return looks, false })
		})
		require.GreaterOrEqual(t, time.Since(begun), testwait.Bound)
		require.Less(t, looks, int(testwait.Bound/(200*time.Millisecond)))
		require.Contains(t, r.failed, fmt.Sprintf("WAIT: what never holds: not within %v and %d looks, last seen: %d", time.Since(begun)-10*time.Second, looks, looks))
		require.Contains(t, r.failed, "GOMAXPROCS")
		said := strings.Join(r.logged, "\n")
		assert.Contains(t, said, "the last line")
		assert.Equal(t, 199, strings.Count(said, "line\n")) // and the last one
		assert.Contains(t, said, "hangs: no answer within 10s")

		r = ends(t, func(tb testing.TB) { tb.Helper(); testwait.Chan(tb, "what never comes", make(chan int)) })
		require.Contains(t, r.failed, "WAIT: what never comes: not within")
		require.Contains(t, r.failed, "goroutine ")
		time.Sleep(2 * time.Hour) //nolint:forbidigo // what hangs ends
	})
}

// Property: a test that ends does not wait on.
func TestWaitEndsWithTheTest(t *testing.T) {
	t.Parallel()
	r := &recorder{TB: t}
	ctx, cancel := context.WithCancel(t.Context())
	r.ctx = ctx
	cancel()
	assert.PanicsWithValue(t, r, func() { testwait.True(r, "never", func() bool { return false }) })
	assert.Contains(t, r.failed, "WAIT: never: the test ended")
}
