package pgtest

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/migrations"
)

// shared is the server of this process, started by the first test that needs it and stopped by Main.
var shared sharedServer //nolint:gochecknoglobals // what all tests of a process share has no other place

type sharedServer struct {
	once     sync.Once
	server   *servers.Postgres
	template string // a migrated database
	err      error  // of the start, for every test that asks
}

func (s *sharedServer) get(tb testing.TB) (server *servers.Postgres, template string) {
	tb.Helper()
	s.once.Do(func() {
		// Others use it when this test is over.
		s.err = s.start(context.WithoutCancel(tb.Context()))
		if s.err == nil {
			tb.Log("shared by the tests of this package:", s.server.Description)
		}
	})
	if s.err != nil {
		tb.Fatal(s.err)
	}
	return s.server, s.template
}

func (s *sharedServer) start(ctx context.Context) error {
	offset, err := ClockOffset()
	if err != nil {
		return err
	}
	s.server, err = servers.StartPostgres(ctx, servers.PostgresOptions{ClockOffset: offset, Parameters: map[string]string{
		"max_connections": "300",
		// Its data is gone when the process ends, so there is no crash that these could guard against,
		// and creating and dropping a database for each test waits for dozens of syncs. A Cluster, which
		// may be killed, has them on.
		"fsync":            "off",
		"full_page_writes": "off",
	}})
	if err != nil {
		return err
	}
	s.template = databaseName("template")
	if err := execute(ctx, s.server.URL, "CREATE DATABASE "+quote(s.template)); err != nil {
		return fmt.Errorf("create the template of the tests' databases: %w", err)
	}
	return migrate(ctx, withDatabase(s.server.URL, s.template))
}

// dropTemplate leaves nothing behind on a server that lives on.
func (s *sharedServer) dropTemplate(ctx context.Context) error {
	if s.template == "" || s.server.Kind != servers.KindExternal {
		return nil
	}
	return execute(ctx, s.server.URL, "DROP DATABASE IF EXISTS "+quote(s.template)+" WITH (FORCE)")
}

func migrate(ctx context.Context, address string) error {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return fmt.Errorf("connect to migrate: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }()
	return migrations.Up(ctx, conn, migrations.Options{})
}

// withDatabase points a URL, or a list of key=value as DATABASE_URL may also be, at another database.
func withDatabase(address, name string) string {
	u, err := url.Parse(address)
	if err != nil || !strings.Contains(address, "://") {
		return address + " dbname=" + name // the last one counts
	}
	u.Path = "/" + name
	return u.String()
}
