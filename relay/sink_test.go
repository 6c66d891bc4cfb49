package relay_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// receiver is what a sink hands rows to. answer decides each call; nil takes everything.
type receiver struct {
	answer func(ctx context.Context, messages []relay.Message) (int, error)

	mu       sync.Mutex
	calls    [][]string // payloads that were handed over
	received []string   // payloads that were taken
	ids      map[string]string
}

func (s *receiver) Publish(ctx context.Context, messages []relay.Message) (int, error) {
	n, err := len(messages), error(nil)
	if s.answer != nil {
		n, err = s.answer(ctx, messages)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var call []string
	for _, m := range messages {
		call = append(call, string(m.Payload))
	}
	s.calls = append(s.calls, call)
	for _, m := range messages[:min(max(n, 0), len(messages))] {
		if s.ids == nil {
			s.ids = map[string]string{}
		}
		s.received = append(s.received, string(m.Payload))
		s.ids[string(m.Payload)] = m.ID.String()
	}
	return n, err
}

func (s *receiver) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.received)
}

// rowByRow is an answer that takes rows up to the first one with an error.
func rowByRow(refusal func(payload string) error) func(context.Context, []relay.Message) (int, error) {
	return func(_ context.Context, messages []relay.Message) (int, error) {
		for i, m := range messages {
			if err := refusal(string(m.Payload)); err != nil {
				return i, err
			}
		}
		return len(messages), nil
	}
}

func newSinkRelay(t *testing.T, pool *pgxpool.Pool, sink relay.Sink, cfg relay.Config) *relay.Relay {
	t.Helper()
	cfg.Sink = sink
	r, err := relay.New(pool, nil, cfg)
	require.NoError(t, err)
	return r
}

// drainAtLast starts relays until one drains the outbox.
func drainAtLast(t *testing.T, pool *pgxpool.Pool, sink relay.Sink, cfg relay.Config) {
	t.Helper()
	for range 1000 {
		if _, err := newSinkRelay(t, pool, sink, cfg).Drain(t.Context()); err == nil {
			return
		}
	}
	require.Fail(t, "it does not come to an end")
}

// Property: a sink is handed each row as Kafka would have it, in order and once while nothing
// fails, over as many pages as it takes.
func TestSinkIsHandedTheRows(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	id := outboxID(t, pool)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return outbox.Publish(ctx, tx, outbox.Message{ID: id, Topic: "a", Key: []byte{0, 0xff}, Payload: []byte{}, Headers: []outbox.Header{{Name: "h", Value: []byte{1, 0xff}}}},
			outbox.Message{Topic: "b"})
	}))
	var first, second relay.Message
	sink := &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		if first.Topic == "" {
			first, second = messages[0], messages[1]
		}
		return len(messages), nil
	}}
	r := newSinkRelay(t, pool, sink, relay.Config{PageRowsMax: 7})
	require.EqualValues(t, 2, drain(t, r))
	require.Equal(t, id, first.ID)
	require.Equal(t, "a", first.Topic)
	require.Equal(t, []byte{0, 0xff}, first.Key)
	require.NotNil(t, first.Payload)
	require.Empty(t, first.Payload)
	require.Len(t, first.Headers, 3)
	require.Equal(t, outbox.Header{Name: "message-id", Value: []byte(id.String())}, first.Headers[0])
	require.Equal(t, "occurred-at", first.Headers[1].Name)
	require.Equal(t, outbox.Header{Name: "h", Value: []byte{1, 0xff}}, first.Headers[2])
	require.Nil(t, second.Key)
	require.Nil(t, second.Payload)

	sink.received = nil
	want := insertNumbered(t, pool, "a", 3, 50)
	require.EqualValues(t, 50, drain(t, r))
	require.Equal(t, want, sink.all())
	require.Zero(t, drain(t, r))
}

// Property: rows of a page that a sink accepted are not handed over again after an error of the
// receiver. The rest is, at once and in order: a receiver that takes a part of each call gets
// everything once.
func TestSinkGoesOnBehindWhatWasAccepted(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	random := rand.New(rand.NewPCG(5, 8))
	sink := &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		if n := random.IntN(len(messages) + 1); n < len(messages) {
			return n, errors.New("receiver is away")
		}
		return len(messages), nil
	}}
	want := insertNumbered(t, pool, "a", 3, 60)
	drainAtLast(t, pool, sink, relay.Config{PageRowsMax: 20})
	require.Equal(t, want, sink.all())
}

// Property: a row that the receiver refuses for good moves to outbox_dead and holds its key;
// everything else flows, and when an operator retries it, the key comes in its order. Rows O18, O19
// of guarantees.md.
func TestSinkRefusalHoldsTheKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	refuses := true
	sink := &receiver{answer: rowByRow(func(payload string) error {
		if refuses && payload == "bad" {
			// More than a column takes, and what no column takes.
			return fmt.Errorf("subject: %w", relay.Refuse(errors.New("no such subject: \x00\xff"+strings.Repeat("あ", 2000))))
		}
		return nil
	})}
	r := newSinkRelay(t, pool, sink, relay.Config{})
	for _, row := range [][2]string{{"k", "1"}, {"k", "bad"}, {"other", "2"}, {"k", "3"}} {
		insert(t, pool, "a", row[0], row[1])
	}
	require.EqualValues(t, 2, drain(t, r))
	require.Equal(t, []string{"1", "2"}, sink.all())
	insert(t, pool, "a", "k", "4")
	insert(t, pool, "a", "other", "5")
	require.EqualValues(t, 1, drain(t, r))

	dead := all[string](t, pool, `SELECT convert_from(payload, 'UTF8') || ' ' || reason FROM effectonce.outbox_dead ORDER BY seq`)
	require.Equal(t, []string{"bad refused", "3 behind", "4 behind"}, dead)
	text := one[string](t, pool, `SELECT error FROM effectonce.outbox_dead WHERE reason = 'refused'`)
	require.Contains(t, text, "no such subject")

	// Refused once more: it is held again, and nothing behind it moves.
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'refused'`)
	drain(t, newSinkRelay(t, pool, sink, relay.Config{}))
	require.Equal(t, []string{"1", "2", "5"}, sink.all())

	refuses = false
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE reason = 'refused'`)
	drain(t, newSinkRelay(t, pool, sink, relay.Config{}))
	require.Equal(t, []string{"1", "2", "5", "bad", "3", "4"}, sink.all())
}

// Property: rows that an operator retries are handed over like others: no more of them in a call
// than PageRowsMax. Rows that were accepted before an error are not handed over again.
func TestSinkTakesRetriedRowsAsOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	refuses := true
	sink := &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		switch {
		case refuses:
			return 0, relay.Refuse(errors.New("not yet"))
		case len(messages) > 2:
			return 0, errors.New("too many at once")
		case len(messages) == 2:
			return 1, errors.New("receiver is away")
		}
		return len(messages), nil
	}}
	want := insertNumbered(t, pool, "a", 5, 5)
	cfg := relay.Config{PageRowsMax: 2}
	drain(t, newSinkRelay(t, pool, sink, cfg))
	refuses = false
	must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry'`)
	drainAtLast(t, pool, sink, cfg)
	require.Equal(t, want, sink.all())
	require.Zero(t, dead(t, pool))
}

// Property: progress does not pass a refused row before the row is in outbox_dead: an error right
// behind the refusal loses nothing.
func TestSinkTroubleBehindARefusalLosesNothing(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	trouble := true
	sink := &receiver{answer: rowByRow(func(payload string) error {
		switch {
		case payload == "bad":
			return relay.Refuse(errors.New("no such subject"))
		case trouble && payload == "3":
			trouble = false
			return errors.New("receiver is away")
		}
		return nil
	})}
	for _, row := range []string{"1", "bad", "2", "3"} {
		insert(t, pool, "a", row, row)
	}
	_, err := newSinkRelay(t, pool, sink, relay.Config{}).Drain(ctx)
	require.ErrorContains(t, err, "receiver is away")
	drain(t, newSinkRelay(t, pool, sink, relay.Config{}))
	require.Subset(t, sink.all(), []string{"1", "2", "3"})
	dead := one[string](t, pool, `SELECT convert_from(payload, 'UTF8') FROM effectonce.outbox_dead`)
	require.Equal(t, "bad", dead)
}

// Property: the context of a sink that hangs ends after a lease, and the rows are handed over
// again; at a stop the sink gets DrainMax.
func TestSinkThatHangsIsEnded(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	hung := make(chan struct{}, 1000)
	hang := true
	sink := &receiver{answer: func(ctx context.Context, messages []relay.Message) (int, error) {
		if hang {
			hung <- struct{}{}
			<-ctx.Done()
			return 0, ctx.Err()
		}
		return len(messages), nil
	}}
	insert(t, pool, "a", "k", "1")
	_, err := newSinkRelay(t, pool, sink, relay.Config{Lease: 5 * time.Second}).Drain(t.Context())
	require.ErrorContains(t, err, "hand rows to the sink", "whether its time or the lease was over first")

	<-hung
	stop := starts(t, newSinkRelay(t, pool, sink, relay.Config{Lease: 10 * time.Minute, DrainMax: time.Millisecond}))
	<-hung
	stop() // before the lease is over
	hang = false
	require.EqualValues(t, 1, drain(t, newSinkRelay(t, pool, sink, relay.Config{})))
}

// Property: a sink that miscounts loses nothing: the call counts as failed, and says whose mistake
// it is.
func TestSinkThatMiscountsIsNotBelieved(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	insert(t, pool, "a", "k", "1")
	for _, n := range []int{-1, 0, 2} {
		sink := &receiver{answer: func(context.Context, []relay.Message) (int, error) { return n, nil }}
		_, err := newSinkRelay(t, pool, sink, relay.Config{}).Drain(t.Context())
		require.ErrorContains(t, err, fmt.Sprintf("accepted %d of 1 messages", n))
	}
	require.EqualValues(t, 1, drain(t, newSinkRelay(t, pool, &receiver{}, relay.Config{})))
}

// Property: replicas that share shards hand a sink each key's rows in order, whatever fails:
// nothing is lost.
func TestSinkOfSeveralShards(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(13, 21))
	firsts := map[string][]string{}
	seen := map[string]bool{}
	sink := &receiver{answer: func(_ context.Context, messages []relay.Message) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		took, counted := len(messages), len(messages)
		if random.IntN(3) == 0 { // some are taken without being counted
			took = random.IntN(len(messages) + 1)
			counted = random.IntN(took + 1)
		}
		for _, m := range messages[:took] {
			if !seen[string(m.Payload)] {
				seen[string(m.Payload)] = true
				firsts[string(m.Key)] = append(firsts[string(m.Key)], string(m.Payload))
			}
		}
		if counted < len(messages) {
			return counted, errors.New("receiver is away")
		}
		return counted, nil
	}}
	want := map[string][]string{}
	for i := range 200 {
		key := fmt.Sprint("k", i%11)
		want[key] = append(want[key], fmt.Sprint(i))
		insert(t, pool, "a", key, fmt.Sprint(i))
	}
	for range 2 {
		starts(t, newSinkRelay(t, pool, sink, relay.Config{Shards: 4, Lease: time.Second, PageRowsMax: 20}))
	}
	testwait.True(t, "all are handed over", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) == 200
	})
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, want, firsts)
}
