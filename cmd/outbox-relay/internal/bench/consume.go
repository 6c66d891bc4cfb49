package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/nodedup"
)

// consumeBench is one run of Consume.
type consumeBench struct {
	*site

	opts    ConsumeOptions
	samples samples
	note    func(format string, args ...any)
}

// load is a topic with its messages. Each group reads it from the start.
type load struct {
	topic    string
	messages int
}

// Consume measures how many messages per second, each with an effect of one insert, the textbook
// loop and the engine with different handlers handle. It also measures how much space and
// write-ahead log a claim takes.
func Consume(ctx context.Context, opts ConsumeOptions) (_ *ConsumeReport, err error) {
	opts, err = opts.withDefaults()
	if err != nil {
		return nil, err
	}
	s, err := newSite(ctx, opts.Servers)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	b := &consumeBench{
		site: s, opts: opts, samples: samples{},
		note: func(format string, args ...any) { opts.Progress(fmt.Sprintf(format, args...)) },
	}
	if err := b.exec(ctx, "create the benchmark's tables", consumeTablesSQL); err != nil {
		return nil, err
	}
	loads, err := b.loads(ctx)
	if err != nil {
		return nil, err
	}
	for round := range opts.Rounds {
		if err := b.round(ctx, round, loads); err != nil {
			return nil, err
		}
	}
	return newConsumeReport(opts, b.samples), nil
}

// loads fills the topics. Slower variants get fewer messages, so that each takes a second or more
// and the whole run does not take long.
func (b *consumeBench) loads(ctx context.Context) (map[string]load, error) {
	loads := map[string]load{
		"textbook":    {messages: max(MessagesMin/10, b.opts.Messages/40)},
		"per_message": {messages: max(MessagesMin/5, b.opts.Messages/10)},
		"statement":   {messages: max(MessagesMin/2, b.opts.Messages/4)},
		"by_id":       {messages: b.opts.Messages},
		"stream":      {messages: b.opts.Messages / 2},
	}
	for name, l := range loads {
		partitions := b.opts.Partitions
		if name == "stream" {
			partitions = 1
		}
		topic, err := b.topic(ctx, name, partitions)
		if err != nil {
			return nil, err
		}
		l.topic = topic
		loads[name] = l
		b.note("producing %d messages for %s", l.messages, name)
		if err := b.produce(ctx, l); err != nil {
			return nil, err
		}
	}
	return loads, nil
}

// round runs every variant once. The order rotates, so that no variant always comes first.
func (b *consumeBench) round(ctx context.Context, round int, loads map[string]load) error {
	variants := []func(ctx context.Context, round int, l map[string]load) error{b.textbookTurn, b.perMessageTurns, b.statementTurn, b.queuedTurns, b.engineTurns}
	for i := range variants {
		if err := variants[(i+round)%len(variants)](ctx, round, loads); err != nil {
			return fmt.Errorf("round %d: %w", round+1, err)
		}
	}
	return nil
}

func (b *consumeBench) textbookTurn(ctx context.Context, round int, loads map[string]load) error {
	if err := errors.Join(b.machineTurn(ctx), b.clean(ctx)); err != nil {
		return err
	}
	rate, err := b.textbook(ctx, loads["textbook"], b.group("textbook-"+strconv.Itoa(round)))
	return b.finish(ctx, "textbook", round, loads["textbook"], rate, err)
}

// perMessageTurns runs the usual faster variants of the textbook loop, message by message.
func (b *consumeBench) perMessageTurns(ctx context.Context, round int, loads map[string]load) error {
	for key, run := range map[string]func(context.Context, load, string) (float64, error){
		"textbook_parallel": b.textbookParallel, "watermill": b.watermill,
	} {
		if err := b.clean(ctx); err != nil {
			return err
		}
		rate, err := run(ctx, loads["per_message"], b.group(key+"-"+strconv.Itoa(round)))
		if err := b.finish(ctx, key, round, loads["per_message"], rate, err); err != nil {
			return err
		}
	}
	return nil
}

// engineTurns runs the variants that are compared with by_id and no_dedup: the level ByPosition,
// whole batches, a held key.
func (b *consumeBench) engineTurns(ctx context.Context, round int, loads map[string]load) error {
	l := loads["by_id"]
	group := func(key string) string { return b.group(key + "-" + strconv.Itoa(round)) }
	if err := b.clean(ctx); err != nil {
		return err
	}
	rate, err := b.engine(ctx, l, group("by-position"), b.queue(), consumer.DedupByPosition)
	if err := b.finish(ctx, "by_position", round, l, rate, err); err != nil {
		return err
	}
	if err := b.clean(ctx); err != nil {
		return err
	}
	rate, err = b.engine(ctx, l, group("batch-copy"), b.copyBatch(), consumer.DedupByID)
	if err := b.finish(ctx, "batch_copy", round, l, rate, err); err != nil {
		return err
	}
	return b.parkedKey(ctx, round, l, group("parked-key"))
}

// parkedKey runs by_id while one key in a thousand is held: its messages are parked behind it.
func (b *consumeBench) parkedKey(ctx context.Context, round int, l load, group string) error {
	if err := b.clean(ctx); err != nil {
		return err
	}
	claims, err := dedup.New(dedup.Config{Schema: b.schema})
	if err != nil {
		return err
	}
	registered, err := claims.Register(ctx, b.pool, dedup.Registration{Name: group + "/" + l.topic, Group: group, Topics: []string{l.topic}})
	if err != nil {
		return err
	}
	if _, err := b.pool.Exec(ctx, b.sql(holdKeySQL), registered.ID(), l.topic, b.opts.Partitions); err != nil {
		return fmt.Errorf("hold a key: %w", err)
	}
	rate, err := b.engine(ctx, l, group, b.queue(), consumer.DedupByID)
	handled := l
	handled.messages -= (l.messages + keysDistinct - 1) / keysDistinct
	return errors.Join(b.finish(ctx, "parked_key", round, handled, rate, err), b.exec(ctx, "empty the parked messages", emptyParkedSQL))
}

// queue is the handler with one round trip for the effects of a batch.
func (b *consumeBench) queue() consumer.Handler {
	effect := b.sql(effectSQL)
	return consumer.Queued(func(_ context.Context, q *consumer.Queue, msg *consumer.Message) error {
		q.Queue(effect, string(msg.Key), msg.Value)
		return nil
	})
}

// copyBatch is the handler for whole batches.
func (b *consumeBench) copyBatch() consumer.Handler {
	table := pgx.Identifier{b.schema, "bench_effects"}
	return consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
		_, err := tx.CopyFrom(ctx, table, []string{"account", "body"}, pgx.CopyFromSlice(len(msgs), func(i int) ([]any, error) {
			return []any{string(msgs[i].Key), msgs[i].Value}, nil
		}))
		return err
	})
}

func (b *consumeBench) statementTurn(ctx context.Context, round int, loads map[string]load) error {
	if err := b.clean(ctx); err != nil {
		return err
	}
	effect := b.sql(effectSQL)
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		_, err := tx.Exec(ctx, effect, string(msg.Key), msg.Value)
		return err
	})
	rate, err := b.engine(ctx, loads["statement"], b.group("statement-"+strconv.Itoa(round)), handler, consumer.DedupByID)
	return b.finish(ctx, "statement", round, loads["statement"], rate, err)
}

// queuedTurns runs the variants with one round trip for the effects of a batch. They belong
// together: the cost of the claim, and of the engine, is the difference between two of them. Their
// order changes from round to round.
func (b *consumeBench) queuedTurns(ctx context.Context, round int, loads map[string]load) error {
	l, handler := loads["by_id"], b.queue()
	group := func(key string) string { return b.group(key + "-" + strconv.Itoa(round)) }
	var with, without footprint
	turns := []func() error{
		func() (err error) {
			own := group("by-id")
			if with, err = b.queued(ctx, "by_id", round, l, own, handler); err != nil {
				return err
			}
			return b.allDuplicates(ctx, round, l, own, handler)
		},
		func() error {
			if err := b.clean(ctx); err != nil {
				return err
			}
			rate, err := b.handLoop(ctx, l, group("hand-loop"))
			return b.finish(ctx, "hand_loop", round, l, rate, err)
		},
		func() (err error) {
			without, err = b.queued(nodedup.With(ctx), "no_dedup", round, l, group("no-dedup"), handler)
			return err
		},
	}
	for i := range turns {
		if err := turns[(i+round)%len(turns)](); err != nil {
			return err
		}
	}
	b.footprints("_interleaved", with, without, l)
	return b.streamTurn(ctx, round, loads["stream"], handler)
}

// streamTurn measures the space of a claim if the IDs come in the order of their time, as from one
// partition. If several partitions are handled at the same time, their IDs interleave, which leaves
// the index pages less full.
func (b *consumeBench) streamTurn(ctx context.Context, round int, l load, handler consumer.Handler) error {
	with, err := b.queued(ctx, "stream", round, l, b.group("stream-"+strconv.Itoa(round)), handler)
	if err != nil {
		return err
	}
	without, err := b.queued(nodedup.With(ctx), "stream_no_dedup", round, l, b.group("stream-no-dedup-"+strconv.Itoa(round)), handler)
	if err != nil {
		return err
	}
	b.footprints("", with, without, l)
	return nil
}

// footprint is the space that a run took.
type footprint struct{ claims, wal int64 }

func (b *consumeBench) footprints(suffix string, with, without footprint, l load) {
	b.samples.add("bytes_per_message"+suffix, float64(with.claims)/float64(l.messages))
	if b.mayCheckpoint {
		b.samples.add("wal_bytes_per_message"+suffix, float64(with.wal-without.wal)/float64(l.messages))
	}
}

// queued runs the queue variant and returns the space that it took. The write-ahead log is the
// whole server's: on a server with other work the figure is too high.
func (b *consumeBench) queued(ctx context.Context, key string, round int, l load, group string, handler consumer.Handler) (took footprint, err error) {
	if err := b.clean(ctx); err != nil {
		return took, err
	}
	bytesBefore, err := b.number(ctx, "the size of processed_messages", claimBytesSQL)
	if err != nil {
		return took, err
	}
	walBefore, err := b.number(ctx, "the position of the write-ahead log", walSQL)
	if err != nil {
		return took, err
	}
	rate, err := b.engine(ctx, l, group, handler, consumer.DedupByID)
	if err != nil {
		return took, fmt.Errorf("%s: %w", key, err)
	}
	// Before anything reads the tables: the first reader of a page may log it once more.
	walAfter, err := b.number(ctx, "the position of the write-ahead log", walSQL)
	if err != nil {
		return took, err
	}
	if err = b.finish(ctx, key, round, l, rate, nil); err != nil {
		return took, err
	}
	bytesAfter, err := b.number(ctx, "the size of processed_messages", claimBytesSQL)
	return footprint{bytesAfter - bytesBefore, walAfter - walBefore}, err
}

// allDuplicates makes a group start over: every message is redelivered, and none may have an
// effect.
func (b *consumeBench) allDuplicates(ctx context.Context, round int, l load, group string, handler consumer.Handler) error {
	if _, err := b.pool.Exec(ctx, b.sql(rewindSQL), group); err != nil {
		return fmt.Errorf("rewind group %s: %w", group, err)
	}
	deleted, err := b.admin.DeleteGroups(ctx, group)
	if err = errors.Join(err, deleted.Error()); err != nil {
		return fmt.Errorf("rewind group %s: %w", group, err)
	}
	rate, err := b.engine(ctx, l, group, handler, consumer.DedupByID)
	return b.finish(ctx, "all_duplicates", round, l, rate, err)
}

// clean gives a run empty tables and a fresh checkpoint.
func (b *consumeBench) clean(ctx context.Context) error {
	return errors.Join(b.exec(ctx, "empty the tables", forgetSQL), b.checkpoint(ctx))
}

// finish keeps a run's figure if every message had its effect exactly once.
func (b *consumeBench) finish(ctx context.Context, key string, round int, l load, rate float64, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	var effects, different int
	if err := b.pool.QueryRow(ctx, b.sql(effectsSQL)).Scan(&effects, &different); err != nil {
		return fmt.Errorf("%s: count the effects: %w", key, err)
	}
	if effects != l.messages || different != l.messages {
		return fmt.Errorf("%s: %d messages had %d effects, of %d messages: this is a bug, the figures are void; please report it",
			key, l.messages, effects, different)
	}
	b.samples.add(key, rate)
	b.note("round %d: %-14s %9.0f messages/s", round+1, key, rate)
	return nil
}
