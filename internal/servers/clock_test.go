package servers_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/servers"
)

// A server's clock keeps the offset from the machine's clock, also after a crash. Its timeouts,
// which also use that clock, last as long as before.
func TestClockOffset(t *testing.T) {
	longtest.Only(t, "servers with other clocks")
	t.Parallel()
	for _, offset := range []time.Duration{time.Hour, -90 * time.Minute} {
		p, err := servers.StartPostgres(t.Context(), servers.PostgresOptions{Own: true, ClockOffset: offset})
		if errors.Is(err, servers.ErrNoCompiler) && os.Getenv("REQUIRE_CONTAINERS") != "1" { //nolint:forbidigo // as for servers: a skip is for people, not for CI
			t.Skip("NOT TESTED: ", err)
		}
		require.NoError(t, err)
		for range 2 {
			there, err := time.Parse(time.RFC3339, query(t, p.URL, `SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')`))
			require.NoError(t, err)
			require.WithinDuration(t, time.Now().Add(offset), there, time.Minute)
			requireTimeout(t, p.URL)
			require.NoError(t, p.Kill(t.Context()))
			require.NoError(t, p.Restart(t.Context()))
		}
		require.NoError(t, p.Stop(t.Context()))
	}
}

func requireTimeout(t *testing.T, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, address)
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	began := time.Now()
	_, err = conn.Exec(ctx, "SET statement_timeout = 300; SELECT pg_sleep(10)")
	require.ErrorContains(t, err, "statement timeout")
	require.GreaterOrEqual(t, time.Since(began), 250*time.Millisecond)
}

// Without a C compiler a clock cannot be shifted, and no server with the machine's clock is used
// instead.
func TestClockOffsetNeedsACompiler(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := servers.StartPostgres(t.Context(), servers.PostgresOptions{ClockOffset: time.Hour})
	require.ErrorIs(t, err, servers.ErrNoCompiler)
}
