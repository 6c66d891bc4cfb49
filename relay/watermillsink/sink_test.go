package watermillsink_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
	"github.com/effectonce/effectonce/relay/watermillsink"
)

// publisher is a broker that fails on demand: before decides about each message, with the messages
// taken before it.
type publisher struct {
	before func(m *message.Message) error

	mu    sync.Mutex
	calls [][]string // payloads that were handed over
	took  []string
}

func (p *publisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.Lock()
	var call []string
	for _, m := range messages {
		call = append(call, topic+" "+string(m.Payload))
	}
	p.calls = append(p.calls, call)
	p.mu.Unlock()
	for _, m := range messages {
		m.Metadata["changed"] = "by the publisher" // as it may
		if p.before != nil {
			if err := p.before(m); err != nil {
				return err
			}
		}
		p.mu.Lock()
		p.took = append(p.took, string(m.Payload))
		p.mu.Unlock()
	}
	return nil
}

func (*publisher) Close() error { return nil }

func (p *publisher) taken() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.took)
}

func newSink(t *testing.T, p message.Publisher, cfg watermillsink.Config) *watermillsink.Sink {
	t.Helper()
	sink, err := watermillsink.New(p, cfg)
	require.NoError(t, err)
	return sink
}

func newRelay(t *testing.T, pool *pgxpool.Pool, sink relay.Sink, cfg relay.Config) *relay.Relay {
	t.Helper()
	cfg.Sink = sink
	r, err := relay.New(pool, nil, cfg)
	require.NoError(t, err)
	return r
}

// starts runs a relay until it is stopped.
func starts(t *testing.T, r *relay.Relay) (stop func()) {
	t.Helper()
	running, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(running) }()
	return func() {
		cancel()
		require.NoError(t, <-done)
	}
}

func publish(t *testing.T, pool *pgxpool.Pool, messages ...outbox.Message) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return outbox.Publish(t.Context(), tx, messages...) }))
}

// rows makes messages with these payloads, all of topic a.
func rows(payloads ...string) []relay.Message {
	var made []relay.Message
	for _, payload := range payloads {
		made = append(made, relay.Message{ID: uuid.New(), Topic: "a", Payload: []byte(payload)})
	}
	return made
}

// Property: ID, payload, key and headers of a row arrive at a subscriber byte for byte, and null
// and empty stay different. Row O36 of guarantees.md.
func TestSubscriberGetsTheRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	channel := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, nil)
	t.Cleanup(func() { require.NoError(t, channel.Close()) })
	binary := string([]byte{0, 0xff, 'x'})
	first, second, third := uuid.New(), uuid.New(), uuid.New()
	publish(t, pool,
		outbox.Message{ID: first, Topic: "a", Key: []byte(binary), Payload: []byte(binary), Headers: []outbox.Header{
			{Name: "binary", Value: []byte(binary)}, {Name: "empty", Value: []byte{}}, {Name: "null"}, {Name: "other \"null\""},
		}},
		outbox.Message{ID: second, Topic: "a", Key: []byte{}},
		outbox.Message{ID: third, Topic: "a", Payload: []byte{}},
	)
	drained, err := newRelay(t, pool, newSink(t, channel, watermillsink.Config{Batch: 10}), relay.Config{}).Drain(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 3, drained)

	messages, err := channel.Subscribe(t.Context(), "a")
	require.NoError(t, err)
	got := map[string]*message.Message{}
	for range 3 {
		m := <-messages
		m.Ack()
		require.Equal(t, m.UUID, m.Metadata["message-id"])
		require.NotEmpty(t, m.Metadata["occurred-at"])
		delete(m.Metadata, "message-id")
		delete(m.Metadata, "occurred-at")
		got[m.UUID] = m
	}
	require.Equal(t, message.Metadata{
		"binary": binary, "empty": "", "null": "", "other \"null\"": "", "partition_key": binary,
		watermillsink.MetadataNullHeaders: `["null","other \"null\""]`,
	}, got[first.String()].Metadata)
	require.Equal(t, message.Payload(binary), got[first.String()].Payload)
	require.Equal(t, message.Metadata{"partition_key": "", watermillsink.MetadataTombstone: "true"}, got[second.String()].Metadata)
	require.Empty(t, got[second.String()].Payload)
	require.Empty(t, got[third.String()].Metadata, "a payload, if an empty one, and no key")
}

// Property: nothing that metadata cannot hold is lost silently: such a row is refused, with all
// that is wrong with it, and those before it are counted.
func TestWhatMetadataCannotHoldIsRefused(t *testing.T) {
	t.Parallel()
	header := func(name, value string) outbox.Header { return outbox.Header{Name: name, Value: []byte(value)} }
	for name, c := range map[string]struct {
		cfg     watermillsink.Config
		headers []outbox.Header
		want    []string
	}{
		"twice":                       {watermillsink.Config{}, []outbox.Header{header("x", "1"), header("x", ""), header("y", "1"), header("y", "1")}, []string{`"x" occurs 2 times`, `"y" occurs 2 times`}},
		"contains the separator":      {watermillsink.Config{HeaderSeparator: ", "}, []outbox.Header{header("x", "1"), header("x", "2, 3")}, []string{"contains Config.HeaderSeparator"}},
		"null among several":          {watermillsink.Config{HeaderSeparator: ","}, []outbox.Header{header("x", "1"), {Name: "x"}}, []string{"one value is null"}},
		"name of the key":             {watermillsink.Config{KeyName: "k"}, []outbox.Header{header("k", "forged")}, []string{`"k": the metadata`}},
		"name of the tombstone":       {watermillsink.Config{}, []outbox.Header{header(watermillsink.MetadataTombstone, "true")}, []string{"another meaning"}},
		"name of the null headers":    {watermillsink.Config{}, []outbox.Header{header(watermillsink.MetadataNullHeaders, "[]")}, []string{"another meaning"}},
		"name of the UUID on brokers": {watermillsink.Config{}, []outbox.Header{header("_watermill_message_uuid", "forged")}, []string{"another meaning"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &publisher{}
			messages := rows("1", "bad", "3")
			messages[1].Headers = c.headers
			c.cfg.Batch = 10
			accepted, err := newSink(t, p, c.cfg).Publish(t.Context(), messages)
			require.Equal(t, 1, accepted)
			require.True(t, final(err), "%v", err)
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
			require.Equal(t, []string{"1"}, p.taken())
		})
	}
}

// final reports whether the relay buries a row for err.
func final(err error) bool { return reflect.TypeOf(err) == reflect.TypeOf(relay.Refuse(nil)) }

// Property: the values of a header that is there several times are joined in their order where a
// separator is set.
func TestRepeatedHeadersAreJoined(t *testing.T) {
	t.Parallel()
	var joined string
	p := &publisher{before: func(m *message.Message) error { joined = m.Metadata["x"]; return nil }}
	messages := rows("1")
	for _, value := range []string{"1", "", "\xff"} {
		messages[0].Headers = append(messages[0].Headers, outbox.Header{Name: "x", Value: []byte(value)}, outbox.Header{Name: "y" + value, Value: []byte("a;b")})
	}
	accepted, err := newSink(t, p, watermillsink.Config{HeaderSeparator: ";"}).Publish(t.Context(), messages)
	require.NoError(t, err)
	require.Equal(t, 1, accepted)
	require.Equal(t, "1;;\xff", joined)
}

// Property: a call of the publisher has messages of one topic, in order, and at most Batch of them.
func TestBatchesAreOfOneTopic(t *testing.T) {
	t.Parallel()
	p := &publisher{}
	messages := rows("1", "2", "3", "4", "5", "6")
	messages[3].Topic, messages[4].Topic = "b", "b"
	accepted, err := newSink(t, p, watermillsink.Config{Batch: 2}).Publish(t.Context(), messages)
	require.NoError(t, err)
	require.Equal(t, 6, accepted)
	require.Equal(t, [][]string{{"a 1", "a 2"}, {"a 3"}, {"b 4", "b 5"}, {"a 6"}}, p.calls)
}

// Property: of a call that failed nothing counts but what was accepted one by one afterwards; the
// message that fails is found, with the messages before it counted, and only it is refused.
func TestFailureInABatchIsFound(t *testing.T) {
	t.Parallel()
	away, tooLarge := errors.New("away"), errors.New("too large")
	for cause, isFinal := range map[error]bool{away: false, tooLarge: true} {
		p := &publisher{before: func(m *message.Message) error {
			if string(m.Payload) == "3" {
				return fmt.Errorf("broker: %w", cause)
			}
			return nil
		}}
		sink := newSink(t, p, watermillsink.Config{Batch: 4, Final: func(err error) bool { return errors.Is(err, tooLarge) }})
		accepted, err := sink.Publish(t.Context(), rows("1", "2", "3", "4", "5"))
		require.ErrorIs(t, err, cause)
		require.Equal(t, 2, accepted)
		require.Equal(t, isFinal, final(err))
		require.Equal(t, [][]string{{"a 1", "a 2", "a 3", "a 4"}, {"a 1"}, {"a 2"}, {"a 3"}}, p.calls)
	}

	// What passes by itself costs duplicates, and later calls are batches again.
	once := away
	p := &publisher{before: func(m *message.Message) error {
		if string(m.Payload) != "2" {
			return nil
		}
		err := once
		once = nil
		return err
	}}
	accepted, err := newSink(t, p, watermillsink.Config{Batch: 2}).Publish(t.Context(), rows("1", "2", "3", "4"))
	require.NoError(t, err)
	require.Equal(t, 4, accepted)
	require.Equal(t, [][]string{{"a 1", "a 2"}, {"a 1"}, {"a 2"}, {"a 3", "a 4"}}, p.calls)
}

// Property: a publisher that hangs costs the relay the time of its context and one goroutine,
// however often it tries; when the call ends at last, everything is published, in order.
func TestPublisherThatHangs(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	release := make(chan struct{})
	p := &publisher{before: func(*message.Message) error { <-release; return nil }}
	sink := newSink(t, p, watermillsink.Config{Batch: 10, Final: func(error) bool { return true }})
	for _, payload := range []string{"1", "2", "3"} {
		publish(t, pool, outbox.Message{Topic: "a", Key: []byte("k"), Payload: []byte(payload)})
	}
	interrupted := make(chan error, 1000)
	hooks := relay.Hooks{Interrupted: func(err error) { interrupted <- err }}
	stop := starts(t, newRelay(t, pool, sink, relay.Config{Lease: 3 * time.Second, Hooks: hooks}))
	var texts []string
	for len(texts) < 3 {
		err := testwait.Chan(t, "the relay notices", interrupted)
		// A slow machine may lose the lease during the test, or the database may be late.
		if errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), "return") {
			texts = append(texts, err.Error())
		}
	}
	require.Contains(t, texts[0], "did not return in time")
	require.Contains(t, texts[1], "has still not returned")
	require.Contains(t, texts[2], "has still not returned")
	p.mu.Lock()
	require.Len(t, p.calls, 1)
	p.mu.Unlock()
	require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox_dead`), "that time was over is no verdict about a row")

	close(release)
	testwait.True(t, `len(p.taken()) >= 6`, func() bool { return len(p.taken()) >= 6 })
	stop()
	require.Equal(t, []string{"1", "2", "3", "1", "2", "3"}, p.taken()[:6], "the call that was left ends before the next begins")
}

// Property: a call that was left has copies: the relay may use the memory of its rows again.
func TestMessagesAreCopies(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	p := &publisher{before: func(*message.Message) error { <-release; return nil }}
	sink := newSink(t, p, watermillsink.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	messages := rows("1")
	done := make(chan error, 1)
	go func() {
		_, err := sink.Publish(ctx, messages)
		done <- err
	}()
	testwait.True(t, "a call", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return len(p.calls) == 1 })
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	messages[0].Payload[0] = 'X'
	close(release)
	testwait.True(t, `len(p.taken()) == 1`, func() bool { return len(p.taken()) == 1 })
	require.Equal(t, []string{"1"}, p.taken())
}

// Property: messages carry the context of the call, for publishers that heed it, and what such a
// publisher returns when the context ends is no verdict about a row.
func TestMessagesCarryTheContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	heeded := make(chan struct{})
	p := &publisher{before: func(m *message.Message) error {
		cancel()
		<-m.Context().Done()
		close(heeded)
		return m.Context().Err()
	}}
	accepted, err := newSink(t, p, watermillsink.Config{Final: func(error) bool { return true }}).Publish(ctx, rows("1"))
	require.Zero(t, accepted)
	require.ErrorIs(t, err, context.Canceled)
	require.False(t, final(err))
	testwait.Chan(t, "the messages have the call's context", heeded)
}

// Property: wrong settings are refused with field, value and bound, all at once.
func TestWrongSettingsAreRefused(t *testing.T) {
	t.Parallel()
	_, err := watermillsink.New(nil, watermillsink.Config{Batch: -1, KeyName: "message-id", HeaderSeparator: string(make([]byte, 256))})
	for _, want := range []string{"publisher is nil", "Batch -1: want 1 to 10000", `KeyName "message-id"`, "HeaderSeparator has 256 bytes"} {
		require.ErrorContains(t, err, want)
	}
	for _, name := range []string{"\xff", "a\nb", "_watermill_message_uuid", watermillsink.MetadataTombstone, string(make([]byte, 256))} {
		_, err := watermillsink.New(&publisher{}, watermillsink.Config{KeyName: name})
		require.ErrorContains(t, err, "KeyName", name)
	}
}
