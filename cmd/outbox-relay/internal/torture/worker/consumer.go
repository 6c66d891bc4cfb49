package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/outbox"
)

const balanceSQL = `-- torture.balance
UPDATE shop.balances SET balance = balance + $3, effects = effects + 1 WHERE grp = $1 AND key = $2`

const effectSQL = `-- torture.effect
INSERT INTO shop.effects (grp, order_id, key, version, amount) VALUES ($1, $2, $3, $4, $5)`

const lockBalancesSQL = `-- torture.lock_balances
SELECT FROM shop.balances WHERE grp = $1 AND key = ANY($2::int[]) ORDER BY key FOR UPDATE`

const balancesSQL = `-- torture.balances
UPDATE shop.balances AS b SET balance = b.balance + d.amount, effects = b.effects + d.n
FROM unnest($2::int[], $3::bigint[], $4::bigint[]) AS d (key, amount, n) WHERE b.grp = $1 AND b.key = d.key`

const effectsSQL = `-- torture.effects
INSERT INTO shop.effects (grp, order_id, key, version, amount)
SELECT $1, o.id, o.key, o.version, o.amount
FROM unnest($2::bigint[], $3::int[], $4::bigint[], $5::bigint[]) WITH ORDINALITY AS o (id, key, version, amount, n) ORDER BY o.n`

// entrySQL takes the lock that orders the entries of a journal.
const entrySQL = `-- torture.entry
WITH next AS (UPDATE shop.journals SET version = version + 1 WHERE grp = $1 RETURNING version)
INSERT INTO shop.entries (grp, version, order_id) SELECT $1, version, $2 FROM next`

const fencedSQL = `-- torture.fenced
INSERT INTO shop.fenced (grp, key, version) VALUES ($1, $2, $3)`

const curedSQL = `-- torture.cured
SELECT EXISTS (SELECT FROM shop.cured)`

// handler handles the messages of a group.
type handler struct {
	Job

	pool *pgxpool.Pool
	mu   sync.Mutex
	seen map[int64]int // attempts of this process at orders that fail at first
}

func consume(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger) error {
	h := &handler{Job: j, pool: pool, seen: map[int64]int{}}
	g := j.Group
	config := consumer.Config{
		Group: j.GroupID(g.Number), Topics: []string{j.Consumed()}, Logger: logger,
		BatchMax: max(1, g.BatchMax>>j.Variant), AttemptsMax: g.AttemptsMax, Forever: g.Forever,
		HandlerTimeout: handlerTimeout, IdleTimeout: 5 * time.Second, LockTimeout: 5 * time.Second,
		RetryMin: 20 * time.Millisecond, RetryMax: time.Second, DrainMax: 2 * time.Second,
		Dedup:     map[string]consumer.Dedup{"payload": consumer.DedupByIDAndPayload, "position": consumer.DedupByPosition}[g.Dedup],
		Order:     map[string]consumer.Order{"key": consumer.OrderByKey, "none": consumer.OrderUnordered}[g.Order],
		Isolation: pgx.TxIsoLevel(g.Isolation),
	}
	if g.Window > 0 {
		windows := []time.Duration{g.Window, time.Minute, 10 * time.Minute, 3 * 24 * time.Hour}
		config.Window = windows[(j.Variant+int(j.Place))%len(windows)]
	}
	if g.Order != "partition" {
		config.Workers = g.Workers
	}
	if g.DeadLetter {
		config.OnFailure, config.DeadLetterTopic = consumer.OnFailureDeadLetter, j.DeadTopic(g.Number)
	}
	kafka := append(j.Kafka(), kgo.SessionTimeout(Session), kgo.HeartbeatInterval(500*time.Millisecond),
		kgo.RebalanceTimeout(Session), kgo.RequestTimeoutOverhead(5*time.Second), kgo.MetadataMinAge(250*time.Millisecond))
	if j.Scene.Relay.ExactlyOnce {
		kafka = append(kafka, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	book, err := ledger.Open(j.Ledgers, j.Name+"-resumes")
	if err != nil {
		return err
	}
	defer func() { _ = book.Close() }()
	kafka = append(kafka, kgo.WithHooks(newResumes(config.Group, book)), kgo.MetadataMaxAge(metadataMax))
	c, err := consumer.New(pool, kafka, h.shape(), config)
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

func (h *handler) shape() consumer.Handler {
	switch h.Group.Shape {
	case scene.ShapeBatch:
		return consumer.Batch(h.batch)
	case scene.ShapeQueued:
		return consumer.Queued(h.queued)
	default:
		return consumer.JSON(h.each)
	}
}

func (h *handler) each(ctx context.Context, tx pgx.Tx, msg *consumer.Message, b scene.Body) error {
	if err := h.begin(ctx, tx, msg, b); err != nil {
		return err
	}
	if scene.ChangesItsMind(b.Order) {
		if err := h.changeItsMind(ctx, tx, msg, b); err != nil {
			return err
		}
	}
	if _, err := tx.Exec(ctx, balanceSQL, h.Group.Number, b.Key, b.Amount); err != nil {
		return err
	}
	if h.bears(b) {
		if err := outbox.Publish(ctx, tx, h.child(msg, b)); err != nil {
			return err
		}
	}
	if h.Group.Journal && scene.IsJournalled(b.Order) {
		if err := h.enter(ctx, tx, b); err != nil {
			return err
		}
	}
	if h.Group.Fences && scene.IsFenced(b) {
		// Twice, as a consumer of a snapshot and of changes does: the second is the same version.
		if err := errors.Join(h.writeFenced(ctx, tx, b), h.writeFenced(ctx, tx, b)); err != nil {
			return err
		}
	}
	_, err := tx.Exec(ctx, effectSQL, h.Group.Number, b.Order, b.Key, b.Version, b.Amount)
	return err
}

// enter publishes an entry of the group's journal, and then locks what orders the entries.
func (h *handler) enter(ctx context.Context, tx pgx.Tx, b scene.Body) error {
	value, err := json.Marshal(scene.Body{Order: b.Order}) // all entries have one key
	if err != nil {
		return err
	}
	if err := outbox.Publish(ctx, tx, outbox.Message{Topic: h.JournalTopic(h.Group.Number), Key: Key(0), Payload: value}); err != nil {
		return err
	}
	_, err = tx.Exec(ctx, entrySQL, h.Group.Number, b.Order)
	return err
}

// writeFenced writes the version of a key, unless it or a later one was written before.
func (h *handler) writeFenced(ctx context.Context, tx pgx.Tx, b scene.Body) error {
	result, err := dedup.Fence(ctx, tx, h.GroupID(h.Group.Number), string(Key(b.Key)), b.Version, nil)
	if err == nil && result.Verdict == dedup.Applied {
		_, err = tx.Exec(ctx, fencedSQL, h.Group.Number, b.Key, b.Version)
	}
	return err
}

// begin makes trouble, and calls the foreign system: for some messages before the trouble, so that a
// later attempt calls again.
func (h *handler) begin(ctx context.Context, db querier, msg *consumer.Message, b scene.Body) error {
	if b.Order%128 == 0 {
		if err := h.call(ctx, msg, b); err != nil {
			return err
		}
		return h.trouble(ctx, db, b)
	}
	if err := h.trouble(ctx, db, b); err != nil {
		return err
	}
	return h.call(ctx, msg, b)
}

var errChangedItsMindLater = errors.New("the handler changed its mind")

// changeItsMind has an effect and a child in a savepoint, and rolls it back.
func (h *handler) changeItsMind(ctx context.Context, tx pgx.Tx, msg *consumer.Message, b scene.Body) error {
	err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
		if _, err := nested.Exec(ctx, effectSQL, h.Group.Number, b.Order, b.Key, b.Version, b.Amount); err != nil {
			return err
		}
		if h.bears(b) {
			if err := outbox.Publish(ctx, nested, h.child(msg, b)); err != nil {
				return err
			}
		}
		return errChangedItsMindLater
	})
	if errors.Is(err, errChangedItsMindLater) {
		return nil
	}
	return err
}

func (h *handler) queued(ctx context.Context, q *consumer.Queue, msg *consumer.Message) error {
	var b scene.Body
	if err := json.Unmarshal(msg.Value, &b); err != nil {
		return consumer.Permanent(err)
	}
	if b.Kind == scene.KindSQL && !h.cured(ctx, h.pool) {
		q.Queue(`SELECT 1 / 0`)
	} else if err := h.begin(ctx, h.pool, msg, b); err != nil {
		return err
	}
	q.Queue(balanceSQL, h.Group.Number, b.Key, b.Amount)
	q.Queue(effectSQL, h.Group.Number, b.Order, b.Key, b.Version, b.Amount)
	if h.bears(b) {
		return q.Publish(ctx, h.child(msg, b))
	}
	return nil
}

func (h *handler) batch(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
	var ids, versions, amounts []int64
	var keys []int32
	type change struct{ amount, n int64 }
	changes := map[int32]change{}
	var children []outbox.Message
	for i, msg := range msgs {
		var b scene.Body
		if err := json.Unmarshal(msg.Value, &b); err != nil {
			return consumer.FailedAt(i, consumer.Permanent(err))
		}
		if err := h.begin(ctx, tx, msg, b); err != nil {
			if b.Kind == scene.KindSQL {
				return err // it does not say whose statement failed
			}
			return consumer.FailedAt(i, err)
		}
		ids, keys, versions, amounts = append(ids, b.Order), append(keys, b.Key), append(versions, b.Version), append(amounts, b.Amount)
		c := changes[b.Key]
		changes[b.Key] = change{c.amount + b.Amount, c.n + 1}
		if h.bears(b) {
			children = append(children, h.child(msg, b))
		}
	}
	changed := slices.Sorted(maps.Keys(changes))
	var sums, ns []int64
	for _, key := range changed {
		sums, ns = append(sums, changes[key].amount), append(ns, changes[key].n)
	}
	if _, err := tx.Exec(ctx, lockBalancesSQL, h.Group.Number, changed); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, balancesSQL, h.Group.Number, changed, sums, ns); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, effectsSQL, h.Group.Number, ids, keys, versions, amounts); err != nil {
		return err
	}
	return outbox.Publish(ctx, tx, children...)
}

func (h *handler) bears(b scene.Body) bool { return h.Group.Children && scene.HasChild(b.Order) }

func (h *handler) child(msg *consumer.Message, b scene.Body) outbox.Message {
	b.Group, b.Padding, b.Kind = h.Group.Number, "", scene.KindPlain
	value, err := json.Marshal(b)
	if err != nil {
		panic(err) // numbers only
	}
	child := outbox.Message{Topic: h.ChildTopic(h.Group.Number), Key: Key(b.Key), Payload: value}
	if h.Group.Shape == scene.ShapeBatch && msg != nil {
		child.ID = msg.OutboxID(scene.StepChild) // in a batch only the handler knows whose child it is
	}
	return child
}

// querier is a transaction or a pool.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func (h *handler) cured(ctx context.Context, db querier) bool {
	var yes bool
	return db.QueryRow(ctx, curedSQL).Scan(&yes) == nil && yes
}

var errSick = errors.New("this message makes trouble until it is cured")

// trouble does what the kind of a message says.
func (h *handler) trouble(ctx context.Context, db querier, b scene.Body) error {
	switch b.Kind {
	case scene.KindPlain, scene.KindLater:
		return nil
	case scene.KindForever:
		return consumer.Permanent(errSick)
	case scene.KindTransient:
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.seen[b.Order]++; h.seen[b.Order] < 3 {
			return errSick
		}
		return nil
	}
	if h.cured(ctx, db) {
		return nil
	}
	switch b.Kind {
	case scene.KindPanic:
		panic(errSick)
	case scene.KindExit:
		os.Exit(ExitStatus) //nolint:forbidigo // what a message may do to its process
	case scene.KindHang:
		<-ctx.Done()
		<-time.After(time.Second) // it ignores its context
		return ctx.Err()
	case scene.KindSQL:
		var n int
		return db.QueryRow(ctx, `SELECT 1 / 0`).Scan(&n)
	}
	return consumer.Permanent(errSick)
}

// call calls the foreign system under a key that is the message's own.
func (h *handler) call(ctx context.Context, msg *consumer.Message, b scene.Body) error {
	if !h.Group.Calls || !scene.IsCalled(b.Order) {
		return nil
	}
	return callBank(ctx, h.Bank, msg.ChildID(scene.StepCharge).String(), callName(h.Group.Number, b.Order))
}

func callBank(ctx context.Context, bank, key, what string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, bank+"/"+what, nil)
	if err != nil {
		return err
	}
	request.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	_, _ = io.Copy(io.Discard, response.Body)
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the bank answered %s", response.Status)
	}
	return nil
}
