package bench

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Percentile is percentile.
func Percentile(values []float64, share float64) float64 { return percentile(values, share) }

// Rate returns the rate of a meter that saw these commits.
func Rate(want int, commits ...int) (rate float64, done bool, err error) {
	m := &meter{want: want}
	for _, n := range commits {
		done = m.add(n)
	}
	rate, err = m.rate()
	return rate, done, err
}

// Judge returns the verdict on a run of n messages that left the effects of a statement.
func Judge(ctx context.Context, on Servers, n int, effects string) (err error) {
	s, err := newSite(ctx, on)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	b := &consumeBench{site: s, samples: samples{}, note: func(string, ...any) {}}
	return errors.Join(
		b.exec(ctx, "create tables", consumeTablesSQL),
		b.exec(ctx, "make effects", effects),
		b.finish(ctx, "by_id", 0, load{messages: n}, 1, nil),
	)
}

// WithShardPages lets the scenario shards read small pages: a backlog of few rows then lasts until
// the shards are spread.
func WithShardPages(o RelayOptions, rows int) RelayOptions {
	o.shardPageRows = rows
	return o
}

// Cursor gets an outbox to Kafka by the gap-safe cursor, or by the bare one.
func Cursor(ctx context.Context, on Servers, schema string, rows int, gapSafe bool) (int64, error) {
	s := &site{Servers: on, schema: schema}
	if gapSafe {
		return s.cursor(ctx, gapSafeSQL, rows)
	}
	return s.cursor(ctx, cursorSQL, rows)
}

// Distance leads to a database that is a round trip away.
func Distance(ctx context.Context, databaseURL string, roundTrip time.Duration) (address string, stop func(), err error) {
	d, address, err := newDistance(ctx, databaseURL, roundTrip)
	if err != nil {
		return "", nil, err
	}
	return address, d.close, nil
}

// Through is through.
func Through(databaseURL string, port int) string { return through(databaseURL, port) }

// RoundTrip is measureRoundTrip.
func RoundTrip(ctx context.Context, databaseURL string) (float64, error) {
	return measureRoundTrip(ctx, databaseURL)
}

// ServerCPU returns what a server has used, by a connection to it; nil: it is not to be seen.
func ServerCPU(ctx context.Context, conn *pgx.Conn) (look func() *float64, err error) {
	found, err := findServer(ctx, conn)
	return found.cpuSeconds, err
}

// UnknownKeys returns the keys that ratios of a report name and that the report does not have.
func UnknownKeys(report any) (unknown []string) {
	known := map[string]bool{}
	for _, f := range figuresOf(report) {
		known[f.key] = true
	}
	for _, f := range figuresOf(report) {
		if a, b, is := strings.Cut(f.Get("ratio"), "/"); is && (!known[a] || !known[b]) {
			unknown = append(unknown, f.key)
		}
	}
	return unknown
}
