package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Pooler finds out what is between this program and PostgreSQL. A pooler gives its clients cancel
// keys of its own, so the process ID that the client was given is not the one of the backend that
// answers. connect opens a connection of its own, because a pooler in statement mode closes the
// connection at the first BEGIN.
func Pooler(ctx context.Context, connect func(context.Context) (*pgx.Conn, error)) []Finding {
	const check = "pooler"
	conn, err := connect(ctx)
	if err != nil {
		return broken(check, cmp.Or(ctx.Err(), err))
	}
	defer hangUp(ctx, conn)
	first, transactions, err := askBackend(ctx, conn)
	switch {
	case err != nil:
		return broken(check, err)
	case !transactions:
		return []Finding{fail(check, "in pgbouncer.ini: pool_mode = transaction   # for this database and user; then RELOAD",
			"the connection goes through a pooler in statement mode: nothing here works without transactions")}
	case first == conn.PgConn().PID():
		return []Finding{ok(check, "the connection goes to PostgreSQL directly")}
	}
	return []Finding{ok(check, "the connection goes through a pooler; the relay works with it, \"outbox-relay migrate\" needs a direct connection to PostgreSQL: see docs/how-to/pgbouncer.md")}
}

// hangUp closes a connection cleanly, and waits at most a second.
func hangUp(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the work is done
}

// askBackend returns the PID of the backend that answers in a transaction, and whether transactions
// are possible.
func askBackend(ctx context.Context, conn *pgx.Conn) (pid uint32, transactions bool, err error) {
	tx, err := conn.Begin(ctx)
	var refused *pgconn.PgError
	if errors.As(err, &refused) && strings.Contains(refused.Message, "statement pooling") {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("begin a transaction: %w", err)
	}
	if err := tx.QueryRow(ctx, backendSQL).Scan(&pid); err != nil {
		return 0, false, fmt.Errorf("ask for the backend's PID: %w", err)
	}
	return pid, true, tx.Rollback(ctx)
}
