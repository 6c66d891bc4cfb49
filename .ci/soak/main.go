// Command soak runs the pipeline at a steady rate, and draws what must stay flat: memory, goroutines, connections, dead
// tuples, the outbox. Requests under idempotency keys publish, a relay of its own process delivers, a consumer
// counts in accounts.
//
//	go run ./.ci/soak -for 1h -plot docs/soak.svg
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
)

const (
	topic    = "soak"
	accounts = 1000
	workers  = 8
)

func main() {
	log.SetFlags(log.Ltime)
	lasts := flag.Duration("for", time.Hour, "how long")
	every := flag.Duration("every", 10*time.Second, "how often it looks")
	rate := flag.Int("rate", 400, "requests per second")
	plot := flag.String("plot", "", "file for an SVG picture")
	flag.Parse()
	if *every <= 0 || *lasts < 2**every || *rate < 1 {
		log.Fatal("want -every above 0, -for at least twice as long, and -rate at least 1")
	}
	s := &soak{rate: *rate, every: *every}
	if err := s.run(*lasts); err != nil {
		log.Fatal(err)
	}
	if *plot != "" {
		if err := os.WriteFile(*plot, []byte(s.svg()), 0o600); err != nil {
			log.Fatal(err)
		}
	}
}

type soak struct {
	rate    int
	every   time.Duration
	pool    *pgxpool.Pool
	relay   int // its process
	samples [][]float64
}

func (s *soak) run(lasts time.Duration) (err error) {
	dir, err := os.MkdirTemp("", "soak-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	tool := filepath.Join(dir, "outbox-relay")
	if err := exec.Command("go", "build", "-o", tool, "./cmd/outbox-relay").Run(); err != nil {
		return fmt.Errorf("build the relay: %w", err)
	}
	servers, environment, err := startServers(tool)
	if err != nil {
		return err
	}
	defer stop(servers)
	os.Setenv("DATABASE_URL", environment[1])
	os.Setenv("KAFKA_BROKERS", environment[2])
	if output, err := exec.Command(tool, "migrate", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("migrate: %w: %s", err, output)
	}
	relay := exec.Command(tool, "run", "--keep", "30s", "--listen", "off", "--log-level", "error")
	relay.Stderr = os.Stderr
	if err := relay.Start(); err != nil {
		return err
	}
	defer stop(relay)
	s.relay = relay.Process.Pid
	ctx, cancel := context.WithTimeout(context.Background(), lasts)
	defer cancel()
	if s.pool, err = pgxpool.New(context.Background(), environment[1]); err != nil {
		return err
	}
	defer s.pool.Close()
	_, err = s.pool.Exec(ctx, `CREATE TABLE accounts (id int PRIMARY KEY, asked bigint NOT NULL, n bigint NOT NULL) WITH (fillfactor = 50)`)
	if err == nil {
		_, err = s.pool.Exec(ctx, `INSERT INTO accounts SELECT n, 0, 0 FROM generate_series(0, $1 - 1) AS n`, accounts)
	}
	if err != nil {
		return err
	}
	return s.work(ctx, environment[2])
}

func startServers(tool string) (*exec.Cmd, []string, error) {
	servers := exec.Command(tool, "servers", "--topic", topic)
	output, err := servers.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := servers.Start(); err != nil {
		return nil, nil, err
	}
	addresses := regexp.MustCompile(`DATABASE_URL='(.*)' KAFKA_BROKERS='(.*)'`)
	for lines := bufio.NewScanner(output); lines.Scan(); {
		if found := addresses.FindStringSubmatch(lines.Text()); found != nil {
			return servers, found, nil
		}
	}
	stop(servers)
	return nil, nil, errors.New("the servers did not start")
}

func stop(process *exec.Cmd) {
	_ = process.Process.Signal(os.Interrupt)
	_ = process.Wait()
}

// work runs until ctx ends; then everything that was asked for must have been counted once.
func (s *soak) work(ctx context.Context, brokers string) error {
	op, err := idempotency.New(s.pool, idempotency.Config{Operation: "soak", Window: time.Minute})
	if err != nil {
		return err
	}
	count := consumer.Queued(func(_ context.Context, q *consumer.Queue, m *consumer.Message) error {
		account, err := strconv.Atoi(string(m.Key))
		q.Queue(`UPDATE accounts SET n = n + 1 WHERE id = $1`, account)
		return err
	})
	c, err := consumer.New(s.pool, []kgo.Opt{kgo.SeedBrokers(brokers)}, count, consumer.Config{Group: "soak", Topics: []string{topic}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	counting, stopCounting := context.WithCancel(context.WithoutCancel(ctx))
	defer stopCounting()
	asking, ctx := errgroup.WithContext(ctx) // the first failure ends the run
	var background errgroup.Group
	background.Go(func() error { return c.Run(counting) })
	background.Go(func() error { op.Run(counting); return nil })
	for w := range workers {
		asking.Go(func() error { return s.ask(ctx, op, w) })
	}
	for begun := time.Now(); pause.For(ctx, s.every); {
		if err := s.look(ctx, time.Since(begun)); err != nil && ctx.Err() == nil {
			return err
		}
	}
	if err := asking.Wait(); err != nil {
		return err
	}
	var asked, n int64
	for deadline := time.Now().Add(time.Minute); ; {
		if err := s.pool.QueryRow(counting, `SELECT sum(asked)::bigint, sum(n)::bigint FROM accounts`).Scan(&asked, &n); err != nil {
			return err
		}
		if asked == n || time.Now().After(deadline) || !pause.For(counting, time.Second) {
			break
		}
	}
	log.Printf("%d requests, %d effects", asked, n)
	stopCounting()
	err = background.Wait()
	if asked != n {
		err = errors.Join(err, fmt.Errorf("%d requests have %d effects", asked, n))
	}
	return err
}

// ask sends requests, each tenth of them twice.
func (s *soak) ask(ctx context.Context, op *idempotency.Operation, worker int) error {
	ticks := time.NewTicker(time.Second * workers / time.Duration(s.rate))
	defer ticks.Stop()
	for number := worker; ; number += workers {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
		key := op.Key("tenant", uuid.Must(uuid.NewV7()).String(), idempotency.Fingerprint{})
		account := number % accounts
		for range 1 + (10-number%10)/10 {
			_, err := op.Once(context.WithoutCancel(ctx), key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				if _, err := tx.Exec(ctx, `UPDATE accounts SET asked = asked + 1 WHERE id = $1`, account); err != nil {
					return idempotency.Response{}, err
				}
				m := outbox.Message{ID: key.ChildID("asked"), Topic: topic, Key: []byte(strconv.Itoa(account)), Payload: []byte(`{"asked": true}`)}
				return idempotency.Response{Status: 201}, outbox.Publish(ctx, tx, m)
			})
			if err != nil {
				return err
			}
		}
	}
}

// series are what is drawn.
func series() []string {
	return []string{"memory of the service, MB", "goroutines of the service", "memory of the relay, MB", "connections to PostgreSQL", "dead tuples", "outbox, MB", "idempotency keys, thousands"}
}

func (s *soak) look(ctx context.Context, after time.Duration) error {
	var connections, dead, outboxMB, keys float64
	err := s.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
		(SELECT coalesce(sum(n_dead_tup), 0)::float8 FROM pg_stat_user_tables),
		(SELECT sum(pg_total_relation_size(relid))::float8 / 1e6 FROM pg_partition_tree('effectonce.outbox') WHERE isleaf),
		(SELECT count(*) / 1e3::float8 FROM effectonce.idempotency_keys)`).Scan(&connections, &dead, &outboxMB, &keys)
	if err != nil {
		return err
	}
	sample := []float64{after.Minutes(), resident(os.Getpid()), float64(runtime.NumGoroutine()), resident(s.relay), connections, dead, outboxMB, keys}
	s.samples = append(s.samples, sample)
	if len(s.samples)%30 == 1 {
		log.Printf("%.1f", sample)
	}
	return nil
}

// resident is the memory of a process in MB, as Linux counts it.
func resident(pid int) float64 {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	kB, _ := strconv.ParseFloat(strings.Fields(rest + " 0")[0], 64)
	return kB / 1e3
}
