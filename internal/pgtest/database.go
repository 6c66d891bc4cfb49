package pgtest

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
)

const poolConnsMax = 16 // times sixteen tests at once is within the shared server's limit

// Pool returns a pool on a migrated database that only this test uses.
func Pool(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	config, err := pgxpool.ParseConfig(Database(tb))
	if err != nil {
		tb.Fatalf("parse the URL of the test's database: %v", err)
	}
	config.MaxConns = poolConnsMax
	return PoolOf(tb, config)
}

// Database returns the URL of a migrated database that only this test uses.
func Database(tb testing.TB) string {
	tb.Helper()
	server, template := shared.get(tb)
	return create(tb, server, template)
}

// EmptyDatabase returns the URL of a database that only this test uses, without the schema.
func EmptyDatabase(tb testing.TB) string {
	tb.Helper()
	server, _ := shared.get(tb)
	return create(tb, server, "template1")
}

// Cluster returns a server that only this test uses, with settings as in postgres -c name=value.
// Unlike the shared one it syncs its writes, so that its crash proves something.
func Cluster(tb testing.TB, parameters map[string]string) *servers.Postgres {
	tb.Helper()
	p, err := servers.StartPostgres(tb.Context(), servers.PostgresOptions{Own: true, InMemory: true, Parameters: parameters})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Log("a cluster of its own:", p.Description)
	testwait.AtEnd(tb, "stop the test's cluster", p.Stop)
	return p
}

// Migrate installs the schema in a database that does not come from Database, for example in a
// Cluster.
func Migrate(tb testing.TB, address string) {
	tb.Helper()
	if err := migrate(tb.Context(), address); err != nil {
		tb.Fatal(err)
	}
}

// create clones template. When the test ends, it checks and drops the clone.
func create(tb testing.TB, server *servers.Postgres, template string) string {
	tb.Helper()
	name := databaseName(tb.Name())
	sql := "CREATE DATABASE " + quote(name) + " TEMPLATE " + quote(template)
	if err := execute(tb.Context(), server.URL, sql); err != nil {
		tb.Fatalf("create the test's database: %v", err)
	}
	address := withDatabase(server.URL, name)
	explain(tb, address)
	testwait.AtEnd(tb, "drop the test's database", func(ctx context.Context) error {
		checkInvariants(ctx, tb, address)
		return execute(ctx, server.URL, "DROP DATABASE "+quote(name)+" WITH (FORCE)")
	})
	return address
}

// databaseName names the test for readers of pg_stat_activity, within PostgreSQL's 63 bytes.
func databaseName(test string) string {
	test = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '_' {
			return r
		}
		return '_'
	}, strings.ToLower(test))
	return "effectonce_" + strings.ToLower(rand.Text()[:10]) + "_" + test[:min(len(test), 40)]
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

func execute(ctx context.Context, address, sql string) error {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, sql)
	return err
}
