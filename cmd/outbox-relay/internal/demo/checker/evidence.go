package checker

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
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

// event is the body of a record, as described in the demo's documentation.
type event struct {
	Order    *int64 `json:"order"`
	Customer string `json:"customer"`
	Version  int64  `json:"version"`
	Amount   int64  `json:"amount"`
}

// ReadTopic fills in the records of a topic, from its first offset to the end that it had when the
// call began. options have to reach the brokers (seeds, TLS, SASL) and must not name a consumer
// group.
func ReadTopic(ctx context.Context, options []kgo.Opt, topic string, evidence *Evidence) error {
	client, err := kgo.NewClient(options...)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	defer client.Close()
	extents, err := topicscan.Extents(ctx, client, time.Time{}, topic)
	if err != nil {
		return fmt.Errorf("check topic %s: %w", topic, err)
	}
	if len(extents[topic]) == 0 {
		return fmt.Errorf("check topic %s: %w", topic, kerr.UnknownTopicOrPartition)
	}
	err = topicscan.Scan(ctx, options, extents, func(r *kgo.Record) error {
		evidence.Records = append(evidence.Records, decode(r))
		return nil
	})
	if err != nil {
		return fmt.Errorf("read topic %s: %w", topic, err)
	}
	return nil
}

func decode(r *kgo.Record) Record {
	record := Record{Partition: r.Partition, Offset: r.Offset, Key: string(r.Key)}
	for _, h := range r.Headers {
		if h.Key == "message-id" {
			record.MessageID = string(h.Value)
		}
	}
	var body event
	switch err := json.Unmarshal(r.Value, &body); {
	case err != nil:
		record.Unreadable = err.Error()
	case record.MessageID == "":
		record.Unreadable = "no header message-id"
	case body.Order == nil:
		record.Unreadable = "no order number"
	case body.Customer != record.Key:
		record.Unreadable = fmt.Sprintf("its key is %q, its customer is %q", record.Key, body.Customer)
	default:
		record.OrderID, record.Version, record.Amount = *body.Order, body.Version, body.Amount
	}
	return record
}
