package demo_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const childArgument = "demo-process"

// TestMain lets the test binary play the children of the demo, which are started with this
// argument.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == childArgument {
		os.Exit(child()) //nolint:forbidigo // it is the program here
	}
	pgtest.Main(m)
}

func child() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM) //nolint:forbidigo // it is the program here
	defer stop()
	orphaned := func() { os.Exit(3) } //nolint:forbidigo // it is the program here
	if err := demo.RunProcess(ctx, os.Stdin, os.Stderr, orphaned); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
