// Package operator has what every command of an operator uses: who acts ([By]), the connection, the
// limits of its transaction ([Limit]), and the record of what was done ([Actions]).
package operator

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// By is who acts, and why. Both are stored forever, unchanged: Who has 1 to 255 bytes, Why 1 to
// 2048.
type By struct{ Who, Why string }

// Beginner is a connection or a pool.
type Beginner interface {
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}

// Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// ErrBusy means that a program, or another operator, has worked on one of the rows for longer than
// 30 s. The call that returns it changed nothing and can be repeated.
var ErrBusy = errors.New("another program or operator works on them: try again")

// Limit bounds how long a transaction may block others. It returns when the transaction began, by
// the database's clock.
func Limit(ctx context.Context, tx pgx.Tx) (began time.Time, err error) {
	return began, tx.QueryRow(ctx, settingsSQL).Scan(&began, nil, nil, nil, nil)
}
