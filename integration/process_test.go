package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rcrowley/go-metrics"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

const (
	childVariable = "EFFECTONCE_TEST_CHILD"
	childReady    = "child hears signals"
	childJoins    = "child asks to join"
	childTotals   = "child processed" // the last line of a consumer that stopped cleanly
	childAnswered = "child was answered about a transaction"
)

// child says what a process does. It travels as JSON in the environment.
type child struct {
	Role    string // relay, consumer, deliver (a consumer without Kafka) or upkeep (of claims)
	URL     string
	Brokers []string
	Through map[string]string // relay: the proxies of the brokers, by their addresses
	Topic   string
	Group   string
	Forward string // consumer: publish each message to this topic, too
	Queued  bool   // consumer: the queue shape

	OnFailure consumer.OnFailure // deliver: what becomes of the message that fails
	Shape     string             // deliver: each, queued or batch
	Mended    bool               // deliver: no message fails any more

	CrashAt    string // crash point that kills the process with SIGKILL …
	CrashAfter int    // … when it is passed for this many-th time, counted from 0
	FreezeAt   string // crash point that stops the process with SIGSTOP, once
	FreezeSQL  string // the same before the first statement that has this in it

	Shards         int16
	ExactlyOnce    bool
	Keep           time.Duration
	Lease          time.Duration
	SessionTimeout time.Duration
	IdleTimeout    time.Duration
	BatchMax       int
	Order          consumer.Order
	Protocol       string // of the group: see protocols
	Instance       string // consumer: a static member of this name
}

func TestMain(m *testing.M) {
	if spec := os.Getenv(childVariable); spec != "" {
		os.Exit(runChild(spec)) //nolint:forbidigo // this process is a program, not a test
	}
	metrics.UseNilMetrics = true // sarama's would tick forever
	pgtest.SideBySide()
	pgtest.Main(m, leftByProxies()...)
}

func runChild(spec string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	var c child
	if err := json.Unmarshal([]byte(spec), &c); err != nil {
		log.Error("bad role", "error", err)
		return 2
	}
	c.armCrashpoints()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM) //nolint:forbidigo // as above
	defer stop()
	log.Info(childReady)
	pool, err := c.open(ctx)
	if err != nil {
		log.Error("no pool", "error", err)
		return 2
	}
	defer pool.Close()
	if err := c.run(ctx, pool, log); err != nil {
		log.Error("ended", "role", c.Role, "error", err)
		return 1
	}
	return 0
}

func (c child) open(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(c.URL)
	if err != nil {
		return nil, err
	}
	if c.FreezeSQL != "" {
		config.ConnConfig.Tracer = &freezer{part: c.FreezeSQL}
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// freezeMe stops the process and returns when it was resumed. The signal may reach another thread
// first, and this thread would continue until that one has a processor.
func freezeMe() {
	woken := make(chan os.Signal, 1)
	signal.Notify(woken, syscall.SIGCONT)
	defer signal.Stop(woken)
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	<-woken
}

// freezer stops the process before a statement.
type freezer struct {
	part string
	once sync.Once
}

func (f *freezer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, query pgx.TraceQueryStartData) context.Context {
	if strings.Contains(query.SQL, f.part) {
		f.once.Do(freezeMe)
	}
	return ctx
}

func (f *freezer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// joins says when the process asks to join its group, which is also how it takes part in a
// rebalance.
type joins struct{ log *slog.Logger }

func (j joins) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, _ error) {
	if key == int16(kmsg.JoinGroup) {
		j.log.Info(childJoins)
	}
}

// answers reports when a relay got the outcome of a transaction that it wanted to end.
type answers struct{ log *slog.Logger }

func (a answers) OnBrokerRead(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if key == int16(kmsg.EndTxn) && err == nil {
		a.log.Info(childAnswered)
	}
}

func (c child) armCrashpoints() {
	var mu sync.Mutex
	crash, freeze := c.CrashAfter, true
	crashpoint.Arm(func(name string) {
		mu.Lock()
		defer mu.Unlock()
		if name == c.CrashAt {
			if crash == 0 {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {} // not one instruction more of the product
			}
			crash--
		}
		if name == c.FreezeAt && freeze {
			freeze = false
			freezeMe()
		}
	})
}

func (c child) run(ctx context.Context, pool *pgxpool.Pool, log *slog.Logger) error {
	seeds := []kgo.Opt{kgo.SeedBrokers(c.Brokers...)}
	if c.Role == "relay" {
		if c.Through != nil {
			seeds = append(seeds, dialer(c.Through))
		}
		if c.FreezeAt != "" {
			seeds = append(seeds, kgo.WithHooks(answers{log}))
		}
		r, err := relay.New(pool, seeds, relay.Config{Lease: c.Lease, Shards: c.Shards, ExactlyOnce: c.ExactlyOnce, Keep: c.Keep, Logger: log})
		if err != nil {
			return err
		}
		return r.Run(ctx)
	}
	switch c.Role {
	case "deliver":
		return c.deliver(ctx, pool, log)
	case "upkeep":
		return c.upkeep(ctx, pool)
	}
	handler := consumer.JSON(c.effect)
	if c.Queued {
		handler = consumer.Queued(c.queuedEffect)
	}
	seeds = append(append(seeds, kgo.WithHooks(joins{log})), c.membership()...)
	var fresh, duplicates atomic.Int64
	r, err := consumer.New(pool, seeds, handler, consumer.Config{
		Group: c.Group, Topics: []string{c.Topic}, BatchMax: c.BatchMax, IdleTimeout: c.IdleTimeout, Order: c.Order,
		Hooks:    consumer.Hooks{Processed: func(p consumer.Processed) { fresh.Add(int64(p.Fresh)); duplicates.Add(int64(p.Duplicates)) }},
		RetryMin: 10 * time.Millisecond, RetryMax: 200 * time.Millisecond, Logger: log,
	})
	if err != nil {
		return err
	}
	defer func() { log.Info(childTotals, "fresh", fresh.Load(), "duplicates", duplicates.Load()) }()
	return r.Run(ctx)
}

// protocols of consumer groups.
const (
	cooperative = "cooperative" // the client's default: cooperative-sticky
	eager       = "eager"       // everything is revoked at each rebalance
	sticky      = "sticky"      // eager, too, and partitions go back to where they were
	serverSide  = "KIP-848"     // the broker assigns; it sets the session timeout, too
)

func (c child) membership() []kgo.Opt {
	opts := []kgo.Opt{
		kgo.SessionTimeout(c.SessionTimeout), kgo.HeartbeatInterval(min(c.SessionTimeout/5, 6*time.Second)),
		kgo.RebalanceTimeout(max(c.SessionTimeout, time.Minute)), // a minute is its default
		// New partitions, and topics that were made anew, are found this often.
		kgo.MetadataMaxAge(time.Second), kgo.MetadataMinAge(100 * time.Millisecond),
	}
	switch c.Protocol {
	case eager:
		opts = append(opts, kgo.Balancers(kgo.RangeBalancer()))
	case sticky:
		opts = append(opts, kgo.Balancers(kgo.StickyBalancer()))
	case serverSide:
		opts = append(opts, kgo.ServerSideBalancer(), kgo.Balancers(kgo.StickyBalancer()))
	}
	if c.Instance != "" {
		opts = append(opts, kgo.InstanceID(c.Instance))
	}
	return opts
}

// event is the payload of the tests' messages.
type event struct {
	Key     string
	Version int
}

const insertEffect = `INSERT INTO effects (message_id, key, version, worker) VALUES ($1, $2, $3, $4)`

func (c child) effect(ctx context.Context, tx pgx.Tx, msg *consumer.Message, e event) error {
	if _, err := tx.Exec(ctx, insertEffect, [16]byte(msg.ID), e.Key, e.Version, os.Getpid()); err != nil {
		return err
	}
	if c.Forward == "" {
		return nil
	}
	return outbox.Publish(ctx, tx, outbox.Message{Topic: c.Forward, Key: msg.Key, Payload: msg.Value})
}

func (c child) queuedEffect(ctx context.Context, q *consumer.Queue, msg *consumer.Message) error {
	var e event
	if err := json.Unmarshal(msg.Value, &e); err != nil {
		return consumer.Permanent(err)
	}
	q.Queue(insertEffect, [16]byte(msg.ID), e.Key, e.Version, os.Getpid())
	if c.Forward == "" {
		return nil
	}
	return q.Publish(ctx, outbox.Message{Topic: c.Forward, Key: msg.Key, Payload: msg.Value})
}

// process is a child that runs.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	log  logFile
	done chan struct{}
	err  error
}

// start runs a child until the test ends; it does not survive the test.
func start(t *testing.T, c child) *process {
	t.Helper()
	spec, err := json.Marshal(c)
	require.NoError(t, err)
	binary, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(binary)
	cmd.Env = append(os.Environ(), childVariable+"="+string(spec))
	return started(t, cmd, c.Role)
}

// started runs a program until the test ends.
func started(t *testing.T, cmd *exec.Cmd, name string) *process {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	defer func() { _ = log.Close() }() // the process has its own descriptor
	p := &process{t: t, cmd: cmd, log: logFile(log.Name()), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	require.NoError(t, p.cmd.Start())
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s %d said:\n%s", name, p.cmd.Process.Pid, p.log)
		}
	})
	return p
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// kill ends the process with SIGKILL and waits for its end.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// terminate asks for a clean stop, as soon as the process can hear, and returns how it ended.
func (p *process) terminate() error {
	testwait.For(p.t, "the process is ready", func() (any, bool) { return p.log, strings.Contains(p.log.String(), childReady) || p.ended() })
	p.signal(syscall.SIGTERM)
	testwait.For(p.t, "the process stops", func() (any, bool) { return p.log, p.ended() })
	return p.err
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// logFile is what a process writes. A line is there as soon as it is written: through a pipe it
// would come later than what the process did afterwards.
type logFile string

func (l logFile) String() string {
	text, err := os.ReadFile(string(l))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
