package bench_test

import (
	"testing"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
