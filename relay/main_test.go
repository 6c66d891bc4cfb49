package relay_test

import (
	"testing"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.SideBySide()
	pgtest.Main(m)
}
