package watermillsink_test

import (
	"os"
	"testing"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == natsCommand {
		runNATS(os.Args[2], os.Args[3])
		return
	}
	pgtest.Main(m)
}
