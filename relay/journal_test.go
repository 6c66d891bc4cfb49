package relay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: progress of a transaction that was never committed is no progress: its rows are
// published. Row O30 of guarantees.md.
func TestProgressOfAnAbortedTransactionDoesNotCount(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	// The transaction stays open, with the rows and their progress in it, as behind a relay that
	// was killed.
	var mended atomic.Bool
	fake.ControlKey(int16(kmsg.EndTxn), func(request kmsg.Request) (kmsg.Response, error, bool) {
		if mended.Load() {
			return nil, nil, false
		}
		fake.KeepControl()
		response := request.ResponseKind().(*kmsg.EndTxnResponse)
		response.ErrorCode = kerr.ProducerFenced.Code
		return response, nil, true
	})
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, relay.Config{ExactlyOnce: true})
	require.NoError(t, err)
	insert(t, pool, "orders", "k", "1")
	_, err = r.Drain(t.Context())
	require.ErrorIs(t, err, kerr.ProducerFenced)
	mended.Store(true)
	require.EqualValues(t, 1, drain(t, r))
	require.Len(t, kafkatest.ReadAllAt(t, fake.ListenAddrs(), "orders"), 1)
}

// read says that a client was handed what it asked to read.
type read chan struct{}

func (r read) OnBrokerRead(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if key != int16(kmsg.Fetch) || err != nil {
		return
	}
	select {
	case r <- struct{}{}:
	default:
	}
}

// Property: a relay that takes over reads progress to its end: where a transaction of another shard
// is open in front of it, it waits for that, and publishes nothing again. Row O30 of guarantees.md.
func TestProgressBehindAnOpenTransactionIsWaitedFor(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	cfg := relay.Config{ExactlyOnce: true, ProgressTopic: kafkatest.UnusedTopic(t), Lease: time.Minute} // who loses it would wait, too
	first := newRelay(t, pool, cfg)
	stop := starts(t, first)
	published := func(n int) {
		t.Helper()
		testwait.True(t, "rows are published", func() bool {
			return one[int](t, pool, `SELECT coalesce(sum(published), 0)::int FROM effectonce.outbox_progress_now`) == n
		})
	}
	insert(t, pool, topic, "k", "1")
	published(1)
	must(t, pool, `CREATE TABLE before AS SELECT * FROM effectonce.outbox_progress_now`)

	other := kafkatest.Client(t, kgo.TransactionalID(topic))
	require.NoError(t, other.BeginTransaction())
	require.NoError(t, other.ProduceSync(ctx, &kgo.Record{Topic: cfg.ProgressTopic, Key: []byte("another shard"), Value: []byte("{}")}).FirstErr())
	insert(t, pool, topic, "k", "2")
	published(2)
	stop()
	// As behind a kill right after the commit: the copy in the database is behind.
	must(t, pool, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published, journal_offset)
		SELECT b.relay, b.shard, w.advance + 1, b.progress_epoch, b.tick, b.next_tick, b.seq, b.floor, b.published, b.journal_offset FROM before b, effectonce.outbox_progress_now w`)

	reads, ended := make(read, 1), make(chan error, 1)
	second, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...), kgo.WithHooks(reads)}, cfg)
	require.NoError(t, err)
	go func() {
		_, err := second.Drain(ctx)
		ended <- err
	}()
	select {
	case <-reads:
		require.NoError(t, other.EndTransaction(ctx, kgo.TryCommit))
		require.NoError(t, <-ended)
	case err := <-ended:
		require.NoError(t, err)
		require.NoError(t, other.EndTransaction(ctx, kgo.TryCommit))
	}
	require.Equal(t, []string{"1", "2"}, values(t, topic), "INVARIANT: nothing twice")
	require.Equal(t, 2, one[int](t, pool, `SELECT published FROM effectonce.outbox_progress_now`))
}

// Property: a relay that was led back to an old primary publishes nothing: where this process has
// worked on a later timeline, and with exactly once where any has. Row O26 of guarantees.md.
func TestOldPrimaryIsKnownFromElsewhere(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1)
	cfg := relay.Config{ExactlyOnce: true, ProgressTopic: kafkatest.UnusedTopic(t)}
	r := newRelay(t, pool, cfg)
	insert(t, pool, topic, "k", "1")
	drain(t, r)
	insert(t, pool, topic, "k", "2")
	require.NoError(t, r.HasSeen(ctx, 1))
	_, err := r.Drain(ctx)
	require.ErrorIs(t, err, relay.ErrOldPrimary)

	entries := kafkatest.ReadAll(t, cfg.ProgressTopic)
	last := entries[len(entries)-1]
	var entry map[string]any
	numbers := json.NewDecoder(bytes.NewReader(last.Value))
	numbers.UseNumber()
	require.NoError(t, numbers.Decode(&entry))
	timeline, err := entry["timeline"].(json.Number).Int64()
	require.NoError(t, err)
	entry["timeline"] = timeline + 1
	value, err := json.Marshal(entry)
	require.NoError(t, err)
	require.NoError(t, kafkatest.Client(t).ProduceSync(ctx, &kgo.Record{Topic: cfg.ProgressTopic, Key: last.Key, Value: value}).FirstErr())
	limited, cancel := context.WithTimeout(ctx, testwait.Bound)
	defer cancel()
	require.ErrorIs(t, newRelay(t, pool, cfg).Run(limited), relay.ErrOldPrimary)
	require.Equal(t, []string{"1"}, values(t, topic))
}

// Property: what a connection to another server shows is not published, and no progress is made by
// it. Rows O24, O25 of guarantees.md.
func TestWhatAnotherServerShowsIsNotRead(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{})
	drain(t, r)
	insert(t, pool, topic, "k", "1")
	require.ErrorIs(t, r.FetchesElsewhere(t.Context()), relay.ErrAnotherRun)
	require.EqualValues(t, 1, drain(t, r))
}

// Property: a broker that has the progress record of a transaction and does not answer does not
// keep a relay from stopping.
func TestStopWhileProgressIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders", "progress"))
	progress := fake.TopicInfo("progress").TopicID
	silent, answer := make(chan struct{}), make(chan struct{})
	silence := sync.OnceFunc(func() { close(silent) })
	t.Cleanup(func() { close(answer) })
	fake.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		for _, topic := range request.(*kmsg.ProduceRequest).Topics {
			if topic.Topic == "progress" || topic.TopicID == progress {
				silence()
				fake.SleepControl(func() { <-answer })
			}
		}
		return nil, nil, false
	})
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, relay.Config{ExactlyOnce: true, ProgressTopic: "progress", DrainMax: time.Second})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	insert(t, pool, "orders", "k", "1")
	<-silent
	stop()
	require.NoError(t, testwait.Chan(t, "the relay stops without the broker's answer", done))
}
