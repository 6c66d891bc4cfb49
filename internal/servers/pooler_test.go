package servers_test

import (
	"context"
	"errors"
	"net/url"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/servers"
)

// A pooler lets those in who may connect, as themselves and with their password; it is gone when it
// is killed, and is back at its address after Restart.
func TestPooler(t *testing.T) {
	t.Parallel()
	needPooler(t)
	ctx := t.Context()
	postgres, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Volatile: true})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, postgres.Stop(context.WithoutCancel(ctx))) })
	conn, err := pgx.Connect(ctx, postgres.URL)
	require.NoError(t, err)
	_, err = conn.Exec(ctx, `CREATE ROLE pooled LOGIN PASSWORD 'secret of pooled'`)
	require.NoError(t, errors.Join(err, conn.Close(ctx)))
	p, err := servers.StartPooler(ctx, servers.PoolerOptions{DatabaseURL: postgres.URL, Logins: map[string]string{"pooled": "secret of pooled"}})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, p.Stop(context.WithoutCancel(ctx))) })
	whoIs := func(login, password string) (user string, err error) {
		u, err := url.Parse(p.URL)
		require.NoError(t, err)
		if login != "" {
			u.User = url.UserPassword(login, password)
		}
		conn, err := pgx.Connect(ctx, u.String()+"&default_query_exec_mode=simple_protocol")
		if err != nil {
			return "", err
		}
		defer func() { _ = conn.Close(ctx) }()
		return user, conn.QueryRow(ctx, `SELECT current_user::text`).Scan(&user)
	}
	user, err := whoIs("", "")
	require.NoError(t, err)
	require.Equal(t, conn.Config().User, user)
	user, err = whoIs("pooled", "secret of pooled")
	require.NoError(t, err)
	require.Equal(t, "pooled", user)
	_, err = whoIs("pooled", "a guess")
	require.ErrorContains(t, err, "SASL authentication failed")
	require.NoError(t, p.Kill(ctx))
	_, err = whoIs("", "")
	require.ErrorContains(t, err, "connection refused")
	require.NoError(t, p.Restart(ctx))
	_, err = whoIs("", "")
	require.NoError(t, err)
}

// A pooler that cannot start says why, at once.
func TestPoolerThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	needPooler(t)
	_, err := servers.StartPooler(t.Context(), servers.PoolerOptions{DatabaseURL: "postgres://a:b@127.0.0.1:1/c", Settings: []string{"pool_mode = nonsense"}})
	require.ErrorContains(t, err, "the server exited")
	require.ErrorContains(t, err, "nonsense")
}

func needPooler(t *testing.T) {
	t.Helper()
	if _, _, err := servers.FindPooler(t.Context()); errors.Is(err, servers.ErrNoPooler) && os.Getenv("REQUIRE_CONTAINERS") != "1" { //nolint:forbidigo // as for servers: a skip is for people, not for CI
		t.Skip("LOUD SKIP: " + err.Error())
	}
}
