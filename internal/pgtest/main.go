package pgtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/effectonce/effectonce/internal/servers"
)

const stopMax = 2 * time.Minute

// Main runs the tests of a package, stops every server that they started, and fails if goroutines
// remain. It does not return. Every package whose tests use a server calls it from TestMain.
func Main(m *testing.M, ignore ...goleak.Option) {
	code := m.Run()
	if err := finish(code == 0, ignore); err != nil {
		fmt.Fprintln(os.Stderr, "after the tests:", err)
		code = max(code, 1)
	}
	os.Exit(code) //nolint:forbidigo // the end of TestMain
}

func finish(passed bool, ignore []goleak.Option) error {
	//nolint:forbidigo // TestMain has no context to hand on
	ctx, cancel := context.WithTimeout(context.Background(), stopMax)
	defer cancel()
	err := errors.Join(shared.dropTemplate(ctx), servers.StopAll(ctx))
	if !passed {
		return err // a failed test may have left anything behind; only its own message matters
	}
	// The loop of a kfake cluster that was closed while a request woke up in SleepControl: the
	// control function then returns with kfake's own lock held, and the loop waits for that lock
	// indefinitely.
	ignore = append(ignore, goleak.IgnoreAnyFunction("github.com/twmb/franz-go/pkg/kfake.(*Cluster).continueSleptControl"))
	return errors.Join(err, leaks(ignore))
}

const (
	leakMax   = 30 * time.Second
	leakEvery = 250 * time.Millisecond
)

// leaks waits for the end of what clients close in the background. If goroutines remain, it reports
// that as a failed test, so that it has a name wherever the results of tests are read.
func leaks(ignore []goleak.Option) error {
	begun := time.Now()
	err := goleak.Find(ignore...)
	for err != nil && time.Since(begun) < leakMax {
		time.Sleep(leakEvery) //nolint:forbidigo // after the tests, nothing announces the end of a goroutine
		err = goleak.Find(ignore...)
	}
	if err == nil {
		return nil
	}
	mark := "" // which "go test -json" asks for before each line that is not a test's own output
	if v := flag.Lookup("test.v"); v != nil && v.Value.String() == "test2json" {
		mark = "\x16"
	}
	_, _ = fmt.Fprintf(os.Stdout, "%s=== RUN   %s\n%v\n%s--- FAIL: %s (%.2fs)\n", mark, LeakTest, err, mark, LeakTest, time.Since(begun).Seconds())
	return errors.New("goroutines remain, see " + LeakTest)
}

// LeakTest is the name under which goroutines that remain after the tests of a package are reported.
const LeakTest = "TestNoGoroutineRemains"

// SideBySide runs at least six tests at once, unless the command line says how many. It is for
// packages whose tests wait, for leases, sessions and servers, rather than work. TestMain calls it
// before Main.
func SideBySide() {
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		_ = flag.Set("test.parallel", strconv.Itoa(max(6, runtime.GOMAXPROCS(0))))
	}
}
