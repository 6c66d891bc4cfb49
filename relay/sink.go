package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

// Message is an outbox row for a Sink. Its values are valid only until Publish returns.
type Message struct {
	// ID of the row. It is the same each time the row is handed over. Receivers deduplicate by it.
	ID uuid.UUID
	// Topic as the row names it. The sink decides what it maps to: a queue, a subject, an exchange.
	Topic string
	// Key decides the order. nil: the row has no key.
	Key []byte
	// Payload of the row. nil and empty are different values.
	Payload []byte
	// Headers as in a Kafka record: message-id, occurred-at, then the row's own.
	Headers []outbox.Header
}

// Sink publishes rows to a receiver other than Kafka: see Config.Sink. Each committed row is handed
// over at least once, under an unchanged ID. Among first occurrences, the rows of a key arrive in
// the order of their insert, as far as the receiver keeps the order in which Publish hands them
// over. Config.ExactlyOnce works only with Kafka.
type Sink interface {
	// Publish hands over messages of one shard, in their order. It returns how many of them, from
	// the front, the receiver has stored durably. A message that the receiver has only in memory
	// counts as not accepted; otherwise a crash loses it. If accepted is less than the number of
	// messages, err is not nil, and the relay hands over the rest again, including messages that
	// were accepted without being counted.
	//
	// An error of Refuse means that the receiver will never take the first message that was not
	// accepted. That row moves to outbox_dead and holds its key. After any other error the relay
	// waits and retries without a limit.
	//
	// Calls for one shard come one after the other. Calls for several shards run at the same time.
	// ctx ends when the lease is lost, at the end of a stop's DrainMax, and after a Lease at the
	// latest. A call that continues after that publishes concurrently with another replica, which
	// adds duplicates.
	Publish(ctx context.Context, messages []Message) (accepted int, err error)
}

// refusal is the error that Refuse returns.
type refusal struct{ cause error }

func (r *refusal) Error() string { return r.cause.Error() }
func (r *refusal) Unwrap() error { return r.cause }

// Refuse marks an error of a Sink as final: the receiver will never take this message as it is.
func Refuse(err error) error { return &refusal{err} }

// toSink hands rows to Config.Sink. All but that is as with Kafka.
type toSink struct{ toKafka }

// publish removes rows from the front of the attempt as they are accepted. Progress must not pass a
// dead row before that row is in outbox_dead. So progress stops at the first dead row until the end
// of the attempt.
func (t toSink) publish(work, ctx context.Context, a *attempt) error {
	err := t.feed(work, ctx, a)
	if err != nil && !a.released {
		return err
	}
	// Remove what the sink took before it failed, or each attempt would hand it over again.
	return errors.Join(err, t.conclude(ctx, a))
}

// feed hands rows to the sink and keeps in a.rows those that the sink accepted.
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
			a.give(todo[0], ReasonRefused, fmt.Errorf("%w: fix the cause and retry the row, or discard it", err))
			todo, records = a.withoutHeld(todo[1:], records[1:])
		}
	}
	return nil
}

// handOver is one call of the sink. It is bounded in time, as a sink that hangs must not hang the relay,
// and ends with the work, and at a stop after DrainMax.
func (t toSink) handOver(work, reading context.Context, rows []*row, records []*kgo.Record) (int, error) {
	limited, cancel := context.WithTimeout(work, t.cfg.Lease)
	defer cancel()
	ctx, stop := pause.Outlast(limited, reading, t.cfg.DrainMax)
	defer stop()
	defer t.expect(t.cfg.Lease)() // what limited allows
	messages := make([]Message, len(records))
	for i, r := range records {
		messages[i] = Message{ID: rows[i].id, Topic: r.Topic, Key: r.Key, Payload: r.Value, Headers: make([]outbox.Header, len(r.Headers))}
		for j, h := range r.Headers {
			messages[i].Headers[j] = outbox.Header{Name: h.Key, Value: h.Value}
		}
	}
	accepted, err := t.cfg.Sink.Publish(ctx, messages)
	if accepted < 0 || accepted > len(messages) || (accepted < len(messages) && err == nil) {
		return 0, fmt.Errorf("the sink returned an invalid result: accepted %d of %d messages without an error: report this to the author of the sink", accepted, len(messages))
	}
	return accepted, err
}
