package worker

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

// Rival takes the engine's place in the processes of a round.
type Rival interface {
	// Publish adds messages to the rival's outbox. A message without ID gets one.
	Publish(ctx context.Context, tx pgx.Tx, messages ...outbox.Message) error
	// Relay publishes what is in the outbox, until ctx is cancelled.
	Relay(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger) error
	// Consume handles the messages of the job's group, until ctx is cancelled.
	Consume(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger) error
}

// Preparer is a rival that needs tables or rights of its own.
type Preparer interface {
	// Prepare creates them. pool is that of the database's owner.
	Prepare(ctx context.Context, pool *pgxpool.Pool, j Job) error
}

// byHand is how the pipeline is usually written by hand, as carefully as articles about it advise: an
// outbox that replicas drain with SKIP LOCKED, and a consumer that claims the message's ID in the
// transaction of its effect and commits offsets afterwards. The naive consumer has no claims.
type byHand struct{ claims bool }

// HeaderID is the header in which a record has its message's ID: the judge reads it there.
const HeaderID = "message-id"

// HandledWithin bounds the transaction of a rival's handler.
const HandledWithin = 20 * time.Second

const rivalPublishSQL = `-- rival.publish
INSERT INTO shop.outbox (message_id, topic, key, payload)
SELECT id, topic, key, payload FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[]) WITH ORDINALITY AS m (id, topic, key, payload, n) ORDER BY n`

// Publish inserts messages into the outbox.
func (byHand) Publish(ctx context.Context, tx pgx.Tx, messages ...outbox.Message) error {
	var ids []uuid.UUID
	var topics []string
	var keys, payloads [][]byte
	for _, m := range messages {
		if m.ID == uuid.Nil {
			m.ID = uuid.Must(uuid.NewV7())
		}
		ids, topics = append(ids, m.ID), append(topics, m.Topic)
		keys, payloads = append(keys, m.Key), append(payloads, m.Payload)
	}
	_, err := tx.Exec(ctx, rivalPublishSQL, ids, topics, keys, payloads)
	return err
}

const rivalTakeSQL = `-- rival.take
SELECT id, message_id, topic, key, payload FROM shop.outbox ORDER BY id LIMIT 500 FOR UPDATE SKIP LOCKED`

// Relay drains the outbox: rows are locked, published, deleted, in one transaction.
func (byHand) Relay(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger) error {
	client, err := kgo.NewClient(j.Kafka()...)
	if err != nil {
		return err
	}
	defer client.Close()
	for ctx.Err() == nil {
		n, err := rivalDrain(ctx, pool, client)
		if err != nil && ctx.Err() == nil {
			logger.Info("nothing published", "error", err)
			pause.For(ctx, 200*time.Millisecond)
		}
		if n == 0 {
			pause.For(ctx, 5*time.Millisecond)
		}
	}
	return nil
}

func rivalDrain(ctx context.Context, pool *pgxpool.Pool, client *kgo.Client) (n int, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, rivalTakeSQL)
		type row struct {
			ID           int64
			Message      uuid.UUID
			Topic        string
			Key, Payload []byte
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil || len(all) == 0 {
			return err
		}
		records, ids := make([]*kgo.Record, len(all)), make([]int64, len(all))
		for i, r := range all {
			ids[i] = r.ID
			records[i] = &kgo.Record{Topic: r.Topic, Key: r.Key, Value: r.Payload, Headers: []kgo.RecordHeader{{Key: HeaderID, Value: []byte(r.Message.String())}}}
		}
		limited, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := client.ProduceSync(limited, records...).FirstErr(); err != nil {
			return err
		}
		n = len(all)
		_, err = tx.Exec(ctx, `DELETE FROM shop.outbox WHERE id = ANY($1)`, ids)
		return err
	})
	return n, err
}

const rivalClaimSQL = `-- rival.claim
INSERT INTO shop.processed (grp, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`

// Consume consumes plainly.
func (h byHand) Consume(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger) error {
	return ConsumePlainly(ctx, pool, j, logger, h, h.claims)
}

// ConsumePlainly handles one message per transaction, with a claim in it or without, and commits
// offsets after it.
func ConsumePlainly(ctx context.Context, pool *pgxpool.Pool, j Job, logger *slog.Logger, rival Rival, claims bool) error {
	client, err := kgo.NewClient(append(j.Kafka(), kgo.ConsumerGroup(j.GroupID(j.Group.Number)), kgo.ConsumeTopics(j.Consumed()), kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.SessionTimeout(Session), kgo.HeartbeatInterval(500*time.Millisecond), kgo.BlockRebalanceOnPoll())...)
	if err != nil {
		return err
	}
	defer client.CloseAllowingRebalance()
	for ctx.Err() == nil {
		client.AllowRebalance()
		for _, record := range client.PollRecords(ctx, 500).Records() {
			for ctx.Err() == nil {
				err := handlePlainly(ctx, pool, j, record, rival, claims)
				if err == nil {
					break
				}
				logger.Info("not handled; again", "error", err)
				pause.For(ctx, 100*time.Millisecond)
			}
		}
		if ctx.Err() == nil {
			if err := client.CommitUncommittedOffsets(ctx); err != nil {
				logger.Info("offsets are not committed", "error", err)
			}
		}
	}
	return nil
}

var errNoID = errors.New("the record has no ID")

func handlePlainly(ctx context.Context, pool *pgxpool.Pool, j Job, record *kgo.Record, rival Rival, claims bool) error {
	var b scene.Body
	if err := json.Unmarshal(record.Value, &b); err != nil {
		return nil // garbage is passed over
	}
	var id string
	for _, h := range record.Headers {
		if h.Key == HeaderID {
			id = string(h.Value)
		}
	}
	if id == "" {
		return errNoID
	}
	ctx, cancel := context.WithTimeout(ctx, HandledWithin)
	defer cancel()
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if claims {
			claimed, err := tx.Exec(ctx, rivalClaimSQL, j.Group.Number, id)
			if err != nil || claimed.RowsAffected() == 0 {
				return err
			}
		}
		return Affect(ctx, tx, j, rival, b)
	})
}

// Affect has the effect of a message in a transaction, and publishes its child.
func Affect(ctx context.Context, tx pgx.Tx, j Job, rival Rival, b scene.Body) error {
	if _, err := tx.Exec(ctx, balanceSQL, j.Group.Number, b.Key, b.Amount); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, effectSQL, j.Group.Number, b.Order, b.Key, b.Version, b.Amount); err != nil {
		return err
	}
	h := handler{Job: j}
	if !h.bears(b) {
		return nil
	}
	return rival.Publish(ctx, tx, h.child(nil, b))
}
