package torture

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
)

// tablesSQL: orders are the ledger of what was ordered, effects of what was done.
const tablesSQL = `
CREATE TABLE public.torture_orders (id bigint PRIMARY KEY, key text NOT NULL, version bigint NOT NULL, habit text NOT NULL);
CREATE TABLE public.torture_discarded (consumer text NOT NULL, source text NOT NULL, id bigint NOT NULL);
CREATE TABLE public.torture_overtaken (source text NOT NULL, id bigint NOT NULL, PRIMARY KEY (id, source));
CREATE TABLE public.torture_requests (number bigint NOT NULL);
CREATE TABLE public.torture_keys (key text PRIMARY KEY, version bigint NOT NULL);
CREATE TABLE public.torture_effects (
  seq bigint GENERATED ALWAYS AS IDENTITY, consumer text NOT NULL, source text NOT NULL, id bigint NOT NULL, key text NOT NULL,
  version bigint NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON public.torture_effects (id);
CREATE TABLE public.torture_uniques (n int, UNIQUE (n) DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE public.torture_hot (k bigint PRIMARY KEY, n bigint NOT NULL);
INSERT INTO public.torture_hot SELECT n, 0 FROM generate_series(0, 2) AS n;
CREATE TABLE public.torture_terminators (n int);
CREATE FUNCTION public.torture_terminate() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER terminate AFTER INSERT ON public.torture_terminators DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION public.torture_terminate();
CREATE ROLE torture_tenant;
CREATE TABLE public.torture_trouble (name text NOT NULL, sqlstate text NOT NULL, over timestamptz NOT NULL);
CREATE FUNCTION public.torture_refuse() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE state text := (SELECT sqlstate FROM public.torture_trouble WHERE name = TG_TABLE_NAME AND over > clock_timestamp() LIMIT 1);
BEGIN
  IF state IS NOT NULL THEN
    RAISE EXCEPTION 'torture: trouble with %', TG_TABLE_NAME USING ERRCODE = state;
  END IF;
  RETURN NULL;
END$$;
DO $$DECLARE refused text; BEGIN
  FOREACH refused IN ARRAY '{` + troubled + `}'::text[] LOOP
    EXECUTE 'CREATE TRIGGER trouble BEFORE INSERT OR UPDATE ON ' || refused || ' EXECUTE FUNCTION public.torture_refuse()';
  END LOOP;
END$$`

// troubled are the tables with which PostgreSQL has trouble sometimes.
const troubled = "public.torture_effects,effectonce.outbox,effectonce.outbox_dead,effectonce.processed_messages,effectonce.consumer_positions,effectonce.parked_messages,effectonce.idempotency_keys"

func (r *run) setUp(ctx context.Context) error {
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Release()
	if err := migrations.Up(ctx, conn.Conn(), migrations.Options{}); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, tablesSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("create the tables: %w", err)
	}
	if _, err := conn.Exec(ctx, `INSERT INTO public.torture_keys SELECT 'k' || n, 0 FROM generate_series(0, $1 - 1) AS n`, keysAll); err != nil {
		return fmt.Errorf("create the keys: %w", err)
	}
	if r.Rival != nil {
		if err := r.Rival.SetUp(ctx, r.pool); err != nil {
			return fmt.Errorf("create the rival's tables: %w", err)
		}
	}
	batch := &pgx.Batch{}
	batch.Queue("COMMIT")
	batch.Queue(`SELECT name FROM pg_prepared_statements WHERE statement = 'COMMIT'`).QueryRow(func(row pgx.Row) error { return row.Scan(&r.preparedCommit) })
	created, err := kadm.NewClient(r.client).CreateTopics(ctx, partitions, 1, nil, topicOrders, topicMore, topicChild, topicDead)
	return errors.Join(err, created.Error(), conn.SendBatch(ctx, batch).Close())
}

const (
	writersAll   = 3
	writerGapMax = 80 * time.Millisecond
	waitsMax     = 300 * time.Millisecond // of a transaction that stays open
	scheduledMax = 4 * time.Second
	preparedMax  = 3 * time.Second
	clockMax     = time.Hour
	paddingBytes = 3000 // more than refusedBytes
)

var errChange = errors.New("torture: the shop changes its mind")

func (r *run) startWriters(ctx context.Context, writers *sync.WaitGroup) {
	random := func(n uint64) *rand.Rand { return rand.New(rand.NewPCG(r.plan.Seed, n)) } //nolint:gosec // repeatable
	for w := range uint64(writersAll) {
		writers.Go(func() {
			for random := random(100 + w); pause.For(ctx, between(random, 0, writerGapMax)); {
				r.order(context.WithoutCancel(ctx), random)
			}
		})
	}
	for s := range uint64(shoppersAll) {
		writers.Go(func() { r.shop(ctx, random(200+s)) })
	}
	if r.plan.Flooded && r.Rival == nil {
		writers.Go(func() { r.flood(ctx, random(300)) })
	}
	if r.plan.Again {
		writers.Go(func() { r.publishAgain(ctx) })
	}
}

// order places up to four orders in one transaction.
func (r *run) order(ctx context.Context, random *rand.Rand) {
	var placed []int64
	err := pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		for range 1 + random.IntN(4) {
			id, err := r.place(ctx, tx, random)
			if err != nil {
				return err
			}
			placed = append(placed, id)
		}
		switch random.IntN(30) {
		case 0, 1, 2:
			return errChange
		case 3:
			pause.For(ctx, between(random, 0, waitsMax))
		case 4: // the COMMIT that follows does nothing
			_, err := tx.Exec(ctx, fmt.Sprintf("PREPARE TRANSACTION 'torture %d'", placed[0]))
			return err
		}
		return nil
	})
	if err != nil { // rolled back, for example after a deadlock among keys, or unknown
		r.logger.Info("shop", "orders", placed, "error", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.acknowledged = append(r.acknowledged, placed...)
}

// commitPrepared is a manager of transactions over two databases: what is prepared will be committed, some of it late.
func (r *run) commitPrepared(ctx context.Context) {
	for pause.For(ctx, restartGap) {
		rows, _ := r.pool.Query(ctx, `SELECT gid FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - random() * $1::interval`, preparedMax)
		prepared, _ := pgx.CollectRows(rows, pgx.RowTo[string]) // a server that is down is asked again
		for _, gid := range prepared {
			_, err := r.pool.Exec(ctx, "COMMIT PREPARED '"+gid+"'")
			r.logger.Info("shop: commit prepared", "transaction", gid, "error", err)
		}
	}
}

// place places one order in a transaction.
func (r *run) place(ctx context.Context, tx pgx.Tx, random *rand.Rand) (int64, error) {
	key := random.IntN(keysAll)
	e := event{ID: r.orders.Add(1), Key: fmt.Sprint("k", key), Habit: r.drawHabit(random, r.plan.rarely(12))}
	topic := topicMore
	if key < keysAll/4 {
		topic = topicOrders
	} else if random.IntN(60) == 0 {
		e.Padding = strings.Repeat("x", paddingBytes)
	}
	if err := tx.QueryRow(ctx, `UPDATE public.torture_keys SET version = version + 1 WHERE key = $1 RETURNING version`, e.Key).Scan(&e.Version); err != nil {
		return 0, err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO public.torture_orders VALUES ($1, $2, $3, $4)`, e.ID, e.Key, e.Version, e.Habit); err != nil {
		return 0, err
	}
	payload, err := json.Marshal(e)
	if err != nil {
		return 0, err
	}
	m := outbox.Message{Topic: topic, Key: []byte(e.Key), Payload: payload}
	if random.IntN(30) == 0 { // a producer whose clock is wrong
		if m.ID, err = uuid.NewV7(); err != nil {
			return 0, err
		}
		at := time.Now().Add(between(random, -clockMax, clockMax)).UnixMilli()
		binary.BigEndian.PutUint32(m.ID[:], uint32(at>>16))
		binary.BigEndian.PutUint16(m.ID[4:], uint16(at))
	}
	if r.plan.Scheduled && random.IntN(5) == 0 {
		m.DeliverAt = time.Now().Add(between(random, 0, scheduledMax))
	}
	return e.ID, r.publish(ctx, tx, m)
}

// flood places orders of all keys at once, as a program in any language does, while its earlier ones take effect.
func (r *run) flood(ctx context.Context, random *rand.Rand) {
	var before, last int64
	for pause.For(ctx, between(random, 0, 10*writerGapMax)) {
		each := int64(1 + random.IntN(floodMax))
		all, base := each*keysAll, int64(0)
		err := pgx.BeginFunc(context.WithoutCancel(ctx), r.pool, func(tx pgx.Tx) error {
			base = r.orders.Add(all) - all
			_, err := tx.Exec(ctx, floodSQL, each, base, r.drawHabit(random, 2), topicOrders, topicMore)
			return err
		})
		r.logger.Info("shop: flood", "orders", all, "error", err)
		if err != nil {
			continue
		}
		r.mu.Lock()
		for id := range all {
			r.acknowledged = append(r.acknowledged, base+1+id)
		}
		r.mu.Unlock()
		before, last = last, base+all
		for deadline := time.Now().Add(floodWaitMax); time.Now().Before(deadline) && pause.For(ctx, restartGap); {
			var effects int
			err := r.pool.QueryRow(ctx, `SELECT count(*) FROM public.torture_effects WHERE id = $1`, before).Scan(&effects)
			if before == 0 || err == nil && effects >= 4 {
				break
			}
		}
	}
}

const (
	floodMax     = 400 // orders of a key
	floodWaitMax = 5 * time.Second
	floodSQL     = `WITH numbered AS (
		UPDATE public.torture_keys SET version = version + $1 RETURNING key, version - $1 AS before
	), placed AS (
		INSERT INTO public.torture_orders SELECT $2 + row_number() OVER (ORDER BY n, key), key, before + n, CASE WHEN n = 1 AND key = 'k7' THEN $3 ELSE '' END
		FROM numbered, generate_series(1, $1) AS n RETURNING id, key, version, habit
	) INSERT INTO effectonce.outbox (topic, key, payload)
	SELECT CASE WHEN substr(key, 2)::int < 10 THEN $4 ELSE $5 END, convert_to(key, 'UTF8'),
		convert_to(jsonb_build_object('ID', id, 'Key', key, 'Version', version, 'Habit', habit)::text, 'UTF8') FROM placed ORDER BY id`
)

// publishAgain is a producer that sends records again, with everything that they have, or with another
// payload: the second is a conflict.
func (r *run) publishAgain(ctx context.Context) {
	client, err := kgo.NewClient(kgo.SeedBrokers(r.kafka.Brokers...), kgo.ConsumeTopics(topicOrders, topicMore, topicChild),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		r.broken("a second producer: %v", err)
		return
	}
	defer client.Close()
	random := rand.New(rand.NewPCG(r.plan.Seed, 99)) //nolint:gosec // repeatable
	// Without an order the second may be the first that is handled.
	conflicts := !slices.ContainsFunc(r.plan.Groups, func(g GroupPlan) bool { return !g.ordered() })
	for ctx.Err() == nil {
		client.PollFetches(ctx).EachRecord(func(record *kgo.Record) {
			if random.IntN(15) > 0 {
				return
			}
			again := &kgo.Record{Topic: record.Topic, Partition: record.Partition, Key: record.Key, Value: record.Value, Headers: record.Headers}
			if random.IntN(4) == 0 {
				again.Timestamp = time.Now().Add(between(random, -clockMax, clockMax))
			}
			var e event
			err := json.Unmarshal(record.Value, &e)
			if conflicts && !e.Garbage && random.IntN(min(20, r.plan.rarely(4))) == 0 {
				e.ID, e.Garbage = -e.ID, true
				again.Value, _ = json.Marshal(e) // no event is an error
			}
			if err != nil {
				r.broken("a second producer: %v", err)
			}
			client.Produce(ctx, again, nil)
		})
	}
}
