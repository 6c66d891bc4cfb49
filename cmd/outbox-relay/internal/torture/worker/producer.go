package worker

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

// lockSQL locks the keys that order a transaction's messages, in one order for all writers.
const lockSQL = `-- torture.lock
SELECT key, version FROM shop.keys WHERE key = ANY($1::int[]) ORDER BY key FOR UPDATE`

const advanceSQL = `-- torture.advance
UPDATE shop.keys SET version = keys.version + d.n, amount = keys.amount + d.amount
FROM unnest($1::int[], $2::bigint[], $3::bigint[]) AS d (key, n, amount) WHERE keys.key = d.key`

const ordersSQL = `-- torture.orders
INSERT INTO shop.orders (id, message_id, key, version, amount, kind, request)
SELECT id, message_id, key, version, amount, kind, $7
FROM unnest($1::bigint[], $2::uuid[], $3::int[], $4::bigint[], $5::bigint[], $6::int[]) AS o (id, message_id, key, version, amount, kind)`

// backlogSQL is how many orders the slowest group has still to handle.
const backlogSQL = `-- torture.backlog
SELECT (SELECT coalesce(sum(version), 0) FROM shop.keys)::bigint
  - coalesce((SELECT min(n) FROM (SELECT sum(effects) AS n FROM shop.balances WHERE grp < 100 GROUP BY grp) AS g), 0)::bigint`

// producer writes orders.
type producer struct {
	Job

	rival  Rival // nil: none
	pool   *pgxpool.Pool
	ledger *ledger.Writer
	log    *slog.Logger
	next   atomic.Int64
	full   atomic.Bool // the backlog is
}

func newProducer(pool *pgxpool.Pool, j Job, logger *slog.Logger) (*producer, error) {
	book, err := ledger.Open(j.Ledgers, j.Name)
	if err != nil {
		return nil, err
	}
	p := &producer{Job: j, pool: pool, ledger: book, log: logger}
	// No two processes, and no two in one place, use the same numbers.
	p.next.Store(j.Place<<48 | j.Incarnation<<32)
	return p, nil
}

func produce(ctx context.Context, pool *pgxpool.Pool, j Job, rival Rival, logger *slog.Logger) error {
	p, err := newProducer(pool, j, logger)
	if err != nil {
		return err
	}
	p.rival = rival
	var all errgroup.Group
	all.Go(func() error { return p.watch(ctx) })
	for w := range j.Scene.Producers.Writers {
		random := rand.New(rand.NewPCG(j.Seed, uint64(j.Place<<32|j.Incarnation<<16)|uint64(w))) //nolint:gosec // a seed
		all.Go(func() error { return p.write(ctx, random) })
	}
	return errors.Join(all.Wait(), p.ledger.Close())
}

// watch stops the writers while the consumers are too far behind.
func (p *producer) watch(ctx context.Context) error {
	for pause.For(ctx, 250*time.Millisecond) {
		var backlog int64
		if err := p.pool.QueryRow(ctx, backlogSQL).Scan(&backlog); err == nil {
			p.full.Store(backlog > p.Scene.Backlog)
		}
	}
	return nil
}

// write writes transactions at the writer's part of the rate. What fails is logged: the database may
// be away.
func (p *producer) write(ctx context.Context, random *rand.Rand) error {
	share := float64(p.Scene.Rate) / float64(p.Scene.Producers.Processes*p.Scene.Producers.Writers)
	for ctx.Err() == nil {
		if p.full.Load() {
			pause.For(ctx, 100*time.Millisecond)
			continue
		}
		begun := time.Now()
		n := 1 + random.IntN(p.Scene.Producers.BatchMax)
		if err := p.transaction(ctx, random, n, ""); err != nil && !errors.Is(err, errChangedItsMind) && ctx.Err() == nil {
			p.log.Info("no orders", "error", err)
			pause.For(ctx, 200*time.Millisecond)
		}
		pause.For(ctx, time.Duration(float64(n)/share*float64(time.Second))-time.Since(begun))
	}
	return nil
}

var errChangedItsMind = errors.New("the customer changed their mind")

// transaction writes n orders and publishes their messages.
func (p *producer) transaction(ctx context.Context, random *rand.Rand, n int, request string) error {
	last := p.next.Add(int64(n))
	first := last - int64(n) + 1
	tx, err := p.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	sum, err := p.fill(ctx, tx, random, first, n, request)
	if err != nil {
		return errors.Join(err, p.ledger.Write(ledger.Undone, first, n))
	}
	commit := tx.Commit
	if p.Scene.Producers.Pauses && random.IntN(100) == 0 {
		commit = func(ctx context.Context) error { return p.commitPrepared(ctx, tx, first, random) }
	}
	if err := commit(ctx); err != nil {
		return errors.Join(err, p.ledger.Write(ledger.Unknown, first, n))
	}
	return p.ledger.Write(ledger.Acked, first, n, sum)
}

// commitPrepared commits in two phases, some time apart. If this process ends between them, someone
// else commits: see scene.CommitPreparedSQL.
func (p *producer) commitPrepared(ctx context.Context, tx pgx.Tx, first int64, random *rand.Rand) error {
	name := fmt.Sprintf("'order-%d'", first)
	if _, err := tx.Exec(ctx, "PREPARE TRANSACTION "+name); err != nil {
		return err
	}
	pause.For(ctx, time.Duration(random.IntN(3000))*time.Millisecond)
	_, err := tx.Conn().Exec(ctx, "COMMIT PREPARED "+name)
	return err
}

// fill does everything between BEGIN and COMMIT.
func (p *producer) fill(ctx context.Context, tx pgx.Tx, random *rand.Rand, first int64, n int, request string) (sum int64, err error) {
	pauses := p.Scene.Producers.Pauses && random.IntN(4) == 0
	if pauses {
		// Its transaction ID comes long before its locks.
		if _, err := tx.Exec(ctx, `SELECT pg_current_xact_id(), pg_sleep($1)`, random.Float64()*0.05); err != nil {
			return 0, err
		}
	}
	orders, err := p.draw(ctx, tx, random, first, n)
	if err != nil {
		return 0, err
	}
	sum, err = p.insert(ctx, tx, orders, request)
	if err != nil {
		return 0, err
	}
	if err := p.publish(ctx, tx, random, orders); err != nil {
		return 0, err
	}
	if pauses {
		hold := random.Float64() * 0.05
		if random.IntN(12) == 0 {
			hold = 0.2 + random.Float64()*4 // others publish behind it meanwhile
		}
		if _, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, hold); err != nil {
			return 0, err
		}
	}
	if request == "" && random.IntN(20) == 0 {
		return 0, errChangedItsMind
	}
	return sum, nil
}

type order struct {
	scene.Body

	message uuid.UUID
}

// draw locks a few keys and makes orders of them.
func (p *producer) draw(ctx context.Context, tx pgx.Tx, random *rand.Rand, first int64, n int) ([]order, error) {
	wanted := make([]int32, 0, 8)
	for range min(n, 1+random.IntN(8)) {
		// The square favours low numbers, so that writers queue for them.
		choice := random.Float64()
		wanted = append(wanted, 1+int32(choice*choice*float64(p.Scene.Keys)))
	}
	slices.Sort(wanted)
	wanted = slices.Compact(wanted)
	rows, _ := tx.Query(ctx, lockSQL, wanted)
	type state struct {
		Key     int32
		Version int64
	}
	keys, err := pgx.CollectRows(rows, pgx.RowToStructByPos[state])
	if err != nil {
		return nil, err
	}
	orders := make([]order, n)
	for i := range orders {
		k := &keys[random.IntN(len(keys))]
		k.Version++
		orders[i] = order{
			message: p.messageID(random),
			Body:    scene.Body{Order: first + int64(i), Key: k.Key, Version: k.Version, Amount: 1 + random.Int64N(1000), Kind: p.kind(random), Padding: p.padding(random)},
		}
		if sick := orders[i].Kind != scene.KindPlain && orders[i].Kind != scene.KindLater; sick && !p.Scene.SmallRecords && random.IntN(8) == 0 {
			orders[i].Padding = strings.Repeat("x", largeBytes)
		}
		if orders[i].Kind == scene.KindForever && p.Scene.Producers.Old > 0 {
			orders[i].Kind = scene.KindPermanent // an operator who discards copies would have to know which one it is
		}
		if orders[i].Kind == scene.KindLater {
			orders[i].Version = 0 // it has no place in the order of its key
		}
	}
	return orders, nil
}

// largeBytes is the padding of rare messages, and of more of those that make trouble.
const largeBytes = 20_000

// messageID is rarely an ID from some days ago, as of an event that was late, or a producer that kept
// it.
func (p *producer) messageID(random *rand.Rand) uuid.UUID {
	id := uuid.Must(uuid.NewV7())
	if p.Scene.Producers.Old > 0 && random.IntN(1_000_000) < p.Scene.Producers.Old {
		at := time.Now().Add(-time.Duration(2+random.IntN(5)) * 24 * time.Hour).UnixMilli()
		var text [8]byte
		binary.BigEndian.PutUint64(text[:], uint64(at))
		copy(id[:6], text[2:])
	}
	return id
}

// padding is mostly the scene's, and rarely much.
func (p *producer) padding(random *rand.Rand) string {
	size := p.Scene.Padding
	switch n := random.IntN(100_000); {
	case n == 0:
		size = 900_000
	case n <= 50:
		size = largeBytes
	}
	return strings.Repeat("x", size)
}

// kind draws what a message does to its handler.
func (p *producer) kind(random *rand.Rand) int {
	switch {
	case random.IntN(1_000_000) < p.Scene.Trouble:
		kinds := p.troubles()
		return kinds[random.IntN(len(kinds))]
	case random.IntN(1000) < p.Scene.Producers.Later:
		return scene.KindLater
	}
	return scene.KindPlain
}

// troubles are the kinds that a scene has.
func (p *producer) troubles() []int {
	if p.Scene.Mild {
		return []int{scene.KindPermanent, scene.KindPermanent, scene.KindTransient, scene.KindTransient, scene.KindSQL}
	}
	return []int{scene.KindPermanent, scene.KindTransient, scene.KindPanic, scene.KindHang, scene.KindExit, scene.KindSQL, scene.KindForever}
}

func (p *producer) insert(ctx context.Context, tx pgx.Tx, orders []order, request string) (sum int64, err error) {
	type change struct{ n, amount int64 }
	changes := map[int32]change{}
	var ids, versions, amounts []int64
	var messages []uuid.UUID
	var keys, kinds []int32
	for _, o := range orders {
		sum += o.Amount
		c := changes[o.Key]
		changes[o.Key] = change{c.n + 1, c.amount + o.Amount}
		ids, versions, amounts = append(ids, o.Order), append(versions, o.Version), append(amounts, o.Amount)
		messages, keys, kinds = append(messages, o.message), append(keys, o.Key), append(kinds, int32(o.Kind))
	}
	var changed []int32
	var ns, sums []int64
	for key, c := range changes {
		changed, ns, sums = append(changed, key), append(ns, c.n), append(sums, c.amount)
	}
	if _, err := tx.Exec(ctx, advanceSQL, changed, ns, sums); err != nil {
		return 0, err
	}
	var under *string
	if request != "" {
		under = &request
	}
	_, err = tx.Exec(ctx, ordersSQL, ids, messages, keys, versions, amounts, kinds, under)
	return sum, err
}

func (p *producer) publish(ctx context.Context, tx pgx.Tx, random *rand.Rand, orders []order) error {
	messages := make([]outbox.Message, len(orders))
	var now time.Time // by the database's clock, which may differ
	if p.Scene.Producers.Later > 0 {
		if err := tx.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
			return err
		}
	}
	for i, o := range orders {
		value, err := json.Marshal(o.Body)
		if err != nil {
			return err
		}
		messages[i] = outbox.Message{ID: o.message, Topic: p.Topic, Key: Key(o.Key), Payload: value}
		if o.Kind == scene.KindLater {
			messages[i].DeliverAt = now.Add(time.Duration(random.IntN(8)) * time.Second).Round(time.Second) // many at once
		}
	}
	if p.rival != nil {
		return p.rival.Publish(ctx, tx, messages...)
	}
	if p.Scene.Producers.Pauses && random.IntN(8) == 0 {
		// Published in a savepoint that is rolled back, and again.
		err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
			if err := outbox.Publish(ctx, nested, messages...); err != nil {
				return err
			}
			return errChangedItsMind
		})
		if !errors.Is(err, errChangedItsMind) {
			return err
		}
	}
	if p.Scene.Producers.Buffer {
		buffer := outbox.NewBuffer()
		if err := buffer.Add(ctx, messages...); err != nil {
			return err
		}
		return buffer.Flush(ctx, tx)
	}
	if err := outbox.Publish(ctx, tx, messages...); err != nil {
		return err
	}
	if p.Scene.Relay.Notify {
		return outbox.Notify(ctx, tx)
	}
	return nil
}

// Key is the key of a message.
func Key(key int32) []byte { return strconv.AppendInt([]byte("key-"), int64(key), 10) }

// callName is what a call to the foreign system is for.
func callName(group int16, order int64) string { return fmt.Sprintf("%d/%d", group, order) }
