package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Pooler finds out what is between this program and PostgreSQL. A pooler gives its clients keys for cancelling of its
// own, so the process that one is told of is not the one that answers. connect opens a connection of its own: a
// pooler in statement mode closes it at the first BEGIN.
func Pooler(ctx context.Context, connect func(context.Context) (*pgx.Conn, error)) []Finding {
	const check = "pooler"
	conn, err := connect(ctx)
	if err != nil {
		return broken(check, err)
	}
	defer hangUp(ctx, conn)
	first, transactions, err := askBackend(ctx, conn)
	switch {
	case err != nil:
		return broken(check, err)
	case !transactions:
		return []Finding{fail(check, "in pgbouncer.ini: pool_mode = transaction   # for this database and user; then RELOAD",
			"the connection leads through a pooler in statement mode: nothing here can work without transactions")}
	case first == conn.PgConn().PID():
		return []Finding{ok(check, "the connection leads to PostgreSQL directly")}
	}
	// While the first connection is between transactions, in transaction mode its server is free, and mostly is the
	// next one's.
	other, err := connect(ctx)
	if err != nil {
		return broken(check, err)
	}
	defer hangUp(ctx, other)
	second, _, err := askBackend(ctx, other)
	if err != nil {
		return broken(check, err)
	}
	mode := "session mode, or busy in transaction mode"
	if second == first {
		mode = "transaction mode"
	}
	return []Finding{ok(check, "the connection leads through a pooler (%s); the relay works there, \"outbox-relay migrate\" needs PostgreSQL itself: see docs/pgbouncer.md", mode)}
}

// hangUp closes a connection politely, and does not wait long for it.
func hangUp(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the work is done
}

// askBackend returns the process that answers in a transaction, and whether there are transactions.
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
		return 0, false, fmt.Errorf("ask who answers: %w", err)
	}
	return pid, true, tx.Rollback(ctx)
}
