package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"go.yaml.in/yaml/v3"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/metrics"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/relay"
)

// outagesFile has the metrics of real outages, as promtool tests rules with them, and which alerts
// fire. It is written by TestOutagesAreAsRecorded with RECORD_OUTAGES=1, and .ci/deploy runs
// promtool on it.
const outagesFile = "../../../../deploy/prometheus/outages_test.yaml"

// scene is an outage, with one or two replicas on a database and brokers of their own.
type scene struct {
	name   string
	what   string   // for people who read the recording
	alerts []string // that fire when it has lasted for long, and no others do
	fewer  bool     // only one replica runs
	sink   func(*stage, string) relay.Sink
	strike func(*testing.T, *stage)
	struck func(*stage) bool // the metrics show it
}

var scenes = []scene{
	{
		name: "brokers away", what: "No replica reaches the brokers; rows wait.", alerts: []string{"OutboxKafkaAway"},
		strike: func(t *testing.T, s *stage) {
			t.Helper()
			s.cut("a", true)
			s.cut("b", true)
			s.insert(t, 20)
		},
		struck: func(s *stage) bool {
			return s.all("effectonce_outbox_kafka_away", 1) && s.all("effectonce_outbox_pending_messages", 20)
		},
	},
	{
		name: "one replica cut off", what: "The holder does not reach the brokers; the other replica has taken over.", alerts: []string{"OutboxReplicaCutOff"},
		strike: func(t *testing.T, s *stage) {
			t.Helper()
			s.cut("a", true)
			s.insert(t, 20)
		},
		struck: func(s *stage) bool {
			return s.is("a", "effectonce_outbox_kafka_away", 1) && s.is("b", "effectonce_outbox_shards_owned", 1) && s.is("a", "effectonce_outbox_shards_owned", 0) && s.all("effectonce_outbox_pending_messages", 0)
		},
	},
	{
		name: "database away", what: "The database does not answer.", alerts: []string{"OutboxMetricsStale"},
		strike: func(t *testing.T, s *stage) {
			t.Helper()
			require.NoError(t, s.cluster.Kill(t.Context()))
		},
		struck: func(s *stage) bool {
			return s.missing("effectonce_outbox_pending_messages") && s.all("effectonce_outbox_shards_owned", 0)
		},
	},
	{
		name: "no relay", what: "All replicas have ended; rows wait.", alerts: []string{"OutboxRelayDown"},
		strike: func(t *testing.T, s *stage) {
			t.Helper()
			s.insert(t, 20)
			s.end("a")
			s.end("b")
		},
		struck: func(*stage) bool { return true },
	},
	{
		name: "a call that hangs", what: "A sink does not return on one replica; the other one has taken over.", alerts: []string{"OutboxShardHung"},
		sink: func(s *stage, owner string) relay.Sink {
			return sinkFunc(func(_ context.Context, m []relay.Message) (int, error) {
				if owner == "a" && s.struckNow.Load() {
					<-s.over
				}
				return len(m), nil
			})
		},
		strike: func(t *testing.T, s *stage) {
			t.Helper()
			s.insert(t, 1)
		},
		struck: func(s *stage) bool {
			return s.is("a", "effectonce_outbox_shards_hung", 1) && s.is("a", "effectonce_outbox_shards_owned", 0) && s.is("b", "effectonce_outbox_shards_owned", 1) && s.all("effectonce_outbox_pending_messages", 0)
		},
	},
	{
		name: "a call that hangs, alone", what: "A sink does not return, and there is no other replica.", fewer: true,
		alerts: []string{"OutboxBehind", "OutboxNoStandby", "OutboxShardHung", "OutboxShardWithoutOwner", "OutboxStalled"},
		sink: func(s *stage, _ string) relay.Sink {
			return sinkFunc(func(_ context.Context, m []relay.Message) (int, error) {
				if s.struckNow.Load() {
					<-s.over
				}
				return len(m), nil
			})
		},
		strike: func(t *testing.T, s *stage) {
			t.Helper()
			s.insert(t, 20)
		},
		struck: func(s *stage) bool {
			return s.is("a", "effectonce_outbox_shards_hung", 1) && s.is("a", "effectonce_outbox_shards_owned", 0)
		},
	},
	{
		name: "backlog", what: "More rows arrive than the receiver takes.", alerts: []string{"OutboxBehind", "OutboxDeliverySlow", "OutboxStalled"},
		sink: func(s *stage, _ string) relay.Sink {
			return sinkFunc(func(ctx context.Context, m []relay.Message) (int, error) {
				if !s.struckNow.Load() {
					return len(m), nil
				}
				if !pause.For(ctx, time.Duration(len(m))*5*time.Millisecond) {
					return 0, ctx.Err()
				}
				return len(m), nil
			})
		},
		// Old rows: the recording is of seconds, and an age of minutes is what the alerts ask for.
		strike: func(t *testing.T, s *stage) {
			t.Helper()
			s.exec(t, `INSERT INTO effectonce.outbox (topic, key, payload, created_at) SELECT 'orders', '', '', clock_timestamp() - interval '10 minutes' FROM generate_series(1, 9000)`)
		},
		struck: func(s *stage) bool {
			return s.one("effectonce_outbox_messages_dispatched_total", func(v float64) bool { return v > 110 })
		},
	},
}

type sinkFunc func(context.Context, []relay.Message) (int, error)

func (f sinkFunc) Publish(ctx context.Context, m []relay.Message) (int, error) { return f(ctx, m) }

// stage is where an outage happens.
type stage struct {
	cluster *servers.Postgres
	pool    *pgxpool.Pool
	metrics map[string]*metrics.Metrics
	away    map[string]*atomic.Bool
	ends    map[string]func()
	over    chan struct{} // ends what hangs

	struckNow atomic.Bool
}

func (s *stage) cut(owner string, away bool) { s.away[owner].Store(away) }
func (s *stage) end(owner string)            { s.ends[owner](); delete(s.metrics, owner) }

func (s *stage) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := s.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

func (s *stage) insert(t *testing.T, rows int) {
	t.Helper()
	s.exec(t, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'orders', '', '' FROM generate_series(1, $1)`, rows)
}

// samples are what one replica shows of its own metrics.
func (s *stage) samples(owner string) map[string]float64 {
	w := httptest.NewRecorder()
	s.metrics[owner].Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	found := map[string]float64{}
	for line := range strings.Lines(w.Body.String()) {
		i := strings.LastIndex(line, " ")
		name := named.FindString(line)
		if name == "" || !strings.HasPrefix(line, name) {
			continue
		}
		if v, err := strconv.ParseFloat(strings.TrimSpace(line[i+1:]), 64); err == nil {
			found[line[:i]] = v
		}
	}
	return found
}

// one reports whether a series of a metric satisfies a condition on some replica.
func (s *stage) one(metric string, holds func(float64) bool) bool {
	for owner := range s.metrics {
		for name, v := range s.samples(owner) {
			if strings.HasPrefix(name, metric+"{") && holds(v) {
				return true
			}
		}
	}
	return false
}

func (s *stage) is(owner, metric string, want float64) bool {
	for name, v := range s.samples(owner) {
		if strings.HasPrefix(name, metric+"{") {
			return v == want
		}
	}
	return false
}

func (s *stage) all(metric string, want float64) bool {
	for owner := range s.metrics {
		if !s.is(owner, metric, want) {
			return false
		}
	}
	return true
}

func (s *stage) missing(metric string) bool {
	return !s.one(metric, func(float64) bool { return true })
}

func newStage(t *testing.T, c scene) *stage {
	t.Helper()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	s := &stage{
		cluster: pgtest.Cluster(t, nil), over: make(chan struct{}),
		metrics: map[string]*metrics.Metrics{}, away: map[string]*atomic.Bool{}, ends: map[string]func(){},
	}
	pgtest.Migrate(t, s.cluster.URL)
	var err error
	s.pool, err = pgxpool.New(t.Context(), s.cluster.URL)
	require.NoError(t, err)
	t.Cleanup(s.pool.Close)
	t.Cleanup(func() {
		close(s.over)
		for _, end := range s.ends {
			end()
		}
	})
	// One after the other, so that each time the same one publishes.
	s.insert(t, 5)
	s.replica(t, c, "a", fake)
	s.await(t, "it publishes", func() bool {
		return s.is("a", "effectonce_outbox_shards_owned", 1) && s.is("a", "effectonce_outbox_pending_messages", 0) && s.one("effectonce_outbox_messages_dispatched_total", func(v float64) bool { return v >= 5 })
	})
	if !c.fewer {
		s.replica(t, c, "b", fake)
		s.await(t, "the other one works, too", func() bool {
			return s.is("b", "effectonce_outbox_pending_messages", 0) && pgtest.Count(t, s.pool, `SELECT count(*) FROM effectonce.outbox_replicas WHERE reached_at IS NOT NULL`) == 2
		})
	}
	return s
}

func (s *stage) await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, 3*time.Minute, 50*time.Millisecond, what)
}

func (s *stage) replica(t *testing.T, c scene, owner string, fake *kfake.Cluster) {
	t.Helper()
	away := &atomic.Bool{}
	m := metrics.New(metrics.Config{Relay: "default", Schema: "effectonce", Version: "1.2.3", Every: 500 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	cfg := relay.Config{Owner: owner, Lease: 2 * time.Second, Hooks: m.Hooks()}
	kafka := []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...), kgo.RetryTimeout(time.Second), kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		if away.Load() {
			return nil, errors.New("broker is away")
		}
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, address)
		return &awayConn{conn, away}, err
	})}
	if c.sink != nil {
		cfg.Sink, kafka = c.sink(s, owner), nil
	}
	r, err := relay.New(s.pool, kafka, cfg)
	require.NoError(t, err)
	running, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { assert.NoError(t, r.Run(running)) })
	group.Go(func() { m.Watch(running, s.pool) })
	s.metrics[owner], s.away[owner] = m, away
	s.ends[owner] = sync.OnceFunc(func() { stop(); group.Wait() })
}

// awayConn fails once the brokers are unreachable.
type awayConn struct {
	net.Conn
	away *atomic.Bool
}

func (c *awayConn) Write(p []byte) (int, error) {
	if c.away.Load() {
		_ = c.Close()
		return 0, errors.New("broker is away")
	}
	return c.Conn.Write(p)
}

// recorded is a series over a quarter of an hour without an outage, and an hour with it.
type recorded struct {
	Series string `yaml:"series"`
	Values string `yaml:"values"`
}

// minutes of a recording.
const quiet, outage = 15, 60

// play runs an outage and returns what Prometheus would have seen, extrapolated: a value that grew
// continues to grow at its rate.
func play(t *testing.T, c scene) (all []recorded) {
	t.Helper()
	s := newStage(t, c)
	owners := slices.Sorted(maps.Keys(s.metrics))
	scrape := func() map[string]map[string]float64 {
		at := map[string]map[string]float64{}
		for _, owner := range slices.Collect(maps.Keys(s.metrics)) {
			at[owner] = s.samples(owner)
		}
		return at
	}
	before := scrape()
	s.struckNow.Store(true)
	c.strike(t, s)
	s.await(t, c.name, func() bool { return c.struck(s) })
	first, begun := scrape(), time.Now()
	timer := time.NewTimer(8 * time.Second) // two readings of the same outage: what grows is seen
	<-timer.C
	second, lasted := scrape(), time.Since(begun)
	for _, owner := range owners {
		names := map[string]bool{}
		for _, at := range []map[string]float64{before[owner], first[owner], second[owner]} {
			for name := range at {
				names[name] = true
			}
		}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			const published = `effectonce_outbox_delivery_lag_seconds_count{relay="default"}`
			if strings.HasPrefix(name, "effectonce_outbox_delivery_lag") && first[owner][published] == second[owner][published] {
				continue // many, and they say nothing
			}
			text := values(name, before[owner], first[owner], second[owner], lasted)
			all = append(all, recorded{strings.Replace(name, "{", `{instance="`+owner+`",namespace="pay",`, 1), text})
			if !strings.Contains(name, "{") {
				all[len(all)-1].Series = name + `{instance="` + owner + `",namespace="pay"}`
			}
		}
	}
	return all
}

// values are a series in the notation of promtool.
func values(name string, before, first, second map[string]float64, lasted time.Duration) string {
	begin, end := fmt.Sprintf("_x%d", quiet-1), fmt.Sprintf("_x%d", outage-1)
	v, was := before[name]
	if was {
		begin = fmt.Sprintf("%sx%d", number(v), quiet-1)
	}
	from, is := first[name]
	to, still := second[name]
	switch {
	case is && still && grows(name):
		end = fmt.Sprintf("%s+%sx%d", number(from), number(math.Max(0, math.Round((to-from)/lasted.Minutes()*10)/10)), outage-1)
	case is && still:
		end = fmt.Sprintf("%sx%d", number(to), outage-1)
	case was:
		end = "stale " + end
	}
	return begin + " " + end
}

// grows distinguishes metrics whose values are extrapolated, counters and ages, from those that
// stay.
func grows(name string) bool {
	base := named.FindString(name)
	return strings.HasSuffix(base, "_total") || strings.HasSuffix(base, "_bucket") || strings.HasSuffix(base, "_sum") || strings.HasSuffix(base, "_count") || strings.HasSuffix(base, "pending_age_seconds")
}

func number(v float64) string { return strconv.FormatFloat(math.Round(v*1000)/1000, 'f', -1, 64) }

// recording is a test of promtool.
type recording struct {
	Name    string     `yaml:"name"`
	Every   string     `yaml:"interval"`
	Input   []recorded `yaml:"input_series"`
	Queries []query    `yaml:"promql_expr_test"`
}

type query struct {
	Expr string   `yaml:"expr"`
	At   string   `yaml:"eval_time"`
	Want []sample `yaml:"exp_samples"`
}

type sample struct {
	Labels string `yaml:"labels"`
	Value  int    `yaml:"value"`
}

func newRecording(c scene, input []recorded) recording {
	fires := []sample{}
	for _, alert := range c.alerts {
		fires = append(fires, sample{`{alertname="` + alert + `"}`, 1})
	}
	const firing = `group by (alertname) (ALERTS{alertstate="firing"})`
	return recording{c.name + ": " + c.what, "1m", input, []query{{firing, fmt.Sprintf("%dm", quiet-1), []sample{}}, {firing, fmt.Sprintf("%dm", quiet+outage-5), fires}}}
}

// named matches the metrics of the program.
var named = regexp.MustCompile(`\beffectonce_[a-z_]+`)

// told are the metrics that distinguish outages.
var told = regexp.MustCompile(`^outbox_(kafka_away|shards_hung|shards_owned|shards|relay_info|metrics_errors_total|interruptions_total|lease_changes_total|oldest_pending_age_seconds)\{`)

// shape is what is the same each time an outage is recorded: which series there are, and which of
// them are 0 or grow.
func shape(all []recorded) string {
	var text strings.Builder
	for _, r := range all {
		if !told.MatchString(r.Series) {
			continue
		}
		values := regexp.MustCompile(`x\d+`).ReplaceAllString(r.Values, "")
		if grows(r.Series) {
			values = regexp.MustCompile(`[0-9.]*[1-9][0-9.]*`).ReplaceAllString(values, "N")
		}
		fmt.Fprintln(&text, r.Series, values)
	}
	return text.String()
}

// Property: in each outage exactly those alerts fire that name it. The metrics are those of real
// outages, with relays, a database and brokers; promtool runs the alerts over them. They are
// recorded anew here, and are as they were. Row O45 of guarantees.md.
func TestOutagesAreAsRecorded(t *testing.T) { //nolint:tparallel // the group ends when all scenes have
	longtest.Only(t, "seven clusters, each with an outage")
	t.Parallel()
	var mu sync.Mutex
	found := map[string]recording{}
	t.Run("scenes", func(t *testing.T) {
		for _, c := range scenes {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				r := newRecording(c, play(t, c))
				mu.Lock()
				defer mu.Unlock()
				found[c.name] = r
			})
		}
	})
	if t.Failed() {
		return
	}
	if os.Getenv("RECORD_OUTAGES") != "" { //nolint:forbidigo // for the person who records
		write(t, found)
	}
	var file struct{ Tests []recording }
	recorded, err := os.ReadFile(outagesFile)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(recorded, &file))
	require.Len(t, file.Tests, len(scenes))
	for i, c := range scenes {
		assert.Equal(t, found[c.name].Queries, file.Tests[i].Queries, c.name)
		assert.Equal(t, shape(file.Tests[i].Input), shape(found[c.name].Input), "%s: if this is wanted, record it with RECORD_OUTAGES=1 and run promtool", c.name)
	}
}

func write(t *testing.T, found map[string]recording) {
	t.Helper()
	file := struct {
		Rules []string    `yaml:"rule_files"`
		Every string      `yaml:"evaluation_interval"`
		Tests []recording `yaml:"tests"`
	}{[]string{"alerts.yaml"}, "1m", nil}
	for _, c := range scenes {
		file.Tests = append(file.Tests, found[c.name])
	}
	text, err := yaml.Marshal(file)
	require.NoError(t, err)
	head := "# Written by TestOutagesAreAsRecorded with RECORD_OUTAGES=1: metrics of real outages, and the alerts that fire.\n"
	require.NoError(t, os.WriteFile(outagesFile, append([]byte(head), text...), 0o600))
}
