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

// shared is the server of this process. The first test that needs it starts it, and Main stops it.
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
		// Other tests use the server after this test.
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
	var err error
	s.server, err = servers.StartPostgres(ctx, servers.PostgresOptions{InMemory: true, Parameters: map[string]string{
		"max_connections": "300",
		// The data is gone when the process ends, so there is no crash against which these could
		// protect; and each creation and drop of a database would wait for dozens of syncs. A
		// Cluster, which may be killed, has them on.
		"fsync":            "off",
		"full_page_writes": "off",
		"max_wal_size":     "256MB", // in memory
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

// dropTemplate drops the template on a server that continues to run.
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

// withDatabase changes the database in a URL, or in a list of key=value, which DATABASE_URL may
// also be.
func withDatabase(address, name string) string {
	u, err := url.Parse(address)
	if err != nil || !strings.Contains(address, "://") {
		return address + " dbname=" + name // the last one counts
	}
	u.Path = "/" + name
	return u.String()
}
