package doctor_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// connect opens a connection that ends with the test.
func connect(t *testing.T, address string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.PgConn().Conn().Close() })
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

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
