package keyclient_test

import (
	"os"
	"testing"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	if spec := os.Getenv(payerVariable); spec != "" { //nolint:forbidigo // the role of a process that a test started
		os.Exit(pay(spec)) //nolint:forbidigo // this process is a program, not a test
	}
	pgtest.Main(m)
}
