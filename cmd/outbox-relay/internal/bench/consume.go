package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/nodedup"
)

// consumeBench is one run of Consume.
type consumeBench struct {
	*site

	samples samples
}

// load is a topic with its messages. Each group reads it from the start.
type load struct {
	topic    string
	messages int
}

// Consume measures how many messages per second, each with an effect of one insert, the textbook
// loop and the engine handle. It also measures how much space and write-ahead log a claim takes.
func Consume(ctx context.Context, opts Options) (_ *Report, err error) {
	s, err := newSite(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	b := &consumeBench{site: s, samples: samples{}}
	if err := b.exec(ctx, "create the benchmark's tables", consumeTablesSQL); err != nil {
		return nil, err
	}
	// The textbook gets fewer messages, so that each run takes a second or more, and all of them
	// do not take long.
	few, err := b.load(ctx, "textbook", max(MessagesMin/10, b.Messages/40))
	if err != nil {
		return nil, err
	}
	all, err := b.load(ctx, "engine", b.Messages)
	if err != nil {
		return nil, err
	}
	for round := range b.Rounds {
		if err := b.round(ctx, round, few, all); err != nil {
			return nil, fmt.Errorf("round %d: %w", round+1, err)
		}
	}
	return newReport([]Figure{
		{Key: "textbook", Text: "one message per transaction", Unit: messageRate},
		{Key: "no_dedup", Text: "engine without claims", Unit: messageRate},
		{Key: "by_id", Text: "engine with claims", Unit: messageRate},
		{Key: "by_position", Text: "engine by position", Unit: messageRate},
		{Key: "bytes_per_message", Text: "claim: table and index", Unit: "bytes"},
		{Key: "wal_bytes_per_message", Text: "claim: write-ahead log", Unit: "bytes"},
	}, b.samples).sized("messages", opts.Messages, messagesTelling, opts.Rounds), nil
}

// load fills a topic.
func (b *consumeBench) load(ctx context.Context, name string, messages int) (load, error) {
	topic, err := b.topic(ctx, name, consumePartitions)
	if err != nil {
		return load{}, err
	}
	b.note("producing %d messages for %s", messages, name)
	return load{topic, messages}, b.produce(ctx, load{topic, messages})
}

// round runs every variant once. The order rotates, so that no variant always comes first.
func (b *consumeBench) round(ctx context.Context, round int, few, all load) error {
	var with, without footprint
	turns := []func() error{
		func() error {
			_, err := b.turn(ctx, round, "textbook", few, b.textbook)
			return err
		},
		func() (err error) {
			with, err = b.turn(ctx, round, "by_id", all, b.byID)
			return err
		},
		func() (err error) {
			without, err = b.turn(nodedup.With(ctx), round, "no_dedup", all, b.byID)
			return err
		},
		func() error {
			_, err := b.turn(ctx, round, "by_position", all, b.byPosition)
			return err
		},
	}
	for i := range turns {
		if err := turns[(i+round)%len(turns)](); err != nil {
			return err
		}
	}
	b.samples.add("bytes_per_message", float64(with.claims)/float64(all.messages))
	if b.mayCheckpoint {
		b.samples.add("wal_bytes_per_message", float64(with.wal-without.wal)/float64(all.messages))
	}
	return nil
}

func (b *consumeBench) byID(ctx context.Context, l load, group string) (float64, error) {
	return b.engine(ctx, l, group, consumer.DedupByID)
}

func (b *consumeBench) byPosition(ctx context.Context, l load, group string) (float64, error) {
	return b.engine(ctx, l, group, consumer.DedupByPosition)
}

// footprint is the space that a run took.
type footprint struct{ claims, wal int64 }

// turn runs a variant in empty tables, right after a checkpoint, and returns the space that it
// took. The write-ahead log is the whole server's: on a server with other work it is too high.
func (b *consumeBench) turn(ctx context.Context, round int, key string, l load, run func(context.Context, load, string) (float64, error)) (took footprint, err error) {
	if err := errors.Join(b.exec(ctx, "empty the tables", forgetSQL), b.checkpoint(ctx)); err != nil {
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
	rate, err := run(ctx, l, b.group(key+"-"+strconv.Itoa(round)))
	if err != nil {
		return took, fmt.Errorf("%s: %w", key, err)
	}
	// Before anything reads the tables: the first reader of a page may log it once more.
	walAfter, err := b.number(ctx, "the position of the write-ahead log", walSQL)
	if err != nil {
		return took, err
	}
	if err = b.finish(ctx, key, round, l, rate); err != nil {
		return took, err
	}
	bytesAfter, err := b.number(ctx, "the size of processed_messages", claimBytesSQL)
	return footprint{bytesAfter - bytesBefore, walAfter - walBefore}, err
}

// finish keeps a run's figure if every message had its effect exactly once.
func (b *consumeBench) finish(ctx context.Context, key string, round int, l load, rate float64) error {
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
