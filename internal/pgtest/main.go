package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/effectonce/effectonce/internal/servers"
)

const stopMax = time.Minute

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
	return errors.Join(err, goleak.Find(ignore...))
}
