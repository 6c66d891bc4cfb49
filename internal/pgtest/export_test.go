package pgtest

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Violations is what the end of a test would complain about, if it did not heal.
func Violations(ctx context.Context, conn *pgx.Conn) (string, error) {
	found, err := broken(ctx, conn)
	return strings.Join(found, "\n"), err
}

// WithDatabase is withDatabase.
func WithDatabase(address, name string) string { return withDatabase(address, name) }
