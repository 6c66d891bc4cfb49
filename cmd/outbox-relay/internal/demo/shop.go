package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/site"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

const missingSQL = `-- demo.missing
SELECT n FROM generate_series(1, $1::bigint) AS n WHERE NOT EXISTS (SELECT FROM shop.orders WHERE id = n) ORDER BY n`

// versionSQL runs before the event is published: it locks the row that orders a customer's writers.
const versionSQL = `-- demo.version
UPDATE shop.customers SET version = version + 1 WHERE name = $1 RETURNING version`

const orderSQL = `-- demo.order
INSERT INTO shop.orders (id, message_id, customer, version, amount) VALUES ($1, $2, $3, $4, $5)`

// event is the body of a message.
type event struct {
	Order    int64  `json:"order"`
	Customer string `json:"customer"`
	Version  int64  `json:"version"`
	Amount   int64  `json:"amount"`
}

const (
	writers     = 8
	attemptsMax = 64
	// rollbacks and pauses are probabilities of an attempt. A pause under the lock makes commit
	// order differ from the order in which transactions began.
	rollbacks = 0.12
	pauses    = 0.25
	pauseMax  = 15 * time.Millisecond
)

type shop struct {
	job
	pool   *pgxpool.Pool
	outbox *outbox.Outbox
}

// runShop places the orders that are missing from the database, each when it is due, and returns
// when all exist. Orders that a killed shop did not place are due at once.
func runShop(ctx context.Context, pool *pgxpool.Pool, j job) error {
	box, err := outbox.New(outbox.Config{Schema: j.Run})
	if err != nil {
		return err
	}
	s := &shop{job: j, pool: pool, outbox: box}
	rows, _ := pool.Query(ctx, inShop(missingSQL, j.Run), j.Orders)
	missing, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return fmt.Errorf("find the orders that are still to be placed: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	due := make(chan int64)
	var workers sync.WaitGroup
	for range writers {
		workers.Go(func() {
			for id := range due {
				if err := s.place(ctx, id); err != nil {
					cancel(err)
				}
			}
		})
	}
	s.schedule(ctx, missing, due)
	close(due)
	workers.Wait()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// schedule sends each order when it is due, the first ones at the start of the run.
func (s *shop) schedule(ctx context.Context, missing []int64, due chan<- int64) {
	interval := s.Duration / time.Duration(s.Orders)
	for _, id := range missing {
		if !pause.For(ctx, time.Until(s.Start.Add(time.Duration(id)*interval))) {
			return
		}
		select {
		case due <- id:
		case <-ctx.Done():
			return
		}
	}
}

var errChangedItsMind = errors.New("the customer changed their mind")

// place retries until the order is committed. If an attempt's COMMIT got no answer, the primary key
// shows at the next one whether it committed.
func (s *shop) place(ctx context.Context, id int64) error {
	var err error
	for attempt := range uint64(attemptsMax) {
		random := newRandom(s.Seed, streamOrders+uint64(id)*attemptsMax+attempt)
		err = s.attempt(ctx, random, id)
		var pgErr *pgconn.PgError
		switch {
		case err == nil, errors.As(err, &pgErr) && pgErr.Code == "23505" && pgErr.ConstraintName == "orders_pkey":
			return nil
		case errors.Is(err, errChangedItsMind):
			continue
		}
		if !pause.For(ctx, 50*time.Millisecond) {
			return nil
		}
	}
	return fmt.Errorf("place order %d, attempt %d: %w", id, attemptsMax, err)
}

func (s *shop) attempt(ctx context.Context, random *rand.Rand, id int64) error {
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	messageID, err := uuid.NewV7()
	if err != nil {
		return err
	}
	// The square favours low numbers: some customers order very often, so that writers queue for
	// them.
	choice := random.Float64()
	body := event{Order: id, Customer: fmt.Sprintf("customer-%d", 1+int(choice*choice*customers)), Amount: 1 + random.Int64N(1000)}
	if err := tx.QueryRow(ctx, inShop(versionSQL, s.Run), body.Customer).Scan(&body.Version); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, inShop(orderSQL, s.Run), id, messageID, body.Customer, body.Version, body.Amount); err != nil {
		return err
	}
	payload, err := json.Marshal(body)
	if err != nil {
		return err
	}
	err = s.outbox.Publish(ctx, tx, outbox.Message{ID: messageID, Topic: s.Run, Key: []byte(body.Customer), Payload: payload})
	if err != nil {
		return err
	}
	if random.Float64() < pauses && !pause.For(ctx, time.Duration(random.Int64N(int64(pauseMax)))) {
		return ctx.Err()
	}
	if random.Float64() < rollbacks {
		return errChangedItsMind
	}
	return tx.Commit(ctx)
}

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
