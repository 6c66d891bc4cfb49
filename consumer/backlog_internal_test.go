package consumer

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// bare converts records to messages with no more than an offset and headers.
func bare(records []*kgo.Record) (msgs []*Message) {
	for _, r := range records {
		msg := &Message{Offset: r.Offset}
		for _, h := range r.Headers {
			msg.Headers = append(msg.Headers, Header{Name: h.Key, Value: h.Value})
		}
		msgs = append(msgs, msg)
	}
	return msgs
}

// Property: a message that was tried before is taken alone, so that those behind it are not run in
// vain.
func TestTriedMessagesAreTakenAlone(t *testing.T) {
	t.Parallel()
	b := newBacklog(nil, topicPartition{}, OrderByPartition, 100)
	tried, other := &Message{first: time.Now()}, &Message{Offset: 1}
	b.add(tried)
	b.add(other)
	s := b.take(1, 100)
	require.Equal(t, []*Message{tried}, s.msgs)
	b.done(s, &postponed{})
	require.Equal(t, []*Message{other}, b.take(1, 100).msgs)
}

// Property: what is postponed is not taken before its time, nor what waits for it in its line, and lanes
// are woken then; other lines do not wait, unless all pause.
func TestPostponedLinesWait(t *testing.T) {
	t.Parallel()
	for _, pause := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			t.Helper()
			b := newBacklog(nil, topicPartition{}, OrderByKey, 100)
			begun := time.Now()
			failed, behind, other := &Message{Key: []byte("a")}, &Message{Key: []byte("a"), Offset: 1}, &Message{Key: []byte("b"), Offset: 2}
			b.add(failed)
			later := &postponed{order: OrderByKey, waits: map[*Message]time.Duration{}, keys: map[string]bool{}}
			failed.first = begun
			later.add(failed, next{wait: time.Second, pause: pause})
			b.done(b.take(1, 100), later)
			b.add(behind)
			b.add(other)
			if s := b.take(1, 100); pause {
				require.Empty(t, s.lines)
			} else {
				require.Equal(t, []*Message{other}, s.msgs)
			}
			for len(b.wake) > 0 {
				<-b.wake // of what came, not of time
			}
			<-b.wake
			require.Equal(t, time.Second, time.Since(begun))
			require.Equal(t, []*Message{failed}, b.take(1, 100).msgs)
		})
	}
}

// Property: the position of workers is the end of the messages done without a gap, in whatever
// order they are done and whatever offsets are missing.
func TestPositionOfWorkersFollowsTheLowestInWork(t *testing.T) {
	t.Parallel()
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 1))
		b := newBacklog(nil, topicPartition{}, OrderUnordered, 1000)
		var open []*Message
		next, want := int64(random.IntN(3)), int64(0)
		for range 400 {
			if random.IntN(2) == 0 {
				next += 1 + int64(random.IntN(3))
				open = append(open, &Message{Offset: next})
				b.add(open[len(open)-1])
				continue
			}
			if len(open) == 0 {
				continue
			}
			i := random.IntN(len(open))
			done := open[i]
			open = append(open[:i], open[i+1:]...)
			b.done(share{msgs: []*Message{done}}, &postponed{})
			if len(open) == 0 {
				want = next + 1
			} else if i == 0 {
				want = 0 // behind the last that is done before open[0]: judged below
			}
			low, _ := b.low()
			if want > 0 {
				require.Equal(t, want, low)
			}
			if len(open) > 0 {
				require.LessOrEqual(t, low, open[0].Offset, "seed %d", seed)
				want = 0
			}
			require.Equal(t, len(open) == 0, b.idle())
		}
	}
}

// Property: the messages that wait in memory are bounded, headers included. Records before the start
// that an earlier fetch returns are dropped.
func TestHeadersCountForWhatWaits(t *testing.T) {
	t.Parallel()
	b := newBacklog(kafkatest.Client(t), topicPartition{"t", 0}, OrderByPartition, 1000)
	b.start(5)
	arrive := func(offset int64) {
		b.arrive([]*kgo.Record{{Offset: offset, Headers: []kgo.RecordHeader{{Key: "h", Value: make([]byte, 1<<20)}}}}, bare)
	}
	arrive(3)
	arrive(4)
	require.True(t, b.idle())
	for offset := range int64(15) {
		arrive(5 + offset)
	}
	require.True(t, b.fetches)
	arrive(20)
	require.False(t, b.fetches)
	taken := b.take(1, 1000)
	require.Len(t, taken.msgs, 16)
	require.True(t, b.fetches)
	b.done(taken, &postponed{})

	b.end()
	for offset := range int64(20) {
		arrive(21 + offset)
	}
	require.True(t, b.idle(), "what arrives late belongs to the next holder")
}

// Property: control records count as done when no message is in progress, and not before.
func TestControlRecordsCountWhenNothingIsInProgress(t *testing.T) {
	t.Parallel()
	b := newBacklog(nil, topicPartition{}, OrderByPartition, 1000)
	record := func(offset int64, control bool) *kgo.Record {
		return &kgo.Record{Offset: offset, Timestamp: time.Now(), Attrs: kgo.NewRecordAttrs(kgo.RecordAttrsOpts{Control: control})}
	}
	low := func(want int64) {
		t.Helper()
		got, _ := b.low()
		require.Equal(t, want, got)
	}
	low(0)
	b.arrive([]*kgo.Record{record(0, true), record(1, true)}, bare)
	low(2)
	b.arrive([]*kgo.Record{record(2, false), record(3, true)}, bare)
	low(0)
	taken := b.take(1, 1000)
	b.arrive([]*kgo.Record{record(4, false), record(5, true)}, bare)
	b.done(taken, &postponed{})
	low(3)
	b.done(b.take(1, 1000), &postponed{})
	low(6)
}

// Property: failures count for the last messages and for ten minutes: on a quiet partition those of
// an old outage do not pause later messages, and a flood pauses at the configured share.
func TestBreakerForgetsInTimeAndInMessages(t *testing.T) {
	t.Parallel()
	park := func(b *breaker) bool {
		allowed := b.allows()
		if allowed {
			b.noteParked()
		}
		return allowed
	}
	synctest.Test(t, func(t *testing.T) {
		t.Helper()
		b := &breaker{shareMax: 0.05}
		for range 5 {
			require.True(t, park(b))
		}
		require.False(t, park(b), "the sixth of the last hundred")
		<-time.After(9 * time.Minute)
		require.False(t, park(b), "not yet forgotten")
		<-time.After(2 * time.Minute)
		require.True(t, park(b), "no message came meanwhile, but the failures are old")
	})
	b := &breaker{shareMax: 0.05}
	for range 5 {
		require.True(t, park(b))
	}
	b.noteHandled(94)
	require.False(t, park(b), "99 messages")
	b.noteHandled(2)
	require.True(t, park(b), "the first failure is more than a hundred messages ago")

	b = &breaker{shareMax: 0.01}
	require.True(t, park(b), "one may always be parked")
	require.False(t, park(b))

	b = &breaker{shareMax: 1}
	for range 150 {
		require.True(t, park(b), "a share of 1 never pauses")
	}
}

// Property: a handler's context that ends is never taken for a failure: the partition is stopped before.
func TestPartitionIsStoppedBeforeItsHandlers(t *testing.T) {
	t.Parallel()
	c, err := New(pgtest.Pool(t), nil, Each(nil), Config{Group: "g", Topics: []string{"t"}})
	require.NoError(t, err)
	ctx, kill := context.WithCancel(t.Context())
	p := c.newPartition(ctx, nil, &position{topic: "t"})
	p.active = context.WithoutCancel(ctx) // the end has reached other contexts, and not yet this one
	require.False(t, p.stopped())
	kill()
	require.True(t, p.stopped())
}

// Property: the worst of a partition's troubles is its state, and what is stored of one stays stored
// beside those of which nothing is, until it ends.
func TestTroublesAreRecordedTogether(t *testing.T) {
	t.Parallel()
	c, err := New(pgtest.Pool(t), nil, Each(nil), Config{Group: "g", Topics: []string{"t"}})
	require.NoError(t, err)
	p := c.newPartition(t.Context(), nil, &position{topic: "t"})
	for range 300 { // in any order of the map
		p.record(1, &trouble{state: StateRunning, err: errPool})
		p.record(2, &trouble{StateBlocked, errIdle, "a text", "why"})
		p.record(2, &trouble{state: StateBlocked, err: errIdle})
		require.Equal(t, "why", p.stored)
		require.Equal(t, StateBlocked, p.does.state)
		p.record(2, nil)
		require.Empty(t, p.stored)
		require.Equal(t, StateRunning, p.does.state)
		require.ErrorIs(t, p.does.err, errPool)
		p.record(1, nil)
		require.NoError(t, p.does.err)
		require.False(t, p.troubled.Load())
	}
}
