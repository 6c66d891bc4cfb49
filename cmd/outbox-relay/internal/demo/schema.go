package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/site"
)

// tablesSQL creates the tables of the shop and those of its consumers. effects has no unique
// constraint, so that only the claim prevents a second effect of a duplicate.
const tablesSQL = `-- demo.tables
CREATE TABLE shop.customers (
  name    text   PRIMARY KEY,
  version bigint NOT NULL DEFAULT 0 -- of the last order; its writers queue at this row
);
CREATE TABLE shop.orders (
  id         bigint      PRIMARY KEY,
  message_id uuid        NOT NULL UNIQUE, -- of the event; attempts that were rolled back had others
  customer   text        NOT NULL REFERENCES shop.customers,
  version    bigint      NOT NULL,
  amount     bigint      NOT NULL,
  placed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
  UNIQUE (customer, version)
);
CREATE TABLE shop.balances (
  customer text   PRIMARY KEY,
  balance  bigint NOT NULL DEFAULT 0
);
CREATE TABLE shop.effects (
  sequence   bigint      GENERATED ALWAYS AS IDENTITY,
  order_id   bigint      NOT NULL,
  message_id uuid        NOT NULL,
  customer   text        NOT NULL,
  version    bigint      NOT NULL,
  amount     bigint      NOT NULL,
  worker     text        NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);`

const customersSQL = `-- demo.customers
WITH names AS (SELECT 'customer-' || n AS name FROM generate_series(1, $1::int) AS n),
     known AS (INSERT INTO shop.customers (name) SELECT name FROM names)
INSERT INTO shop.balances (customer) SELECT name FROM names`

// customers is enough to keep six partitions busy, and few enough for writers to compete for one.
const customers = 40

const partitions = 6

// inShop puts the schema of the run into a statement.
func inShop(sql, schema string) string {
	return strings.ReplaceAll(sql, "shop.", pgx.Identifier{schema}.Sanitize()+".")
}

// setUp makes the schema and the topic of a run. After an error nothing of it remains.
func setUp(ctx context.Context, j job) (_ *site.Site, err error) {
	s, err := site.New(ctx, j.DatabaseURL, j.Brokers, j.Run, "outbox-relay demo")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Remove(ctx))
		}
	}()
	conn, hangUp, err := s.Connect(ctx)
	if err != nil {
		return nil, err
	}
	defer hangUp()
	if _, err := conn.Exec(ctx, inShop(tablesSQL, j.Run)); err != nil {
		return nil, fmt.Errorf("create the demo's tables: %w", err)
	}
	if _, err := conn.Exec(ctx, inShop(customersSQL, j.Run), customers); err != nil {
		return nil, fmt.Errorf("create the demo's customers: %w", err)
	}
	s.Group(j.Run)
	return s, s.Topic(ctx, j.Run, partitions)
}
