package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// soakJob is the task of the process that Soak watches: requests under idempotency keys publish
// messages, two relays send them, and two groups of two consumers handle them. All are restarted in
// turns.
type soakJob struct {
	Topic  string
	Rate   int
	For    time.Duration
	Sample time.Duration
	Churn  time.Duration
	Plant  bool // restarts leave goroutines and a connection behind: a test of the verdict
}

// What is kept for as short as it may be, so that tables reach their size soon.
const (
	soakWindow  = time.Minute // of keys; claims stay for a day at least
	soakKeep    = 20 * time.Second
	soakLease   = 2 * time.Second
	soakDrain   = 2 * time.Minute // for what is left at the end
	soakPlanted = 5               // goroutines for each restart
)

// soak is a run of a soakJob.
type soak struct {
	*site
	soakJob

	each     func(SoakSample)
	progress string
	watch    *pgx.Conn
	parts    []*soakPart
	// committed is when a message was committed, in nanoseconds since zero, by its number modulo
	// the length.
	committed []atomic.Int64
	zero      time.Time
	orders    atomic.Int64

	mu        sync.Mutex
	latencies []float64
	planted   []*pgx.Conn
	found     SoakFound
}

// SoakFound is what a soak counted.
type SoakFound struct {
	Orders   int64 `json:"orders"` // requests, each of which published a message
	Restarts int   `json:"restarts"`
	Killed   int   `json:"sessions_ended"` // by pg_terminate_backend
	// Handled are the messages of the two groups. Each has to be the number of orders.
	Handled []int64 `json:"handled"`
}

// soakPart is a relay or a consumer.
type soakPart struct {
	name string
	run  func(ctx context.Context, pool *pgxpool.Pool) error

	mu   sync.Mutex
	stop context.CancelFunc
}

func soakGroups() []string { return []string{"by-id", "by-position"} }

func newSoak(s *site, job soakJob, progress string, each func(SoakSample)) *soak {
	k := &soak{site: s, soakJob: job, progress: progress, each: each, committed: make([]atomic.Int64, 1<<16), zero: time.Now().Add(-time.Second)}
	for i := range 2 {
		k.parts = append(k.parts, &soakPart{name: "relay-" + strconv.Itoa(i), run: k.relay})
		for _, group := range soakGroups() {
			k.parts = append(k.parts, &soakPart{name: group + "-" + strconv.Itoa(i), run: func(ctx context.Context, pool *pgxpool.Pool) error {
				return k.consume(ctx, pool, group)
			}})
		}
	}
	return k
}

func (k *soak) run(ctx context.Context) (_ *SoakFound, err error) {
	if k.watch, err = k.dial(ctx, "watch"); err != nil {
		return nil, err
	}
	defer func() {
		for _, conn := range append(k.planted, k.watch) {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	ctx, end := context.WithCancel(ctx)
	defer end()
	group, ctx := errgroup.WithContext(ctx)
	for _, part := range k.parts {
		group.Go(func() error { return k.keep(ctx, part) })
	}
	writing, stop := context.WithCancel(ctx)
	defer stop()
	var writers errgroup.Group
	writers.Go(func() error { return k.write(writing) })
	group.Go(func() error {
		defer end()
		err := k.observe(ctx)
		stop()
		return errors.Join(err, writers.Wait(), k.drained(ctx))
	})
	err = group.Wait()
	return &k.found, errors.Join(err, writers.Wait())
}

// named returns what a session is called, so that it can be counted and ended.
func (k *soak) named(part string) string { return k.schema + "-" + part }

func (k *soak) dial(ctx context.Context, part string) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(k.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	config.RuntimeParams["application_name"] = k.named(part)
	return pgx.ConnectConfig(ctx, config)
}

func (k *soak) ownPool(ctx context.Context, part string, connections int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(k.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	config.MaxConns, config.ConnConfig.RuntimeParams["application_name"] = connections, k.named(part)
	return pgxpool.NewWithConfig(ctx, config)
}

// keep runs a part until ctx ends, and starts it again whenever it was stopped.
func (k *soak) keep(ctx context.Context, part *soakPart) error {
	for ctx.Err() == nil {
		if err := k.life(ctx, part); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return nil
}

func (k *soak) life(ctx context.Context, part *soakPart) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	part.mu.Lock()
	part.stop = stop
	part.mu.Unlock()
	pool, err := k.ownPool(ctx, part.name, 6)
	if err != nil {
		return err
	}
	defer pool.Close()
	return part.run(ctx, pool)
}

func (k *soak) relay(ctx context.Context, pool *pgxpool.Pool) error {
	// Exactly once: otherwise the group by position would handle again what is published again
	r, err := relay.New(pool, k.producer(), relay.Config{
		Schema: k.schema, Keep: soakKeep, Lease: soakLease, ExactlyOnce: true, ProgressTopic: k.progress,
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func (k *soak) consume(ctx context.Context, pool *pgxpool.Pool, group string) error {
	level := consumer.DedupByID
	if group == "by-position" {
		level = consumer.DedupByPosition
	}
	handler := consumer.Batch(func(ctx context.Context, tx pgx.Tx, msgs []*consumer.Message) error {
		return k.handle(ctx, tx, group, msgs)
	})
	c, err := consumer.New(pool, []kgo.Opt{kgo.SeedBrokers(k.Brokers...)}, handler, consumer.Config{
		Group: k.named(group), Topics: []string{k.Topic}, Schema: k.schema, Dedup: level, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// handle counts messages and adds up their numbers, so that lost and doubled ones are seen.
func (k *soak) handle(ctx context.Context, tx pgx.Tx, group string, msgs []*consumer.Message) error {
	now, total := time.Since(k.zero), uint64(0)
	latencies := make([]float64, 0, len(msgs))
	for _, msg := range msgs {
		i := binary.BigEndian.Uint64(msg.Value)
		total += i
		if at := k.committed[i%uint64(len(k.committed))].Load(); at != 0 {
			latencies = append(latencies, max(0, (now-time.Duration(at)).Seconds()*1000))
		}
	}
	k.mu.Lock()
	k.latencies = append(k.latencies, latencies...)
	k.mu.Unlock()
	_, err := tx.Exec(ctx, k.sql(soakHandledSQL), group, msgs[0].Partition, len(msgs), int64(total))
	return err
}

// write makes requests by a schedule. A request whose outcome is unknown is made again under its
// key.
func (k *soak) write(ctx context.Context) error {
	pool, err := k.ownPool(ctx, "writers", streamWriters+2)
	if err != nil {
		return err
	}
	defer pool.Close()
	op, err := idempotency.New(pool, idempotency.Config{Schema: k.schema, Operation: "order", Window: soakWindow})
	if err != nil {
		return err
	}
	box, err := outbox.New(outbox.Config{Schema: k.schema})
	if err != nil {
		return err
	}
	group, due := errgroup.Group{}, make(chan int64)
	group.Go(func() error { op.Run(ctx); return nil })
	group.Go(func() error {
		defer close(due)
		begun, every := time.Now(), time.Second/time.Duration(k.Rate)
		for i := int64(0); pause.For(ctx, time.Until(begun.Add(every*time.Duration(i)))); i++ {
			due <- i
		}
		return nil
	})
	for range streamWriters {
		group.Go(func() error {
			var failed error
			for i := range due {
				if err := k.order(context.WithoutCancel(ctx), op, box, i); err != nil {
					failed = err // and empty the channel
				}
			}
			return failed
		})
	}
	return group.Wait()
}

func (k *soak) order(ctx context.Context, op *idempotency.Operation, box *outbox.Outbox, i int64) error {
	slot := &k.committed[i%int64(len(k.committed))]
	slot.Store(0)
	payload := make([]byte, payloadBytes)
	binary.BigEndian.PutUint64(payload, uint64(i))
	key := op.Key("soak", idempotency.NewKey(), idempotency.NewFingerprint(payload))
	err := whileInProgress(ctx, func() error {
		_, err := op.Once(ctx, key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201}, box.Publish(ctx, tx, outbox.Message{
				Topic: k.Topic, Key: fmt.Appendf(nil, "account-%d", i%keysDistinct), Payload: payload,
			})
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("order: %w", err)
	}
	slot.Store(int64(time.Since(k.zero)))
	k.orders.Add(1)
	return nil
}

// observe waits until everything works, then samples and restarts until the time is over.
func (k *soak) observe(ctx context.Context) error {
	for ready := false; !ready; {
		if !pause.For(ctx, 50*time.Millisecond) {
			return ctx.Err()
		}
		var groups int
		if err := k.watch.QueryRow(ctx, k.sql(soakGroupsSQL)).Scan(&groups); err != nil {
			return fmt.Errorf("count the groups: %w", err)
		}
		ready = groups == len(soakGroups())
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(k.Brokers...))
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	k.admin = kadm.NewClient(client)
	sampling, churning, trimming := time.NewTicker(k.Sample), time.NewTicker(k.Churn), time.NewTicker(trimEvery)
	defer sampling.Stop()
	defer churning.Stop()
	defer trimming.Stop()
	begun, over := time.Now(), time.After(k.For)
	for n := 0; ; {
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-over:
			return nil
		case <-sampling.C:
			err = k.sample(ctx, time.Since(begun))
		case <-trimming.C:
			err = k.trim(ctx)
		case <-churning.C:
			err = k.churn(ctx, n)
			n++
		}
		if err != nil {
			return err
		}
	}
}

// churn stops a part, which starts again at once, or ends its sessions on the server.
func (k *soak) churn(ctx context.Context, n int) error {
	part := k.parts[n%len(k.parts)]
	if k.Plant {
		for range soakPlanted {
			go func() { <-ctx.Done() }()
		}
		conn, err := k.dial(ctx, "planted")
		if err != nil {
			return err
		}
		k.planted = append(k.planted, conn)
	}
	if (n+n/len(k.parts))%3 == 2 { // each part in its turn
		var ended int
		if err := k.watch.QueryRow(ctx, soakEndSQL, k.named(part.name)).Scan(&ended); err != nil {
			return fmt.Errorf("end the sessions of %s: %w", part.name, err)
		}
		k.found.Killed += ended
		return nil
	}
	part.mu.Lock()
	defer part.mu.Unlock()
	part.stop()
	k.found.Restarts++
	return nil
}

// trim deletes records that all groups have handled: they may be in the memory of this machine.
func (k *soak) trim(ctx context.Context) error {
	rows, err := k.watch.Query(ctx, k.sql(soakPositionsSQL), k.Topic, len(soakGroups()))
	if err != nil {
		return fmt.Errorf("read positions: %w", err)
	}
	var partition int32
	var offset int64
	upTo := kadm.Offsets{}
	if _, err = pgx.ForEachRow(rows, []any{&partition, &offset}, func() error {
		upTo.AddOffset(k.Topic, partition, offset, -1)
		return nil
	}); err != nil {
		return fmt.Errorf("read positions: %w", err)
	}
	deleted, err := k.admin.DeleteRecords(ctx, upTo)
	if err = errors.Join(err, deleted.Error()); err != nil && ctx.Err() == nil {
		return fmt.Errorf("empty topic %s: %w", k.Topic, err)
	}
	return nil
}

func (k *soak) sample(ctx context.Context, at time.Duration) error {
	s := SoakSample{Minute: at.Minutes(), Goroutines: float64(runtime.NumGoroutine())}
	if heap := liveHeapMB(); heap != nil {
		s.HeapMB = *heap
	}
	if resident := memory("VmRSS:"); resident != nil {
		s.ResidentMB = *resident
	}
	if err := k.watch.QueryRow(ctx, k.sql(soakSampleSQL), k.schema).Scan(&s.Connections, &s.DeadTuples, &s.OutboxMB, &s.KeysMB, &s.ClaimsMB); err != nil {
		return fmt.Errorf("sample the database: %w", err)
	}
	k.mu.Lock()
	latencies := k.latencies
	k.latencies = nil
	k.mu.Unlock()
	if len(latencies) > 0 {
		s.P50, s.P99 = percentile(latencies, 0.5), percentile(latencies, 0.99)
	}
	k.each(s)
	return nil
}

// drained waits until every order was handled once by each group.
func (k *soak) drained(ctx context.Context) error {
	k.found.Orders = k.orders.Load()
	sum := k.found.Orders * (k.found.Orders - 1) / 2
	ctx, cancel := context.WithTimeoutCause(ctx, soakDrain, errors.New("not every message was handled in time: this is a bug, please report it"))
	defer cancel()
	for {
		k.found.Handled = nil
		rows, err := k.watch.Query(ctx, k.sql(soakCountsSQL))
		if err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		var handled, total int64
		done, wrong := 0, false
		if _, err = pgx.ForEachRow(rows, []any{&handled, &total}, func() error {
			k.found.Handled = append(k.found.Handled, handled)
			if handled == k.found.Orders && total == sum {
				done++
			}
			wrong = wrong || handled > k.found.Orders || handled == k.found.Orders && total != sum
			return nil
		}); err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		switch {
		case wrong:
			return fmt.Errorf("%d orders were handled %v times: this is a bug, please report it", k.found.Orders, k.found.Handled)
		case done == len(soakGroups()):
			return nil
		case !pause.For(ctx, 50*time.Millisecond):
			return context.Cause(ctx)
		}
	}
}
