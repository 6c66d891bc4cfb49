package inspect

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Conn is a connection or a pool, not in a transaction.
type Conn interface {
	operator.Querier
	operator.Beginner
}

// limited waits for a lock of another session for a second only, in each query: a locked table does not hide
// what the others have.
type limited struct{ Conn }

// Query implements operator.Querier. In the transaction the limit holds while the driver describes the
// statement, too.
func (l limited) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	tx, err := l.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, err
	}
	end := func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }
	var rows pgx.Rows
	if _, err = tx.Exec(ctx, lockLimitSQL); err == nil {
		rows, err = tx.Query(ctx, sql, args...)
	}
	if err != nil {
		end()
		return nil, err
	}
	return limitedRows{rows, end}, nil
}

type limitedRows struct {
	pgx.Rows
	end func()
}

func (r limitedRows) Close() {
	r.Rows.Close()
	r.end()
}
