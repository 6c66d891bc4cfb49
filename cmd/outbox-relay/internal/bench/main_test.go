package bench_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/bench"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const childArgument = "bench-process"

// TestMain lets the test binary play the relay that is measured, which is started with this
// argument.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == childArgument {
		orphaned := func() { os.Exit(3) } //nolint:forbidigo // it is the program here
		//nolint:forbidigo // it is the program here
		if err := bench.RelayProcess(context.Background(), os.Stdin, os.Stdout, orphaned); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) //nolint:forbidigo // it is the program here
		}
		return
	}
	pgtest.Main(m)
}
