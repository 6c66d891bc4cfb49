package demo

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/migrations"
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

// made is what a run created and will remove: nothing else of the same name.
type made struct{ schema, topic bool }

// setUp creates the schema and the topic of a run.
func setUp(ctx context.Context, j job, m *made) error {
	conn, err := pgx.Connect(ctx, j.DatabaseURL)
	if err != nil {
		return err
	}
	defer hangUp(ctx, conn)
	if err := ownschema.MakeNew(ctx, conn, j.Schema, "outbox-relay demo"); err != nil {
		return err
	}
	m.schema = true
	if err := migrations.Up(ctx, conn, migrations.Options{Schema: j.Schema}); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, inShop(tablesSQL, j.Schema)); err != nil {
		return fmt.Errorf("create the demo's tables: %w", err)
	}
	if _, err := conn.Exec(ctx, inShop(customersSQL, j.Schema), customers); err != nil {
		return fmt.Errorf("create the demo's customers: %w", err)
	}
	client, err := kgo.NewClient(j.kafka()...)
	if err != nil {
		return err
	}
	defer client.Close()
	// -1 leaves the number of replicas to the cluster.
	_, err = kadm.NewClient(client).CreateTopic(ctx, partitions, -1, nil, j.Topic)
	// After another error it may have been created
	m.topic = !errors.Is(err, kerr.TopicAlreadyExists)
	if err != nil {
		return fmt.Errorf("create topic %s: %w", j.Topic, err)
	}
	return nil
}

// hangUpMax bounds the disconnect from the database.
const hangUpMax = time.Second

// hangUp also runs after ctx was cancelled. Nothing depends on its success.
func hangUp(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hangUpMax)
	defer cancel()
	_ = conn.Close(ctx)
}

// tearDownMax bounds the cleanup: a server that does not answer must not block the terminal.
const tearDownMax = 10 * time.Second

// tearDown removes what setUp created. It also runs after ctx was cancelled.
func tearDown(ctx context.Context, j job, m made) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tearDownMax)
	defer cancel()
	var problems []error
	if m.schema {
		problems = append(problems, dropSchema(ctx, j))
	}
	if m.topic {
		problems = append(problems, deleteTopic(ctx, j))
	}
	return errors.Join(problems...)
}

func dropSchema(ctx context.Context, j job) error {
	conn, err := pgx.Connect(ctx, j.DatabaseURL)
	if err != nil {
		return fmt.Errorf("drop schema %s: %w", j.Schema, err)
	}
	defer hangUp(ctx, conn)
	if _, err := conn.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{j.Schema}.Sanitize()+" CASCADE"); err != nil {
		return fmt.Errorf("drop schema %s: %w", j.Schema, err)
	}
	return nil
}

func deleteTopic(ctx context.Context, j job) error {
	client, err := kgo.NewClient(j.kafka()...)
	if err != nil {
		return err
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	if _, err := admin.DeleteTopic(ctx, j.Topic); err != nil {
		return fmt.Errorf("delete topic %s: %w", j.Topic, err)
	}
	// The group may still have members that were killed; it then expires without further action.
	_, _ = admin.DeleteGroup(ctx, j.Group)
	return nil
}
