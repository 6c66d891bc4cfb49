package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/effectonce/effectonce/consumer"
)

// Parts of Measure.
const (
	partThroughput = "throughput" // consumer and relay, with the cost of a message
	partKeys       = "keys"       // idempotency keys
	partNetwork    = "network"    // consumer, relay and keys with PostgreSQL away
	partLatency    = "latency"    // from commit to consumable
	partGrowth     = "growth"     // tables of several sizes
)

// Parts returns the parts in the order in which they run.
func Parts() []string {
	return []string{partThroughput, partKeys, partNetwork, partLatency, partGrowth}
}

// ParseParts parses names separated by commas.
func ParseParts(text string) ([]string, error) {
	named := strings.Split(text, ",")
	for _, name := range named {
		if !slices.Contains(Parts(), name) {
			return nil, fmt.Errorf("want some of %s, separated by commas", strings.Join(Parts(), ", "))
		}
	}
	return named, nil
}

// ParseSizes parses numbers of claims or rows separated by commas.
func ParseSizes(text string) (sizes []int, err error) {
	for part := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(part)
		if err != nil || n < 0 || n > BacklogRowsMax {
			return nil, fmt.Errorf("want numbers from 0 to %d, separated by commas", BacklogRowsMax)
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}

// MeasureOptions are the options of Measure. Servers is required.
type MeasureOptions struct {
	Servers

	Command []string // as in RelayOptions; without it latency is left out
	Parts   []string // default: throughput and keys
	Rounds  int      // 1 to 25; default 5
	Short   bool     // smaller sizes and 3 rounds
	// Claims and Rows are the sizes of growth. Default 0, 100,000, 1,000,000 claims, and 10,000,
	// 100,000 and 1,000,000 rows.
	Claims, Rows []int
	// Progress gets one line at a time. Default: none.
	Progress func(line string)

	scale int // tests measure less
}

func (o MeasureOptions) withDefaults() (MeasureOptions, error) {
	if len(o.Parts) == 0 {
		o.Parts = []string{partThroughput, partKeys}
	}
	if o.Rounds == 0 {
		o.Rounds = 5
		if o.Short {
			o.Rounds = 3
		}
	}
	if len(o.Claims) == 0 {
		o.Claims = []int{0, 100_000, 1_000_000}
	}
	if len(o.Rows) == 0 {
		o.Rows = []int{10_000, 100_000, 1_000_000}
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	if o.scale = cmp.Or(o.scale, 1); o.Short {
		o.scale *= 4
	}
	return o, errors.Join(o.check(), inBounds("rounds", o.Rounds, RoundsMin, RoundsMax))
}

// measurement is one run of Measure.
type measurement struct {
	*site

	opts    MeasureOptions
	consume *consumeBench
	relay   *relayBench
	loads   map[string]load
	samples samples
	results *Results
	runs    int // names groups and relays
}

// Measure runs parts, each against another way in turns, and returns plots.
func Measure(ctx context.Context, opts MeasureOptions) (_ *Results, err error) {
	opts, err = opts.withDefaults()
	if err != nil {
		return nil, err
	}
	s, err := newSite(ctx, opts.Servers)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	note := func(format string, args ...any) { opts.Progress(fmt.Sprintf(format, args...)) }
	silent := func(string, ...any) {}
	m := &measurement{site: s, opts: opts, samples: samples{}, results: &Results{
		Rounds: opts.Rounds, Short: opts.Short, Machine: fmt.Sprintf("%d CPUs, %s/%s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH),
	}}
	m.consume = &consumeBench{site: s, samples: samples{}, note: silent, opts: ConsumeOptions{
		Messages: max(MessagesMin, 40_000/opts.scale), Partitions: ConsumePartitionsDefault,
	}}
	m.relay = &relayBench{site: s, samples: samples{}, note: note, opts: RelayOptions{
		Rows: max(RowsMin, 200_000/opts.scale), Rounds: opts.Rounds, LatencySeconds: max(1, 5/opts.scale), Command: opts.Command,
	}}
	if err := m.prepare(ctx); err != nil {
		return nil, err
	}
	parts := map[string]func(context.Context) error{
		partThroughput: m.throughput, partKeys: m.keysPart, partNetwork: m.networkPart, partLatency: m.latencyPart, partGrowth: m.growth,
	}
	for _, name := range Parts() {
		if slices.Contains(opts.Parts, name) {
			if err := parts[name](ctx); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return m.results, nil
}

func (m *measurement) prepare(ctx context.Context) (err error) {
	if m.relay.topic, err = m.topic(ctx, "drain", RelayPartitionsDefault); err != nil {
		return err
	}
	if m.relay.progress, err = m.topic(ctx, "progress", 1); err != nil {
		return err
	}
	if err := errors.Join(
		m.exec(ctx, "create the poller's table", pollerTableSQL), m.exec(ctx, "create the benchmark's tables", consumeTablesSQL),
		m.exec(ctx, "create the accounts", accountsSQL),
	); err != nil {
		return err
	}
	m.loads, err = m.consume.loads(ctx)
	return err
}

// way is one of those that are compared at a place.
type way struct {
	name    string
	against string
	n       int                             // messages
	prepare func(ctx context.Context) error // does not count
	run     func(ctx context.Context) (rate float64, err error)
}

// compare runs the ways of a place in turns, in each round. The samples are under the plot's name.
func (m *measurement) compare(ctx context.Context, plot, at string, ways ...way) error {
	conn, closeConn, err := m.connect(ctx)
	if err != nil {
		return err
	}
	defer closeConn()
	server, err := findServer(ctx, conn)
	if err != nil {
		return err
	}
	for round := range m.opts.Rounds {
		for i := range ways {
			w := ways[(i+round)%len(ways)]
			m.runs++
			if err := m.turn(ctx, server, sampleKey(plot, w.name, at), w); err != nil {
				return fmt.Errorf("%s, %s, %s: %w", plot, at, w.name, err)
			}
			rates := m.samples[sampleKey(plot, w.name, at)]
			m.opts.Progress(fmt.Sprintf("round %d: %s, %s, %s: %.0f a second", round+1, plot, at, w.name, rates[len(rates)-1]))
		}
	}
	return nil
}

func sampleKey(parts ...string) string { return strings.Join(parts, "/") }

func (m *measurement) turn(ctx context.Context, server *server, key string, w way) error {
	if err := errors.Join(w.prepare(ctx), m.checkpoint(ctx)); err != nil {
		return err
	}
	wal, err := m.number(ctx, "the position of the write-ahead log", walSQL)
	if err != nil {
		return err
	}
	own, its, used := begin(), server.cpuSeconds(), &relayUsage{}
	rate, err := w.run(ctx)
	if err != nil {
		return err
	}
	own.end(used)
	its = since(its, server.cpuSeconds())
	after, err := m.number(ctx, "the position of the write-ahead log", walSQL)
	if err != nil {
		return err
	}
	m.samples.add(key, rate)
	m.samples.add(key+"/wal", float64(after-wal)/float64(w.n))
	for name, seconds := range map[string]*float64{"cpu": used.CPUSeconds, "server": its} {
		if each := perMillion(seconds, w.n); each != nil { // microseconds a message
			m.samples.add(key+"/"+name, *each)
		}
	}
	return nil
}

// plot makes a plot of what compare measured at places; suffix chooses the figure.
func (m *measurement) plot(p *Plot, measured, suffix string, places []string, ways ...way) {
	for _, at := range places {
		for _, w := range ways {
			p.add(w.name, at, m.samples[sampleKey(measured, w.name, at)+suffix], w.against, m.samples[sampleKey(measured, w.against, at)+suffix])
		}
	}
	if len(p.Series) > 0 {
		m.results.Plots = append(m.results.Plots, p)
	}
}

// consumers are the consumer and the textbook's.
func (m *measurement) consumers(clean func(context.Context) error) []way {
	b := m.consume
	ways := []way{
		{name: "textbook, a goroutine per partition", n: m.loads["per_message"].messages},
		{name: "Watermill", n: m.loads["per_message"].messages},
		{name: "consumer", against: "textbook, a goroutine per partition", n: b.opts.Messages},
	}
	for i, run := range []func(context.Context, string) (float64, error){
		func(ctx context.Context, group string) (float64, error) {
			return b.textbookParallel(ctx, m.loads["per_message"], group)
		},
		func(ctx context.Context, group string) (float64, error) {
			return b.watermill(ctx, m.loads["per_message"], group)
		},
		func(ctx context.Context, group string) (float64, error) {
			return b.engine(ctx, m.loads["by_id"], group, b.queue(), consumer.DedupByID)
		},
	} {
		ways[i].prepare = clean
		n := ways[i].n
		ways[i].run = func(ctx context.Context) (float64, error) {
			rate, err := run(ctx, m.group("run-"+strconv.Itoa(m.runs)))
			return rate, b.finish(ctx, "run", m.runs, load{messages: n}, rate, err)
		}
	}
	return ways
}

// relays are the relay and the textbook's poller, which drain the same backlog.
func (m *measurement) relays() []way {
	b := m.relay
	ways := []way{{name: "SKIP LOCKED poller"}, {name: "relay", against: "SKIP LOCKED poller"}, {name: "relay, exactly once", against: "SKIP LOCKED poller"}}
	for i, d := range []drain{
		{prepare: b.refill, run: b.skipLocked},
		{prepare: func(context.Context) error { return nil }, run: b.relay},
		{prepare: func(context.Context) error { return nil }, run: b.exactlyOnce},
	} {
		ways[i].n = b.opts.Rows
		ways[i].prepare = func(ctx context.Context) error { return errors.Join(d.prepare(ctx), b.emptyTopic(ctx)) }
		ways[i].run = func(ctx context.Context) (float64, error) {
			begun := time.Now()
			err := d.run(ctx, m.runs)
			return float64(b.opts.Rows) / time.Since(begun).Seconds(), err
		}
	}
	return ways
}

// refillOutbox makes a backlog of this many rows.
func (m *measurement) refillOutbox(ctx context.Context, rows int) error {
	m.relay.opts.Rows = rows
	if err := m.exec(ctx, "empty the outbox", emptyOutboxSQL); err != nil {
		return err
	}
	return m.relay.fill(ctx, rows)
}
