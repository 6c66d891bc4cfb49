// Package publishers keeps the lists of topics that roles may publish to.
package publishers

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// ErrNotListed means that a role has no list. Nothing was changed.
var ErrNotListed = errors.New("the role has no list")

// Publisher is a role that is limited, with its members, to topics: names, or prefixes of names
// followed by "*".
type Publisher struct {
	Role   string   `json:"role"`
	Topics []string `json:"topics"`
}

// List returns the limited roles, by name.
func List(ctx context.Context, db operator.Querier, schema string) ([]Publisher, error) {
	rows, err := db.Query(ctx, migrations.InSchema(listSQL, schema))
	if err != nil {
		return nil, fmt.Errorf("list publishers: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Publisher])
	if err != nil {
		return nil, fmt.Errorf("list publishers: %w", err)
	}
	return all, nil
}

// Limit limits a role to topics, replacing its earlier list, and records who did so. It applies to
// transactions that insert after it. The first list waits at most 1.5 s for transactions that write
// to the outbox. An error means that nothing was changed, unless the connection broke during
// COMMIT; it is safe to repeat the call.
func Limit(ctx context.Context, db operator.Beginner, schema string, p Publisher, by operator.By) error {
	_, err := change(ctx, db, schema, p.Role, limitSQL, p.Role, p.Topics, by.Who, by.Why)
	return err
}

// Free removes the list of a role that Limit set. Removing the last list waits as the first one
// does. ErrNotListed: there was none.
func Free(ctx context.Context, db operator.Beginner, schema, role string, by operator.By) error {
	n, err := change(ctx, db, schema, role, freeSQL, role, by.Who, by.Why)
	if err == nil && n == 0 {
		return fmt.Errorf("role %q: %w", role, ErrNotListed)
	}
	return err
}

func change(ctx context.Context, db operator.Beginner, schema, role, sql string, args ...any) (n int64, err error) {
	// Read committed, whatever the role's default: the triggers refuse anything else.
	err = pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, settingsSQL); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, migrations.InSchema(sql, schema), args...)
		n = tag.RowsAffected()
		return err
	})
	var pgErr *pgconn.PgError
	switch {
	case pgerr.Is(err, pgerr.LockNotAvailable):
		return 0, fmt.Errorf("topics of role %q: blocked by transactions that write to the outbox, or by a migration; nothing was changed, try again: %w", role, err)
	case pgerr.Is(err, pgerr.InsufficientPrivilege):
		return 0, fmt.Errorf("topics of role %q: connect as the owner of the tables: only the owner can change them: %w", role, err)
	case errors.As(err, &pgErr) && pgErr.Hint != "":
		return 0, fmt.Errorf("topics of role %q: %w. %s", role, err, pgErr.Hint)
	case err != nil:
		return 0, fmt.Errorf("topics of role %q: %w", role, err)
	}
	return n, nil
}
