package consumertest_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/consumer/consumertest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

func TestMain(m *testing.M) {
	pgtest.SideBySide()
	consumertest.Main(m)
}

const accounts = `CREATE TABLE account (name text PRIMARY KEY, balance int NOT NULL DEFAULT 0);
	CREATE TABLE booking (id bigint GENERATED ALWAYS AS IDENTITY, name text, amount int, booked_at timestamptz DEFAULT now());
	INSERT INTO account VALUES ('a'), ('b')`

func messages() []consumertest.Message {
	return []consumertest.Message{{Key: "a", Value: "5"}, {Key: "b", Value: "7"}, {Key: "a", Value: "11"}, {Value: "13"}}
}

// book is a handler as it should be: it updates, inserts and publishes, all through its
// transaction.
func book(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
	name := string(msg.Key)
	if _, err := tx.Exec(ctx, `UPDATE account SET balance = balance + $2::text::int WHERE name = $1`, name, string(msg.Value)); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO booking (name, amount) VALUES ($1, $2::text::int)`, name, string(msg.Value)); err != nil {
		return err
	}
	return outbox.Publish(ctx, tx, outbox.Message{Topic: "booked", Key: msg.Key, Payload: msg.Value})
}

// Property: a handler that does everything through its transaction passes, in each shape.
func TestVerifyPassesWhatIsRight(t *testing.T) {
	t.Parallel()
	consumertest.Verify(t, consumer.Each(book), messages(), consumertest.Options{Setup: accounts})
	consumertest.Verify(t, consumer.Queued(func(ctx context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue(`UPDATE account SET balance = balance + $2::text::int WHERE name = $1`, string(msg.Key), string(msg.Value))
		return q.Publish(ctx, outbox.Message{Topic: "booked", Key: msg.Key})
	}), messages(), consumertest.Options{Setup: accounts})
	consumertest.Verify(t, consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
		for _, msg := range msgs {
			if err := outbox.Publish(ctx, tx, outbox.Message{ID: msg.PublishID("booked"), Topic: "booked"}); err != nil {
				return err
			}
		}
		return nil
	}), messages(), consumertest.Options{})
}

// Property: a handler's mistake is found, and reported as what it is.
func TestVerifyFindsWhatIsWrong(t *testing.T) { //nolint:tparallel // the cases share own and seen
	t.Parallel()
	var own *pgxpool.Pool
	var seen int
	options := consumertest.Options{Setup: accounts, Prepare: func(_ context.Context, pool *pgxpool.Pool) error {
		own, seen = pool, 0
		return nil
	}}
	for name, tc := range map[string]struct { //nolint:paralleltest // as said
		handle func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error
		says   []string
	}{
		"another connection": {func(ctx context.Context, _ pgx.Tx, msg *consumer.Message) error {
			_, err := own.Exec(ctx, `INSERT INTO booking (name) VALUES ($1)`, string(msg.Value))
			return err
		}, []string{"killed after the handler ran, before COMMIT", "doubled: public.booking", "another connection than its tx"}},
		"chance": {func(ctx context.Context, tx pgx.Tx, _ *consumer.Message) error {
			_, err := tx.Exec(ctx, `INSERT INTO booking (amount) VALUES ($1)`, rand.Int32())
			return err
		}, []string{"a second clean run", "differs from run to run"}},
		"memory": {func(ctx context.Context, tx pgx.Tx, _ *consumer.Message) error {
			seen++
			_, err := tx.Exec(ctx, `INSERT INTO booking (amount) VALUES ($1)`, seen)
			return err
		}, []string{"killed", "different: public.booking", "in memory"}},
		"failure": {func(context.Context, pgx.Tx, *consumer.Message) error {
			return consumer.Permanent(errors.New("no such account"))
		}, []string{"the clean run", "the handler failed", "no such account"}},
		"nothing": {func(context.Context, pgx.Tx, *consumer.Message) error { return nil }, []string{"changed nothing in any table"}},
	} {
		t.Run(name, func(t *testing.T) {
			said := consumertest.Problems(t, consumer.Each(tc.handle), messages(), options)
			for _, text := range tc.says {
				require.Contains(t, strings.Join(said, "\n"), text)
			}
		})
	}
}

// Property: Verify runs the handler with the consumer's own order and workers, and notices keys of
// foreign calls that change when a message is parked and retried.
func TestVerifySeesWorkersAndForeignCalls(t *testing.T) {
	longtest.Only(t, "two of three workers within 20 ms")
	t.Parallel()
	for name, order := range map[string]consumer.Order{"by key": consumer.OrderByKey, "unordered": consumer.OrderUnordered} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var calls consumertest.Calls
			var together, most atomic.Int32
			consumertest.Verify(t, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
				most.Store(max(most.Load(), together.Add(1)))
				defer together.Add(-1)
				calls.Made(msg, "charge", msg.CallKey("charge").String())
				if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.02)`); err != nil {
					return err
				}
				return book(ctx, tx, msg)
			}), messages(), consumertest.Options{Setup: accounts, Calls: &calls, Consumer: func(cfg *consumer.Config) {
				cfg.Order, cfg.Workers = order, 3
			}})
			require.Greater(t, most.Load(), int32(1), "workers run at the same time")
		})
	}
	var calls consumertest.Calls
	said := consumertest.Problems(t, consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		calls.Made(msg, "charge", msg.PublishID("charge").String())
		return book(ctx, tx, msg)
	}), messages(), consumertest.Options{Setup: accounts, Calls: &calls})
	require.Contains(t, strings.Join(said, "\n"), `call "charge"`)
	require.Contains(t, strings.Join(said, "\n"), "was made under")
}
