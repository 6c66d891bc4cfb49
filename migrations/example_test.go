package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/migrations"
)

// A deployment migrates the schema to the latest version; any number of replicas may do so at once.
func Example() {
	migrate := func(ctx context.Context, databaseURL string) error {
		conn, err := pgx.Connect(ctx, databaseURL)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close(ctx) }()
		return migrations.Up(ctx, conn, migrations.Options{})
	}
	_ = migrate
}

// A program that only uses the tables checks at its start whether it works with their version.
func ExampleCheck() {
	start := func(ctx context.Context, conn *pgx.Conn) error {
		err := migrations.Check(ctx, conn, migrations.Options{Schema: "effectonce"})
		if errors.Is(err, migrations.ErrTooOld) {
			fmt.Fprintln(os.Stderr, "waiting for the deployment to migrate:", err)
		}
		return err
	}
	_ = start
}

// The statements can be printed, and run with psql instead.
func ExampleAll() {
	all, err := migrations.All(migrations.Options{Schema: "tenant_7"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(all[0].Version, all[0].Name)
	// Output: 1 0001_outbox
}
