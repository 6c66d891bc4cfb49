package servers_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// crashing is the argument that makes this program a process that starts a PostgreSQL and dies.
const crashing = "start-and-crash"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == crashing {
		startAndCrash()
	}
	pgtest.Main(m)
}

func startAndCrash() {
	p, err := servers.StartPostgres(context.Background(), servers.PostgresOptions{Embedded: true}) //nolint:forbidigo // a process, not a test
	if err != nil {
		panic(err)
	}
	_, _ = fmt.Fprint(os.Stdout, p.URL)
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		panic(err)
	}
	_ = self.Kill()
	select {}
}
