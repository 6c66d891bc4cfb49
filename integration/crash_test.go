package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const (
	crashKeys, crashVersions = 4, 6
	crashTopic               = "crash"
)

// bad is the message that fails until the handler is fixed.
var bad = event{"k1", 3}

var errBad = consumer.Permanent(errors.New("no such account"))

// crashRecords are the same in every process.
func crashRecords() []*kgo.Record {
	var records []*kgo.Record
	now := time.Now()
	for version := 1; version <= crashVersions; version++ {
		for k := range crashKeys {
			e := event{fmt.Sprintf("k%d", k), version}
			body, _ := json.Marshal(e) // strings and numbers always marshal
			records = append(records, &kgo.Record{
				Topic: crashTopic, Offset: int64(len(records)), Timestamp: now, Key: []byte(e.Key), Value: body,
				Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(fmt.Sprint(e))}},
			})
		}
	}
	return records
}

// deliver is a consumer whose messages come without Kafka, so that it can be killed and started
// quickly.
func (c child) deliver(ctx context.Context, pool *pgxpool.Pool, log *slog.Logger) error {
	cfg := consumer.Config{
		Group: "crash", Topics: []string{crashTopic}, BatchMax: 5, OnFailure: c.OnFailure, AttemptsMax: 100,
		RetryMin: time.Millisecond, RetryMax: 10 * time.Millisecond, Logger: log,
	}
	if c.Shape == "deadly" {
		cfg.AttemptsMax = 3
	}
	if c.OnFailure == consumer.OnFailureDeadLetter {
		cfg.DeadLetterTopic = "letters"
	}
	d, err := consumer.New(pool, nil, c.shape(), cfg)
	if err != nil {
		return err
	}
	done, err := d.Deliver(ctx, crashRecords()...)
	log.Info("delivered", "done", done)
	return err
}

func (c child) shape() consumer.Handler {
	read := func(msg *consumer.Message) (e event, err error) {
		if err = json.Unmarshal(msg.Value, &e); err == nil && e == bad && !c.Mended {
			err = errBad
		}
		return e, err
	}
	switch c.Shape {
	case "deadly":
		return consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			e, err := read(msg)
			if err != nil {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
			return c.effect(ctx, tx, msg, e)
		})
	case "each":
		return consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
			e, err := read(msg)
			if err != nil {
				return err
			}
			return c.effect(ctx, tx, msg, e)
		})
	case "queued":
		return consumer.Queued(func(ctx context.Context, q *consumer.Queue, msg *consumer.Message) error {
			if _, err := read(msg); err != nil {
				return err
			}
			return c.queuedEffect(ctx, q, msg)
		})
	default:
		return consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
			rows := make([][]any, len(msgs))
			for i, msg := range msgs {
				e, err := read(msg)
				if err != nil {
					return err
				}
				rows[i] = []any{[16]byte(msg.ID), e.Key, e.Version, os.Getpid()}
			}
			_, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"message_id", "key", "version", "worker"}, pgx.CopyFromRows(rows))
			return err
		})
	}
}

// Property: whatever the shape of the handler and the policy for failures, a consumer that is
// killed at any point between two durable steps, also while a parked message is tried again, and
// started again, leaves every effect once and those of a key in order; the message that fails is
// parked once, or one dead letter, or blocks. Rows C1, C2, C3, C14, C15 of guarantees.md.
func TestKilledAtEachPointWithEachShapeAndPolicy(t *testing.T) {
	longtest.Only(t, "48 pairs of processes")
	t.Parallel()
	points := []string{
		crashpoint.ConsumerClaimed, crashpoint.ConsumerHandled, crashpoint.ConsumerCommitting, crashpoint.ConsumerCommitted,
		crashpoint.ConsumerMarked, crashpoint.ConsumerReleasing,
	}
	policies := map[string]consumer.OnFailure{"park": consumer.OnFailurePark, "block": consumer.OnFailureBlock, "dead letter": consumer.OnFailureDeadLetter}
	for name, policy := range policies {
		for _, shape := range []string{"each", "queued", "batch"} {
			for _, point := range points {
				if point == crashpoint.ConsumerReleasing && policy != consumer.OnFailurePark {
					continue // nothing is parked
				}
				t.Run(name+"/"+shape+"/"+point, func(t *testing.T) {
					t.Parallel()
					crashTable(t, child{Role: "deliver", Shape: shape, OnFailure: policy, CrashAt: point})
				})
			}
		}
	}
}

func crashTable(t *testing.T, c child) {
	t.Helper()
	ctx := t.Context()
	c.URL = pgtest.Database(t)
	pool := openWorkload(t, c.URL)
	_, err := pool.Exec(ctx, `INSERT INTO versions SELECT 'k' || n, $2 FROM generate_series(0, $1 - 1) n`, crashKeys, crashVersions)
	require.NoError(t, err)
	point := c.CrashAt

	if point != crashpoint.ConsumerReleasing {
		c.killed(t)
	}
	c.CrashAt, c.Mended = "", c.OnFailure == consumer.OnFailureBlock
	c.ends(t)
	all := crashKeys * crashVersions
	switch c.OnFailure {
	case consumer.OnFailureBlock:
	case consumer.OnFailureDeadLetter:
		require.Equal(t, all-1, count(ctx, t, pool, `SELECT count(*) FROM effects`))
		require.Equal(t, 1, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox WHERE topic = 'letters'`))
		_, err := pool.Exec(ctx, `UPDATE effects SET version = version - 1 WHERE key = $1 AND version > $2`, bad.Key, bad.Version)
		require.NoError(t, err)
		_, err = pool.Exec(ctx, `UPDATE versions SET version = version - 1 WHERE key = $1`, bad.Key)
		require.NoError(t, err)
	case consumer.OnFailurePark:
		behind := crashVersions - bad.Version
		require.Equal(t, all-1-behind, count(ctx, t, pool, `SELECT count(*) FROM effects`))
		require.Equal(t, 1, count(ctx, t, pool, `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked' AND reason = 'permanent'`))
		require.Equal(t, behind, count(ctx, t, pool, `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'behind'`))
		_, err := pool.Exec(ctx, `UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp(), released_at = NULL WHERE state = 'parked'`)
		require.NoError(t, err)
		c.CrashAt, c.Mended = point, true
		c.killed(t)
		c.CrashAt, c.Mended = "", true
		c.ends(t)
		require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effectonce.parked_messages`))
	}
	requireEffects(ctx, t, pool)
}

func (c child) killed(t *testing.T) {
	t.Helper()
	p := start(t, c)
	<-p.done
	require.ErrorContains(t, p.err, "killed", p.log.String())
}

func (c child) ends(t *testing.T) {
	t.Helper()
	p := start(t, c)
	<-p.done
	require.NoError(t, p.err, p.log.String())
}

// Property: a message that kills its process again and again is parked after AttemptsMax begun
// attempts, its key waits and everything else has its effect, also what shared its batches. Row C16
// of guarantees.md.
func TestMessageThatKillsTheProcessIsParked(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := child{Role: "deliver", Shape: "deadly", URL: pgtest.Database(t)}
	pool := openWorkload(t, c.URL)
	starts := 0
	for ended := false; !ended; starts++ {
		require.Less(t, starts, 12, "killed for ever")
		p := start(t, c)
		<-p.done
		ended = p.err == nil
	}
	require.Greater(t, starts, 3)
	require.Equal(t, 1, count(ctx, t, pool, `SELECT count(*) FROM effectonce.parked_messages WHERE reason = 'crashed' AND attempts = 3 AND state = 'parked'`))
	require.Equal(t, crashVersions-bad.Version, count(ctx, t, pool, `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'behind'`))
	require.Equal(t, crashKeys*crashVersions-1-(crashVersions-bad.Version), count(ctx, t, pool, `SELECT count(*) FROM effects`))
	id := dedup.MessageID(crashTopic, []byte(fmt.Sprint(bad)))
	require.Equal(t, 1, count(ctx, t, pool, `SELECT count(*) FROM effectonce.parked_messages WHERE reason = 'crashed' AND message_id = '`+id.String()+`'`))
}
