package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/outbox"
)

// Message is an outbox row for a Sink. Its values are the sink's only until Publish returns.
type Message struct {
	// ID of the row: the same however often it is handed over. Receivers deduplicate by it.
	ID uuid.UUID
	// Topic as the row names it; what it is there (queue, subject, exchange) the sink decides.
	Topic string
	// Key decides the order; nil: the row has none.
	Key []byte
	// Payload of the row; nil and empty are told apart.
	Payload []byte
	// Headers as a record in Kafka has them: message-id, occurred-at, then the row's own.
	Headers []outbox.Header
}

// Sink takes rows to another receiver than Kafka: see Config.Sink. What holds then: each committed row at least
// once under an unchanged ID, and the rows of a key in the order of their insert among first occurrences, as far
// as the receiver keeps the order in which Publish hands them over. Config.ExactlyOnce is for Kafka alone.
type Sink interface {
	// Publish hands over messages in their order, of one shard, and returns how many of them, from the front, the
	// receiver has durably: what it only has in memory counts as not accepted, or a crash loses it. Fewer than all
	// come with an error, and the rest comes again: also messages that were accepted without being counted. An
	// error of Refuse says that the receiver will never take the first message not accepted: it moves to
	// outbox_dead, and its key with it. Any other error is a trouble of the receiver: the relay waits and goes on
	// for as long as it takes.
	//
	// Calls for one shard come one after the other; calls for several shards at the same time. ctx ends when the
	// lease is lost, at the end of a stop's DrainMax, and after a Lease at the latest; a call that goes on after
	// it publishes next to another replica, which adds duplicates.
	Publish(ctx context.Context, messages []Message) (accepted int, err error)
}

// refusal is what Refuse marks.
type refusal struct{ cause error }

func (r *refusal) Error() string { return r.cause.Error() }
func (r *refusal) Unwrap() error { return r.cause }

// Refuse marks an error of a Sink as final: the receiver will never take this message as it is.
func Refuse(err error) error { return &refusal{err} }

// toSink hands rows to Config.Sink.
type toSink struct{ *publisher }

// publish takes rows off the front of the attempt as they are accepted. Progress must not pass a dead row before it is
// in outbox_dead, so from the first dead row on it stays where it is until the end.
func (t toSink) publish(work, ctx context.Context, a *attempt) error {
	if a.released {
		// What the sink took before it failed must not come again each time.
		return errors.Join(t.feed(work, ctx, a), t.conclude(ctx, a))
	}
	if err := t.feed(work, ctx, a); err != nil {
		return err
	}
	return t.conclude(ctx, a)
}

func (t toSink) paged(_, _ context.Context, _ bool) error { return nil }

func (t toSink) store(ctx context.Context) error { return t.storeAcked(ctx) }

func (t toSink) finish(_, ctx context.Context) error { return t.flight.settled(ctx) }

// feed leaves in a.rows what the sink accepted.
func (t toSink) feed(work, ctx context.Context, a *attempt) error {
	todo, records := a.rows, a.records
	a.rows, a.records = a.rows[:0:0], nil
	for len(todo) > 0 {
		if !t.lease.held() {
			return errLeaseLost
		}
		accepted, err := t.handOver(work, ctx, todo, records)
		if accepted > 0 {
			b := &batch{rows: todo[:accepted]}
			if len(a.dead) == 0 {
				b.end = a.upTo(todo[accepted-1])
			}
			a.rows = append(a.rows, b.rows...)
			t.flight.add(b)
		}
		todo, records = todo[accepted:], records[accepted:]
		var final *refusal
		switch {
		case err == nil:
		case !errors.As(err, &final) || len(todo) == 0:
			return fmt.Errorf("hand rows to the sink: %w", fromOutlet(err))
		default:
			a.give(todo[0], ReasonRefused, fmt.Errorf("%w: mend the cause and retry the row, or discard it", err))
			todo, records = a.withoutHeld(todo[1:], records[1:])
		}
	}
	return nil
}

// handOver is a call of the sink, bounded in time: one that hangs must not hang the relay.
func (t toSink) handOver(work, reading context.Context, rows []*row, records []*kgo.Record) (int, error) {
	ctx, cancel := t.callContext(work, reading)
	defer cancel()
	defer t.expect(t.cfg.Lease)() // what callContext allows
	messages := make([]Message, len(records))
	for i, r := range records {
		messages[i] = Message{ID: rows[i].id, Topic: r.Topic, Key: r.Key, Payload: r.Value, Headers: make([]outbox.Header, len(r.Headers))}
		for j, h := range r.Headers {
			messages[i].Headers[j] = outbox.Header{Name: h.Key, Value: h.Value}
		}
	}
	overdue := make(chan struct{})
	late := context.AfterFunc(ctx, func() { t.overdue.Add(1); close(overdue) })
	accepted, err := t.cfg.Sink.Publish(ctx, messages)
	if !late() {
		<-overdue
		t.overdue.Add(-1)
	}
	if accepted < 0 || accepted > len(messages) || (accepted < len(messages) && err == nil) {
		return 0, fmt.Errorf("the sink says that it accepted %d of %d messages, without an error: please report it to whoever wrote the sink", accepted, len(messages))
	}
	return accepted, err
}

// callContext ends with the work, and at a stop when there was time to drain.
func (t toSink) callContext(work, reading context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(work, t.cfg.Lease)
	stop := context.AfterFunc(reading, func() {
		if pause(ctx, t.cfg.DrainMax) {
			cancel()
		}
	})
	return ctx, func() { stop(); cancel() }
}
