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

// Consume measures how many messages a second, each with an effect of one insert, are handled by the
// textbook loop and by the engine with different handlers, and what a claim takes in space and in
// write-ahead log.
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

// loads fills the topics. Slower variants get fewer messages, so that each takes a second or more and
// the whole not many.
func (b *consumeBench) loads(ctx context.Context) (map[string]load, error) {
	loads := map[string]load{
		"textbook":    {messages: max(MessagesMin/10, b.opts.Messages/40)},
		"per_message": {messages: max(MessagesMin/5, b.opts.Messages/10)},
		"statement":   {messages: max(MessagesMin/2, b.opts.Messages/4)},
		"by_id":       {messages: b.opts.Messages},
	}
	for name, l := range loads {
		topic, err := b.topic(ctx, name, b.opts.Partitions)
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
	loads["no_dedup"] = loads["by_id"]
	return loads, nil
}

// round runs every variant once. The order rotates, so that none always comes first.
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

// perMessageTurns runs the usual ways of being faster than the textbook, message by message.
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

// engineTurns runs what is compared with by_id and no_dedup: the loop by hand, the level ByPosition, whole
// batches, a key that is held.
func (b *consumeBench) engineTurns(ctx context.Context, round int, loads map[string]load) error {
	l := loads["by_id"]
	group := func(key string) string { return b.group(key + "-" + strconv.Itoa(round)) }
	if err := b.clean(ctx); err != nil {
		return err
	}
	rate, err := b.handLoop(ctx, l, group("hand-loop"))
	if err := b.finish(ctx, "hand_loop", round, l, rate, err); err != nil {
		return err
	}
	if err := b.clean(ctx); err != nil {
		return err
	}
	rate, err = b.engine(ctx, l, group("by-position"), b.queue(), consumer.ByPosition)
	if err := b.finish(ctx, "by_position", round, l, rate, err); err != nil {
		return err
	}
	if err := b.clean(ctx); err != nil {
		return err
	}
	rate, err = b.engine(ctx, l, group("batch-copy"), b.copyBatch(), consumer.ByID)
	if err := b.finish(ctx, "batch_copy", round, l, rate, err); err != nil {
		return err
	}
	return b.parkedKey(ctx, round, l, group("parked-key"))
}

// parkedKey runs by_id while one key of a thousand is held: its messages go behind it.
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
	rate, err := b.engine(ctx, l, group, b.queue(), consumer.ByID)
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

// copyBatch is the handler of whole batches.
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
	rate, err := b.engine(ctx, loads["statement"], b.group("statement-"+strconv.Itoa(round)), handler, consumer.ByID)
	return b.finish(ctx, "statement", round, loads["statement"], rate, err)
}

// queuedTurns runs the variants with one round trip for the effects of a batch. They belong together:
// what the claim costs is the difference between two of them.
func (b *consumeBench) queuedTurns(ctx context.Context, round int, loads map[string]load) error {
	handler := b.queue()
	withID := func(group string) (wal int64, err error) {
		wal, err = b.queued(ctx, "by_id", round, loads, group, handler, consumer.ByID)
		if err != nil {
			return 0, err
		}
		return wal, b.allDuplicates(ctx, round, loads["by_id"], group, handler)
	}
	without := func(group string) (wal int64, err error) {
		return b.queued(ctx, "no_dedup", round, loads, group, handler, consumer.Dedup(nodedup.Level))
	}
	var walWith, walWithout int64
	var err, errWithout error
	groupWith, groupWithout := b.group("by-id-"+strconv.Itoa(round)), b.group("no-dedup-"+strconv.Itoa(round))
	if round%2 == 0 {
		walWith, err = withID(groupWith)
	}
	if err == nil {
		walWithout, errWithout = without(groupWithout)
	}
	if round%2 == 1 && errWithout == nil {
		walWith, err = withID(groupWith)
	}
	if err = errors.Join(err, errWithout); err != nil {
		return err
	}
	if b.mayCheckpoint {
		b.samples.add("wal_bytes_per_message", float64(walWith-walWithout)/float64(loads["by_id"].messages))
	}
	return nil
}

// queued runs one of the two and returns what write-ahead log it took. The log is the whole server's:
// on one that is busy with other things the figure is too high.
func (b *consumeBench) queued(ctx context.Context, key string, round int, loads map[string]load, group string, handler consumer.Handler, level consumer.Dedup) (int64, error) {
	if err := b.clean(ctx); err != nil {
		return 0, err
	}
	bytesBefore, err := b.number(ctx, "the size of processed_messages", claimBytesSQL)
	if err != nil {
		return 0, err
	}
	walBefore, err := b.number(ctx, "the position of the write-ahead log", walSQL)
	if err != nil {
		return 0, err
	}
	rate, err := b.engine(ctx, loads[key], group, handler, level)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", key, err)
	}
	// Before anything reads the tables: the first reader of a page may log it once more.
	walAfter, err := b.number(ctx, "the position of the write-ahead log", walSQL)
	if err != nil {
		return 0, err
	}
	if err = b.finish(ctx, key, round, loads[key], rate, nil); err != nil {
		return 0, err
	}
	bytesAfter, err := b.number(ctx, "the size of processed_messages", claimBytesSQL)
	if err != nil {
		return 0, err
	}
	if level == consumer.ByID {
		b.samples.add("bytes_per_message", float64(bytesAfter-bytesBefore)/float64(loads[key].messages))
	}
	return walAfter - walBefore, nil
}

// allDuplicates makes a group start over: every message comes again and none may have an effect.
func (b *consumeBench) allDuplicates(ctx context.Context, round int, l load, group string, handler consumer.Handler) error {
	if _, err := b.pool.Exec(ctx, b.sql(rewindSQL), group); err != nil {
		return fmt.Errorf("rewind group %s: %w", group, err)
	}
	deleted, err := b.admin.DeleteGroups(ctx, group)
	if err = errors.Join(err, deleted.Error()); err != nil {
		return fmt.Errorf("rewind group %s: %w", group, err)
	}
	rate, err := b.engine(ctx, l, group, handler, consumer.ByID)
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
