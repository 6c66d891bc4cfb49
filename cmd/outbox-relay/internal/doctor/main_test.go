package doctor_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
)

// only returns the one finding of a check.
func only(t *testing.T, findings []doctor.Finding) doctor.Finding {
	t.Helper()
	require.Len(t, findings, 1, "%+v", findings)
	f := findings[0]
	if f.Severity != doctor.OK {
		require.NotEmpty(t, f.Remedy, "%+v", f)
	}
	return f
}
