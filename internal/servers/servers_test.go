package servers_test

import (
	"context"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
)

// A free port may be taken when the server needs it: the next one is tried, but not forever.
func TestNextPortAfterACollision(t *testing.T) {
	t.Parallel()
	tried, err := servers.LaunchBeside(t.Context(), 2)
	require.NoError(t, err)
	assert.Equal(t, 3, tried)
	tried, err = servers.LaunchBeside(t.Context(), 99)
	require.ErrorContains(t, err, "Address already in use")
	assert.Equal(t, 5, tried)
}

func startPostgres(t *testing.T, opts servers.PostgresOptions) *servers.Postgres {
	t.Helper()
	began := time.Now()
	p, err := servers.StartPostgres(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, p.Stop(context.WithoutCancel(t.Context()))) })
	t.Logf("%s after %s", p.Description, time.Since(began).Round(time.Millisecond))
	return p
}

func execute(t *testing.T, address, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(t.Context())) }()
	_, err = conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}

func query(t *testing.T, address, sql string) (value string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	defer func() { assert.NoError(t, conn.Close(t.Context())) }()
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&value))
	return value
}

// What was committed before a crash is there after it, at the same address and with the same
// settings. A server that cannot start says why, at once, and leaves nothing running.
func TestPostgresKeepsCommittedDataThroughKill(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]servers.PostgresOptions{
		"best kind": {Own: true}, // a container, where an engine answers
		"embedded":  {Embedded: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "best kind" {
				longtest.Only(t, "one more server")
			}
			opts.Parameters = map[string]string{"no_such_parameter": "1"}
			_, err := servers.StartPostgres(t.Context(), opts)
			require.ErrorContains(t, err, "the server exited")
			require.ErrorContains(t, err, `unrecognized configuration parameter "no_such_parameter"`)

			opts.Parameters = map[string]string{"deadlock_timeout": "200ms", "max_connections": "30"}
			p := startPostgres(t, opts)
			execute(t, p.URL, "CREATE TABLE kept AS SELECT 'committed' AS what")
			require.NoError(t, p.Kill(t.Context()))
			_, err = pgx.Connect(t.Context(), p.URL)
			require.Error(t, err, "the server is down")
			require.NoError(t, p.Restart(t.Context()))
			assert.Equal(t, "committed 200ms 30 UTF8", query(t, p.URL,
				"SELECT concat_ws(' ', what, current_setting('deadlock_timeout'), current_setting('max_connections'), current_setting('server_encoding')) FROM kept"))
			require.NoError(t, p.Kill(t.Context()), "and it can be stopped while it is down")
		})
	}
}

// A server that the caller names is used, not owned: it survives Stop, refuses Kill, and its
// password stays out of the description.
func TestExternalPostgresIsLeftAlone(t *testing.T) {
	t.Parallel()
	owner := startPostgres(t, servers.PostgresOptions{Embedded: true})
	guest, err := servers.StartPostgres(t.Context(), servers.PostgresOptions{DatabaseURL: owner.URL})
	require.NoError(t, err)
	assert.Equal(t, servers.KindExternal, guest.Kind)
	u, err := url.Parse(owner.URL)
	require.NoError(t, err)
	password, _ := u.User.Password()
	require.NotEmpty(t, password)
	assert.NotContains(t, guest.Description, password)

	require.ErrorContains(t, guest.Kill(t.Context()), "did not start it")
	require.NoError(t, guest.Stop(t.Context()))
	assert.Equal(t, "1", query(t, owner.URL, "SELECT '1'"))
}

// An embedded server ends with the process that started it, even if that is killed.
func TestEmbeddedPostgresDiesWithItsProcess(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	require.NoError(t, err)
	address, err := exec.CommandContext(t.Context(), program, crashing).Output()
	require.ErrorContains(t, err, "signal: killed")
	require.NotEmpty(t, address)
	testwait.True(t, "the server is gone", func() bool {
		_, err := pgx.Connect(t.Context(), string(address))
		return err != nil && strings.Contains(err.Error(), "connection refused")
	})
}

// Where containers are required, their absence is an error that says so, not a quieter test.
func TestRequiredContainersAreNotReplaced(t *testing.T) {
	t.Setenv("DOCKER_HOST", "unix:///nonexistent")
	t.Setenv("REQUIRE_CONTAINERS", "1")
	_, err := servers.StartPostgres(t.Context(), servers.PostgresOptions{Own: true})
	require.ErrorContains(t, err, "REQUIRE_CONTAINERS=1, but no Docker engine answers")
	_, err = servers.StartKafka(t.Context(), servers.KafkaOptions{Own: true})
	require.ErrorContains(t, err, "REQUIRE_CONTAINERS=1, but no Docker engine answers")
}
