package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/relay"
)

// relayBench is one run of Relay.
type relayBench struct {
	*site

	opts  RelayOptions
	topic string
	// progress is the topic where the relay keeps its progress with exactly-once.
	progress string
	// behind is a relay that has published all existing rows.
	behind   string
	samples  samples
	steadies steadies
	note     func(format string, args ...any)
}

// producer returns the options with which every variant produces: those that the relay uses anyway
// (idempotent, acks=all, no linger because a page is already a batch), and the client's default
// compression.
func (s *site) producer() []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(s.Brokers...), kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerLinger(0)}
}

// Relay measures how many rows per second of a backlog reach Kafka through the textbook's poller,
// through a bare cursor that guarantees nothing, and through the relay. It also measures how long a
// single message takes from its commit until a consumer has it, and what a process costs that runs
// only a relay.
func Relay(ctx context.Context, opts RelayOptions) (_ *RelayReport, err error) {
	opts, err = opts.withDefaults()
	if err != nil {
		return nil, err
	}
	s, err := newSite(ctx, opts.Servers)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	b := &relayBench{
		site: s, opts: opts, samples: samples{},
		note: func(format string, args ...any) { opts.Progress(fmt.Sprintf(format, args...)) },
	}
	if b.topic, err = b.site.topic(ctx, "drain", opts.Partitions); err != nil {
		return nil, err
	}
	if b.progress, err = b.site.topic(ctx, "progress", 1); err != nil {
		return nil, err
	}
	if err := b.exec(ctx, "create the poller's table", pollerTableSQL); err != nil {
		return nil, err
	}
	b.behind = "fresh"
	for _, part := range []struct {
		run      func(context.Context) error
		alone    bool // in a process
		scenario []string
	}{
		{b.drains, false, []string{ScenarioDrain, ScenarioProcess}},
		{b.latencies, false, []string{ScenarioLatency}},
		{b.idle, true, []string{ScenarioIdle}},
		{b.large, true, []string{ScenarioProcess}},
		{b.load, true, []string{ScenarioLoad}},
		{b.backlogs, true, []string{ScenarioBacklog}},
		{b.network, true, []string{ScenarioNetwork}},
		{b.pooler, true, []string{ScenarioPooler}},
		{b.shards, true, []string{ScenarioShards}},
	} {
		if !slices.ContainsFunc(part.scenario, opts.has) || part.alone && len(opts.Command) == 0 {
			continue
		}
		if err := part.run(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", part.scenario[0], err)
		}
	}
	return newRelayReport(opts, b.samples, b.steadies), nil
}

// drains measures the backlog of Rows: the variants in this process, and the relay in a separate
// one.
func (b *relayBench) drains(ctx context.Context) error {
	if err := b.fill(ctx, b.opts.Rows); err != nil {
		return err
	}
	for round := range b.opts.Rounds {
		if b.opts.has(ScenarioDrain) {
			if err := b.round(ctx, round); err != nil {
				return err
			}
			b.behind = relayName(round)
		}
		if b.opts.has(ScenarioProcess) && len(b.opts.Command) > 0 {
			if err := b.costs(ctx, round); err != nil {
				return err
			}
			b.behind = costName(round, "")
		}
	}
	return nil
}

// fillRows is how many rows one transaction of the backlog has.
const fillRows = 5000

// fill publishes the backlog once: each relay has its own name and reads it from the beginning.
func (b *relayBench) fill(ctx context.Context, rows int) error {
	b.note("publishing a backlog of %d rows", rows)
	for from := 1; from <= rows; from += fillRows {
		to := min(from+fillRows-1, rows)
		if _, err := b.pool.Exec(ctx, b.sql(fillSQL), b.topic, keysDistinct, payloadBytes, from, to); err != nil {
			return fmt.Errorf("publish a backlog: %w", err)
		}
	}
	return b.exec(ctx, "vacuum the outbox", "VACUUM (ANALYZE) effectonce.outbox")
}

// refill gives the poller the same rows as the relay, also freshly vacuumed.
func (b *relayBench) refill(ctx context.Context) error {
	return errors.Join(
		b.exec(ctx, "empty the poller's table", emptyPollerSQL),
		b.exec(ctx, "fill the poller's table", refillSQL),
		b.exec(ctx, "vacuum the poller's table", "VACUUM (ANALYZE) effectonce.bench_poller"),
	)
}

// drain is a way to send the backlog to Kafka. It returns when everything is acknowledged.
type drain struct {
	key     string
	prepare func(ctx context.Context) error
	run     func(ctx context.Context, round int) error
}

// round runs every variant once. The order rotates, so that no variant always comes first.
func (b *relayBench) round(ctx context.Context, round int) error {
	nothing := func(context.Context) error { return nil }
	drains := []drain{
		{"skip_locked", b.refill, b.skipLocked},
		{"bare_cursor", nothing, b.bareCursor},
		{"gap_safe_cursor", nothing, b.gapSafeCursor},
		{"relay", nothing, b.relay},
		{"exactly_once", nothing, b.exactlyOnce},
	}
	for i := range drains {
		d := drains[(i+round)%len(drains)]
		if err := b.measure(ctx, d, round); err != nil {
			return fmt.Errorf("round %d: %s: %w", round+1, d.key, err)
		}
	}
	return nil
}

// measure runs one variant and counts the records that arrived.
func (b *relayBench) measure(ctx context.Context, d drain, round int) error {
	if err := errors.Join(d.prepare(ctx), b.emptyTopic(ctx), b.checkpoint(ctx)); err != nil {
		return err
	}
	before, err := b.written(ctx)
	if err != nil {
		return err
	}
	begin := time.Now()
	if err := d.run(ctx, round); err != nil {
		return err
	}
	elapsed := time.Since(begin)
	after, err := b.written(ctx)
	if err != nil {
		return err
	}
	if got := after - before; got != int64(b.opts.Rows) && (d.key != "exactly_once" || got < int64(b.opts.Rows)) { // which writes markers, too
		return fmt.Errorf("%d rows became %d records: this is a bug, the figures are void; please report it", b.opts.Rows, got)
	}
	rate := float64(b.opts.Rows) / elapsed.Seconds()
	b.samples.add(d.key, rate)
	b.note("round %d: %-15s %9.0f rows/s", round+1, d.key, rate)
	return nil
}

// emptyTopic keeps records from accumulating on the brokers, whose memory may be this process's.
func (b *relayBench) emptyTopic(ctx context.Context) error {
	ends, err := b.admin.ListEndOffsets(ctx, b.topic)
	if err = errors.Join(err, ends.Error()); err != nil {
		return fmt.Errorf("read the end offsets of topic %s: %w", b.topic, err)
	}
	deleted, err := b.admin.DeleteRecords(ctx, ends.Offsets())
	if err = errors.Join(err, deleted.Error()); err != nil {
		return fmt.Errorf("empty topic %s: %w", b.topic, err)
	}
	return nil
}

// written returns how many records the topic has had.
func (b *relayBench) written(ctx context.Context) (n int64, err error) {
	ends, err := b.admin.ListEndOffsets(ctx, b.topic)
	if err = errors.Join(err, ends.Error()); err != nil {
		return 0, fmt.Errorf("read the end offsets of topic %s: %w", b.topic, err)
	}
	ends.Each(func(end kadm.ListedOffset) { n += end.Offset })
	return n, nil
}

// relayName gives each round a relay with its own progress.
func relayName(round int) string { return "round-" + strconv.Itoa(round) }

// relay drains with package relay, which stores its progress during the drain.
func (b *relayBench) relay(ctx context.Context, round int) error {
	return b.drain(ctx, relay.Config{Name: relayName(round)})
}

// exactlyOnce does the same with records and progress in Kafka transactions.
func (b *relayBench) exactlyOnce(ctx context.Context, round int) error {
	if err := b.drain(ctx, relay.Config{Name: relayName(round) + "-exactly-once", ExactlyOnce: true, ProgressTopic: b.progress}); err != nil {
		return err
	}
	return b.marked(ctx)
}

// marked waits until the brokers have written the markers of all transactions: otherwise the next
// run would count them.
func (b *relayBench) marked(ctx context.Context) error {
	for {
		ends, err := b.admin.ListEndOffsets(ctx, b.topic)
		if err = errors.Join(err, ends.Error()); err != nil {
			return fmt.Errorf("read the end offsets of topic %s: %w", b.topic, err)
		}
		stable, err := b.admin.ListCommittedOffsets(ctx, b.topic)
		if err = errors.Join(err, stable.Error()); err != nil {
			return fmt.Errorf("read the end offsets of topic %s: %w", b.topic, err)
		}
		open := false
		ends.Each(func(end kadm.ListedOffset) {
			at, _ := stable.Lookup(end.Topic, end.Partition)
			open = open || at.Offset < end.Offset
		})
		if !open {
			return nil
		}
	}
}

func (b *relayBench) drain(ctx context.Context, cfg relay.Config) error {
	pool, err := b.newPool(ctx, 4)
	if err != nil {
		return err
	}
	defer pool.Close()
	cfg.Schema = b.schema
	r, err := relay.New(pool, b.producer(), cfg)
	if err != nil {
		return err
	}
	published, err := r.Drain(ctx)
	if err != nil {
		return err
	}
	if published != int64(b.opts.Rows) {
		return fmt.Errorf("the relay counted %d of %d rows: this is a bug, the figures are void; please report it", published, b.opts.Rows)
	}
	return nil
}
