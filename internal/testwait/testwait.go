// Package testwait waits in tests, one way for all of them: on the test's own goroutine, so that
// what fails inside a look ends the test with its own message; at once where the condition holds;
// and long enough that only what hangs is not seen. A bound that is a property of the code does
// not belong here.
package testwait

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Bound is how long what comes at once on a quiet machine may take before it counts as hung: two
// minutes, and four with the race detector.
const Bound = raceFactor * 2 * time.Minute

const (
	firstPause = 5 * time.Millisecond
	pauseMax   = 250 * time.Millisecond // who waits takes no processor time from what it waits for
)

// True looks until condition holds. what names the condition in the failure.
func True(tb testing.TB, what string, condition func() bool) {
	tb.Helper()
	For(tb, what, func() (bool, bool) {
		ok := condition()
		return ok, ok
	})
}

// For looks until ok and returns what it saw. If it never is, the test fails with the last value
// and with what Explain registered.
func For[T any](tb testing.TB, what string, look func() (last T, ok bool)) T {
	tb.Helper()
	begun, pause := time.Now(), firstPause
	for looks := 1; ; looks++ {
		last, ok := look()
		if ok {
			return last
		}
		if waited := time.Since(begun); waited >= Bound {
			fail(tb, fmt.Sprintf("%s: not within %v and %d looks, last seen: %v", what, waited.Round(time.Millisecond), looks, last))
		}
		select {
		case <-tb.Context().Done():
			fail(tb, fmt.Sprintf("%s: the test ended, last seen: %v", what, last))
		case <-time.NewTimer(pause).C:
		}
		pause = min(2*pause, pauseMax)
	}
}

// Equal looks until the value is want.
func Equal[T any](tb testing.TB, want T, what string, look func() T) {
	tb.Helper()
	For(tb, fmt.Sprintf("%s: want %v", what, want), func() (T, bool) {
		got := look()
		return got, reflect.DeepEqual(want, got)
	})
}

// Chan receives from c, or learns that it was closed.
func Chan[T any](tb testing.TB, what string, c <-chan T) T {
	tb.Helper()
	limit := time.NewTimer(Bound)
	defer limit.Stop()
	select {
	case v := <-c:
		return v
	case <-limit.C:
		stacks := make([]byte, 1<<20)
		fail(tb, fmt.Sprintf("%s: not within %v\n%s", what, Bound, stacks[:runtime.Stack(stacks, true)]))
		panic("unreachable")
	}
}

// endMax is how long a test may take to end.
const endMax = 2 * time.Minute

// AtEnd has a test do something when it ends, and its own context is cancelled.
func AtEnd(tb testing.TB, what string, do func(ctx context.Context) error) {
	tb.Helper()
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), endMax)
		defer cancel()
		if err := do(ctx); err != nil {
			tb.Errorf("%s: %v", what, err)
		}
	})
}

// explanations are what tests know about themselves, by the test's name, oldest first.
var explanations struct { //nolint:gochecknoglobals // a test's helpers know each other by the test alone
	sync.Mutex
	of map[string][]explanation
}

type explanation struct {
	name string
	text func() string
}

// Explain registers what is printed if a wait of this test or of one of its subtests fails: a log,
// the sessions of a database, the lag of a group, a seed.
func Explain(tb testing.TB, name string, text func() string) {
	tb.Helper()
	explanations.Lock()
	defer explanations.Unlock()
	if explanations.of == nil {
		explanations.of = map[string][]explanation{}
	}
	test := tb.Name()
	if _, known := explanations.of[test]; !known {
		tb.Cleanup(func() {
			explanations.Lock()
			defer explanations.Unlock()
			delete(explanations.of, test)
		})
	}
	explanations.of[test] = append(explanations.of[test], explanation{name, text})
}

// of returns what the test and those around it registered.
func of(test string) (all []explanation) {
	explanations.Lock()
	defer explanations.Unlock()
	for name, registered := range explanations.of {
		if test == name || strings.HasPrefix(test, name+"/") {
			all = append(all, registered...)
		}
	}
	slices.SortStableFunc(all, func(a, b explanation) int { return strings.Compare(a.name, b.name) })
	return all
}

// explainMax is how long an explanation may take: what hangs may hang whoever asks about it.
const explainMax = 10 * time.Second

func fail(tb testing.TB, why string) {
	tb.Helper()
	for _, e := range of(tb.Name()) {
		text := make(chan string, 1)
		go func() { text <- e.text() }()
		select {
		case said := <-text:
			tb.Logf("-- %s:\n%s", e.name, tail(said))
		case <-time.NewTimer(explainMax).C:
			tb.Logf("-- %s: no answer within %v", e.name, explainMax)
		}
	}
	load, _ := os.ReadFile("/proc/loadavg")
	tb.Fatalf("WAIT: %s\nload: %s, GOMAXPROCS %d", why, strings.TrimSpace(string(load)), runtime.GOMAXPROCS(0))
}

const linesMax = 200

func tail(text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-linesMax):], "\n")
}
