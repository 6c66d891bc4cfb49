package checker

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

const ordersSQL = `-- checker.orders
SELECT id, message_id::text, customer, version, amount FROM shop.orders`

const effectsSQL = `-- checker.effects
SELECT sequence, order_id, message_id::text, customer, version, amount FROM shop.effects`

const balancesSQL = `-- checker.balances
SELECT customer, balance FROM shop.balances`

// ReadDatabase fills in orders, effects and balances from a schema. It reads all of them from one
// snapshot, so that a process that still writes cannot cause a difference.
func ReadDatabase(ctx context.Context, conn *pgx.Conn, schema string, evidence *Evidence) error {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return fmt.Errorf("check the database: %w", err)
	}
	defer tx.Rollback(ctx)
	quoted := pgx.Identifier{schema}.Sanitize() + "."
	query := func(sql string) pgx.Rows {
		// CollectRows returns this error, together with its own.
		rows, _ := tx.Query(ctx, strings.ReplaceAll(sql, "shop.", quoted))
		return rows
	}
	if evidence.Orders, err = pgx.CollectRows(query(ordersSQL), pgx.RowToStructByPos[Order]); err != nil {
		return fmt.Errorf("read the orders: %w", err)
	}
	if evidence.Effects, err = pgx.CollectRows(query(effectsSQL), pgx.RowToStructByPos[Effect]); err != nil {
		return fmt.Errorf("read the effects: %w", err)
	}
	evidence.Balances = make(map[string]int64)
	var key string
	var balance int64
	_, err = pgx.ForEachRow(query(balancesSQL), []any{&key, &balance}, func() error {
		evidence.Balances[key] = balance
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the balances: %w", err)
	}
	return nil
}
