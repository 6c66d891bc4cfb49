package pgtest

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Violations is what the end of a test would complain about, if it did not heal.
func Violations(ctx context.Context, conn *pgx.Conn) (string, error) {
	var all strings.Builder
	for _, i := range invariants() {
		found, err := i.find(ctx, conn)
		if err != nil {
			return "", err
		}
		for _, row := range found {
			fmt.Fprintln(&all, row)
		}
	}
	return all.String(), nil
}

// WithDatabase is withDatabase.
func WithDatabase(address, name string) string { return withDatabase(address, name) }
