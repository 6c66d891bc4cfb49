package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/metrics"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/monitor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/relay"
)

type runner struct {
	*cli.Settings
	config relay.Config
	// databaseWait is how long a start waits for an unreachable database.
	databaseWait time.Duration
	shards       int
	endpoints    endpoints
}

func newRun(s *cli.Settings) *cobra.Command {
	r := &runner{Settings: s}
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "run",
		Short: "Publish outbox rows to Kafka until SIGTERM",
		Long: `Publish outbox rows to Kafka: every committed row at least once, the rows of a key in order. With --exactly-once,
records and progress are in one Kafka transaction: readers with isolation.level read_committed see each row once,
whatever is killed.

Any number of replicas may run: each shard of the keys is published by one of them, the others stand by. --shards only
counts at the first start; later use "outbox-relay shards".

SIGTERM and SIGINT drain: the relay waits for records in flight, stores progress and releases its leases. A second
signal ends the process at once; the next replica then publishes the last rows again.

It waits for an unreachable database: at the start for --database-wait, later indefinitely. What the database refuses,
such as a password, is an error at once.

  outbox-relay run --listen :9464   # in a container`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return r.run(cmd.Context(), s.Logger(cmd.ErrOrStderr()))
		},
	}, cli.FlagDatabaseURL, cli.FlagBrokers))
	flags := cmd.Flags()
	cli.AddRange(flags, &r.config.Lease, "lease", bounds.Lease, "how long the lease of a dead replica blocks the others")
	cli.AddRange(flags, &r.config.DrainMax, "drain-max", bounds.DrainMax, "how long a stop waits for records in flight")
	cli.AddInt(flags, &r.shards, "shards", 1, 1, shardsMax, "number of shards of the keys, at the relay's first start")
	cli.AddBool(flags, &r.config.ExactlyOnce, "exactly-once", "write records and progress in one Kafka transaction")
	cli.AddRange(flags, &r.config.TransactionMax, "transaction-max", bounds.TransactionMax, "with --exactly-once: how long a transaction gathers rows of a backlog; half of it for others")
	cli.AddText(flags, "progress-topic", 249, "topic of the progress with --exactly-once; default: effectonce-relay-progress", func(text string) error { r.config.ProgressTopic = text; return nil })
	cli.AddBool(flags, &r.config.SkipDead, "skip-dead", "publish later rows of a key although Kafka refused an earlier one, instead of holding them")
	addTopicPrefix(flags, &r.config.TopicPrefix)
	cli.AddChoice(flags, &r.config.Compression, "kafka-compression", []string{"none", "gzip", "snappy", "lz4", "zstd"}, "snappy", "compression of records")
	cli.AddInt(flags, &r.config.RecordBytesMax, "record-bytes-max", 1_048_588, 1024, 90_000_000, "largest record and batch, in bytes; as max.message.bytes of topics")
	cli.AddRange(flags, &r.config.Keep, "keep", bounds.Keep, "how long published rows stay in the outbox")
	cli.AddDuration(flags, &r.databaseWait, "database-wait", 5*time.Minute, 0, 24*time.Hour, "how long a start waits for an unreachable database; 0: no wait")
	r.endpoints.addFlags(flags)
	return cmd
}

func (r *runner) run(ctx context.Context, logger *slog.Logger) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	lives, stop := context.WithCancel(context.WithoutCancel(ctx)) // health and metrics end later than the relay
	defer stop()
	watch, err := r.openWatch(lives, logger)
	if err != nil {
		return err
	}
	defer watch.close(stop)
	pool, err := r.ConnectWaiting(ctx, r.databaseWait, logger)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Check(ctx, pool, migrations.Options{Schema: r.Schema}); err != nil {
		return err
	}
	r.config.Schema, r.config.Name, r.config.Logger, r.config.Shards = r.Schema, r.Relay, logger, int16(r.shards)
	r.config.Hooks = watch.metrics.Hooks()
	publisher, err := relay.New(pool, r.KafkaOptions(logger), r.config)
	if err != nil {
		return err
	}
	logger.InfoContext(ctx, "relay starts", "relay", r.Relay, "database", r.Target(), "schema", r.Schema,
		"brokers", strings.Join(r.Brokers, ","), "version", readVersion().Version)
	r.lookForBrokers(ctx, logger)
	defer context.AfterFunc(ctx, func() {
		logger.Info("relay drains; a second signal ends it at once", "relay", r.Relay, "drain_max", r.config.DrainMax)
	})()
	if err := watch.begin(ctx, lives, pool); err != nil {
		return err
	}
	if err := publisher.Run(ctx); err != nil {
		return err
	}
	logger.InfoContext(ctx, "relay stopped", "relay", r.Relay)
	return nil
}

// lookForBrokers only warns: rows wait in the outbox until a broker answers.
func (r *runner) lookForBrokers(ctx context.Context, logger *slog.Logger) {
	err := r.AskKafka(ctx, cli.BrokersMax, func(ctx context.Context, client *kgo.Client) error { return client.Ping(ctx) })
	if err != nil && ctx.Err() == nil {
		logger.WarnContext(ctx, "no broker answers: rows wait in the outbox until one does; check --brokers and the network, TLS and credentials",
			"brokers", strings.Join(r.Brokers, ","), "error", err)
	}
}

// gcPercent is the allowed garbage in percent of the live heap. A relay holds some tens of MB and
// produces a kilobyte of garbage for each row. With Go's 100 it spends a good part of its CPU time
// on collecting; with 300 it takes twice the memory and saves no time that could be measured.
// Measured by outbox-relay bench relay. GOGC in the environment wins.
const gcPercent = 150

// watchConnections are database connections for metrics and readiness, so that neither waits for
// the relay's connections, nor takes them from it.
const watchConnections = 2

// watch serves health and metrics until the relay has stopped.
type watch struct {
	state   *monitor.State
	metrics *metrics.Metrics
	server  *monitor.Server // nil: it does not listen
	pool    *pgxpool.Pool   // nil until begin
	work    sync.WaitGroup
}

// openWatch listens before anything else happens, so that probes see a starting replica.
func (r *runner) openWatch(ctx context.Context, logger *slog.Logger) (*watch, error) {
	w := &watch{state: monitor.NewState()}
	w.metrics = metrics.New(metrics.Config{
		Relay: r.Relay, Schema: r.Schema, Version: readVersion().Version, Every: r.endpoints.every, Logger: logger, State: w.state,
	})
	if r.endpoints.addr == "" {
		return w, nil
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", r.endpoints.addr)
	switch {
	case err != nil && r.endpoints.listen.Changed:
		return nil, fmt.Errorf("cannot listen on %s: %w: give another --listen, or off", r.endpoints.addr, err)
	case err != nil:
		// The address is only the default: another relay on this machine must not prevent
		// publishing.
		logger.WarnContext(ctx, "no /healthz, /readyz and /metrics: the default address is in use; give --listen", "error", err)
		return w, nil
	}
	reach := "this machine"
	if tcp, is := listener.Addr().(*net.TCPAddr); !is || !tcp.IP.IsLoopback() {
		reach = "other machines too"
	}
	logger.InfoContext(ctx, "listening for /healthz, /readyz and /metrics", "address", listener.Addr().String(), "reachable_from", reach)
	w.server = monitor.New(monitor.Config{Relay: r.Relay, Schema: r.Schema, State: w.state, Metrics: w.metrics.Handler(), Logger: logger})
	w.work.Go(func() {
		if err := w.server.Run(ctx, listener); err != nil {
			logger.ErrorContext(ctx, "/healthz, /readyz and /metrics stopped", "error", err)
		}
	})
	return w, nil
}

// begin also starts to watch the database of the relay's pool, until lives ends. ctx is the relay's.
func (w *watch) begin(ctx, lives context.Context, pool *pgxpool.Pool) error {
	if w.server == nil {
		return nil
	}
	config := pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = watchConnections, 0, 0
	var err error
	if w.pool, err = pgxpool.NewWithConfig(lives, config); err != nil {
		return err
	}
	w.server.Ask(w.pool)
	w.work.Go(func() { w.metrics.Watch(lives, w.pool) })
	w.state.Running()
	context.AfterFunc(ctx, w.state.Draining)
	return nil
}

// close stops everything, with the end of lives. Call it after the relay has stopped.
func (w *watch) close(stop context.CancelFunc) {
	stop()
	w.work.Wait()
	if w.pool != nil {
		w.pool.Close()
	}
}

var topicPrefix = regexp.MustCompile(`^[a-zA-Z0-9._-]*$`)

// addTopicPrefix adds the flag of relay.Config.TopicPrefix.
func addTopicPrefix(flags *pflag.FlagSet, prefix *string) {
	cli.AddText(flags, "topic-prefix", 200, "prefix of every topic's name in Kafka", func(text string) error {
		*prefix = text
		if !topicPrefix.MatchString(text) {
			return errors.New("want letters, digits, dots, underscores and hyphens")
		}
		return nil
	})
}

// Settings of the endpoints.
const (
	// listenStandard is only reachable from this machine.
	listenStandard = "127.0.0.1:9464"
	listenOff      = "off"
)

// endpoints configures what "run" serves over HTTP.
type endpoints struct {
	listen *pflag.Flag // to know whether it was set
	addr   string      // empty: off
	every  time.Duration
}

func (e *endpoints) addFlags(flags *pflag.FlagSet) {
	cli.AddOption(flags, "listen", "address", listenStandard, "address of /healthz, /readyz and /metrics, as host:port, or off", e.parseListen)
	e.listen = flags.Lookup("listen")
	cli.AddDuration(flags, &e.every, "metrics-interval", 15*time.Second, time.Second, 10*time.Minute, "pause between two reads of the database for /metrics")
}

func (e *endpoints) parseListen(text string) error {
	if text == listenOff {
		e.addr = ""
		return nil
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil || strings.ContainsAny(host, "/@ ") {
		return errors.New("want host:port, :port for every address of this machine, or off")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return errors.New("want a port, 0 to 65535; 0 takes a free one")
	}
	e.addr = text
	return nil
}

// readyBytesMax is above the size of any answer of /readyz.
const readyBytesMax = 64 << 10

func newReady(*cli.Settings) *cobra.Command {
	var at endpoints
	var timeout time.Duration
	cmd := cli.Offline(&cobra.Command{
		Use:   "ready",
		Short: "Check that the relay on this machine is ready, as a container's health check",
		Long: `Request /readyz of the relay on this machine, or in this container, and print the answer. --listen is the relay's own,
so that one OUTBOX_LISTEN serves both. Exit status 1 if the relay is not ready, or does not answer. This checks the
replica, not the pipeline: see "outbox-relay status".`,
		Example: `  outbox-relay ready
  outbox-relay ready --listen :9464`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if at.addr == "" {
				return usageError{errors.New("--listen off: the relay does not listen; want its address")}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return askReady(ctx, at.addr, cmd.OutOrStdout())
		},
	})
	cli.AddOption(cmd.Flags(), "listen", "address", listenStandard, "address of the relay's /readyz, as host:port", at.parseListen)
	cli.AddDuration(cmd.Flags(), &timeout, "timeout", 3*time.Second, 10*time.Millisecond, time.Minute, "time limit of the answer")
	return cmd
}

func askReady(ctx context.Context, address string, out io.Writer) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() { // every address, including localhost
		address = net.JoinHostPort("localhost", port)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", http.NoBody)
	if err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}} // a proxy would reach another machine
	response, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("no relay answers at %s: %w", address, errors.Unwrap(err))
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(response.Body, readyBytesMax))
	if err != nil {
		return fmt.Errorf("read the answer of the relay at %s: %w", address, err)
	}
	if err := terminal.Say(out, "%s\n", strings.TrimSpace(string(text))); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return errUnhealthy
	}
	return nil
}
