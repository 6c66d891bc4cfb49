package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/proxies"
)

// nemesis carries out the faults of a plan.
type nemesis struct {
	*site
	*crew

	plan     Plan
	dir      string // logs and ledgers
	operator *operator
	ledger   *ledger.Writer
	log      *log

	servers  sync.Mutex // methods of servers are for one goroutine at a time
	sequence sync.Mutex
	stage    sync.RWMutex
	mu       sync.Mutex
	done     map[string]int // faults by kind
}

// run returns when the plan is done or ctx ends, with every process, connection and server healed.
func (n *nemesis) run(ctx context.Context) error {
	begun := time.Now()
	var all sync.WaitGroup
	for _, f := range n.plan.Faults {
		if !pause.For(ctx, f.At-time.Since(begun)) {
			break
		}
		all.Go(func() { n.strike(ctx, f) })
	}
	all.Wait()
	return n.heal(context.WithoutCancel(ctx))
}

// errSkipped means that there was nothing to strike.
var errSkipped = errors.New("nothing to strike")

func (n *nemesis) strike(ctx context.Context, f Fault) {
	random := rand.New(rand.NewPCG(n.plan.Seed, uint64(f.Choice)<<32|uint64(f.At))) //nolint:gosec // a seed
	done := n.enter(f.Kind)
	what, err := n.carryOut(ctx, f, random)
	done()
	if errors.Is(err, errSkipped) {
		return
	}
	n.mu.Lock()
	n.done[f.Kind]++
	n.mu.Unlock()
	line := fmt.Sprintf("%-18s %s", f.Kind, what)
	if f.For > 0 {
		line += fmt.Sprintf(" for %v", f.For)
	}
	if err != nil {
		line += ": " + strings.Join(strings.Fields(err.Error()), " ")
	}
	n.log.say("%s", line)
}

// enter lets the faults that exchange the database happen alone.
func (n *nemesis) enter(kind string) (leave func()) {
	if kind == "dump-and-restore" || kind == "logical-copy" {
		n.stage.Lock()
		return n.stage.Unlock
	}
	n.stage.RLock()
	return n.stage.RUnlock
}

// carryOut strikes, waits, and heals. It returns what it struck.
func (n *nemesis) carryOut(ctx context.Context, f Fault, random *rand.Rand) (string, error) {
	late := context.WithoutCancel(ctx) // healing happens whenever the round ends
	switch f.Kind {
	case "kill", "freeze", "restart", "other-settings":
		return n.process(ctx, f)
	case "end-sessions":
		return n.endSessions(ctx, 1+random.IntN(3))
	case "end-all-sessions":
		return n.endSessions(ctx, 1000)
	case "crash-postgres":
		n.servers.Lock()
		defer n.servers.Unlock()
		err := n.arena.postgres.Kill(late)
		pause.For(ctx, f.For)
		return "", errors.Join(err, n.arena.postgres.Restart(late))
	case "promote":
		n.servers.Lock()
		defer n.servers.Unlock()
		if n.arena.standby == nil {
			return "", errSkipped
		}
		if err := n.ledger.Write(ledger.LostCommits); err != nil {
			return "", err
		}
		return "", n.arena.promote(late, f.For)
	case "crash-kafka":
		n.servers.Lock()
		defer n.servers.Unlock()
		err := n.arena.kafka.Kill(late)
		pause.For(ctx, f.For)
		return "", errors.Join(err, n.arena.kafka.Restart(late))
	case "cut", "silence", "deafen", "slow", "reset":
		return n.network(ctx, f, random)
	case "long-transaction":
		return "", n.hold(ctx, f.For, `SELECT pg_current_xact_id()`)
	case "lock-table":
		table := pick(random, "effectonce.outbox", "effectonce.processed_messages", "effectonce.parked_messages", "effectonce.consumer_positions", "effectonce.outbox_progress", "shop.keys", "shop.balances")
		return table, n.hold(ctx, f.For, "LOCK TABLE "+table+" IN ACCESS EXCLUSIVE MODE")
	case "prepared-transaction":
		return "", n.prepare(ctx, f)
	case "copies":
		return n.copies(ctx, random)
	case "conflict":
		return n.conflict(ctx, random)
	case "lower-limit":
		return "", n.lowerLimit(ctx, f.For)
	case "kill-pooler":
		return "", n.killPooler(late, f.For)
	case "freeze-backend":
		return n.freezeBackend(ctx, f)
	case "dump-and-restore", "logical-copy":
		return "", n.restore(ctx, f.Kind == "logical-copy")
	case "set-sequence-back":
		return n.sequenceBack(ctx, f, random)
	case "late-copies":
		return n.lateCopies(ctx, random)
	case "garbage":
		return n.garbage(ctx, random)
	case "vacuum":
		table := pick(random, "effectonce.outbox_progress", "effectonce.parked_messages", "effectonce.consumer_positions", "shop.balances")
		_, err := n.pool.Exec(ctx, "VACUUM (ANALYZE) "+table)
		return table, err
	default:
		if isOfKafka(f) {
			return n.ofKafka(ctx, f, random)
		}
		return n.operator.carryOut(ctx, f, random)
	}
}

// process strikes one process.
func (n *nemesis) process(ctx context.Context, f Fault) (string, error) {
	healthy := n.All((*fleet.Process).Healthy)
	if len(healthy) == 0 {
		return "", errSkipped
	}
	p := healthy[f.Choice%len(healthy)]
	late := context.WithoutCancel(ctx)
	switch f.Kind {
	case "freeze":
		if err := n.ledger.Write(ledger.Frozen, n.jobs[p.Name].Role); err != nil {
			return p.Name, err
		}
		if err := p.Freeze(); err != nil {
			return p.Name, err
		}
		pause.For(ctx, f.For)
		return p.Name, p.Resume()
	case "kill":
		if err := p.Kill(); err != nil {
			return p.Name, err
		}
		p.Wait(late)
		pause.For(ctx, fleet.RestartPause)
		return p.Name, p.Start()
	case "other-settings":
		n.vary(p)
	}
	return p.Name, p.Restart(late, stopMax)
}

// endSessions ends sessions of the round's database.
func (n *nemesis) endSessions(ctx context.Context, atMost int) (string, error) {
	var ended int
	err := n.pool.QueryRow(ctx, `-- torture.end_sessions
SELECT count(pg_terminate_backend(pid)) FROM (
  SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ '^((producer|relay|consumer|service)-|Debezium)' ORDER BY random() LIMIT $1) AS s`, atMost).Scan(&ended)
	if err == nil && ended == 0 {
		err = errSkipped
	}
	return strconv.Itoa(ended), err
}

// network strikes the ways of one role to one kind of server.
func (n *nemesis) network(ctx context.Context, f Fault, random *rand.Rand) (string, error) {
	role := pick(random, worker.RoleRelay, worker.RoleConsumer, worker.RoleService)
	set, ok := n.ways[role]
	if !ok {
		return "", errSkipped
	}
	list, server := set.Postgres, "PostgreSQL"
	if random.IntN(2) == 0 {
		list, server = set.Kafka, "Kafka"
	}
	n.servers.Lock() // Toxiproxy's toxics are changed by one at a time
	var err error
	switch f.Kind {
	case "cut":
		err = proxies.Refuse(list)
	case "silence":
		err = proxies.Toxic(list, "timeout", pick(random, "upstream", "downstream"), `{"timeout": 0}`)
	case "deafen":
		err = errors.Join(proxies.Toxic(list, "timeout", "upstream", `{"timeout": 0}`), proxies.Toxic(list, "timeout", "downstream", `{"timeout": 0}`))
	case "slow":
		err = proxies.Toxic(list, "latency", "downstream", `{"latency": 300, "jitter": 200}`)
	case "reset":
		err = proxies.Toxic(list, "reset_peer", "downstream", `{"timeout": 0}`)
	}
	n.servers.Unlock()
	pause.For(ctx, f.For)
	n.servers.Lock()
	defer n.servers.Unlock()
	return role + " to " + server, errors.Join(err, proxies.LetThrough(context.WithoutCancel(ctx), list))
}

// hold keeps a transaction open after one statement.
func (n *nemesis) hold(ctx context.Context, d time.Duration, sql string) error {
	conn, err := pgx.Connect(ctx, n.databaseURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '5s'`); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, sql); err != nil {
		return err
	}
	pause.For(ctx, d)
	return tx.Rollback(context.WithoutCancel(ctx))
}

// prepare leaves a prepared transaction behind for a while.
func (n *nemesis) prepare(ctx context.Context, f Fault) error {
	name := fmt.Sprintf("%s-%d", n.name, f.At)
	conn, err := pgx.Connect(ctx, n.databaseURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION '"+name+"'"); err != nil {
		return err
	}
	pause.For(ctx, f.For)
	return n.rollbackPrepared(context.WithoutCancel(ctx), name)
}

// rollbackPrepared tries until the database is there: a forgotten one would hold everything back.
func (n *nemesis) rollbackPrepared(ctx context.Context, name string) error {
	return n.untilDone(ctx, "ROLLBACK PREPARED '"+name+"'")
}

// copies publishes records of the topic again, as they are.
func (n *nemesis) copies(ctx context.Context, random *rand.Rand) (string, error) {
	partition := int32(random.IntN(n.plan.Scene.Partitions))
	ends, err := n.admin.ListEndOffsets(ctx, n.name)
	if err != nil {
		return "", err
	}
	end, ok := ends.Lookup(n.name, partition)
	if !ok || end.Err != nil || end.Offset == 0 {
		return "", errSkipped
	}
	limited, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	records, err := n.read(limited, partition, random.Int64N(end.Offset), 1+random.IntN(300))
	if err != nil {
		return "", err
	}
	var again []*kgo.Record
	for _, r := range records {
		for _, h := range r.Headers {
			if h.Key == "message-id" {
				if err := n.ledger.Write(ledger.Copied, string(h.Value)); err != nil {
					return "", err
				}
			}
		}
		again = append(again, &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value, Headers: r.Headers})
	}
	return strconv.Itoa(len(again)) + " records of partition " + strconv.Itoa(int(partition)), n.client.ProduceSync(limited, again...).FirstErr()
}

// read reads some records of the topic from an offset on: one at least.
func (n *nemesis) read(ctx context.Context, partition int32, from int64, atMost int) ([]*kgo.Record, error) {
	reader, err := kgo.NewClient(kgo.SeedBrokers(n.arena.kafka.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{
		n.name: {partition: kgo.NewOffset().At(from)},
	}), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	records := reader.PollRecords(ctx, atMost).Records()
	if len(records) == 0 {
		return nil, errSkipped
	}
	return records, nil
}

// conflict publishes a record with the ID of one that every group handled or parked, and with other
// content.
func (n *nemesis) conflict(ctx context.Context, random *rand.Rand) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	partition, groups := int32(random.IntN(n.plan.Scene.Partitions)), 0
	for _, g := range n.plan.Scene.Groups {
		if g.Parent == 0 {
			groups++
		}
	}
	var handled int64
	if err := n.pool.QueryRow(ctx, `-- torture.handled
SELECT coalesce(CASE WHEN count(*) = $3 THEN min(next_offset) END, 0) FROM effectonce.consumer_positions
WHERE topic = $1 AND partition = $2 AND resume_at IS NULL`, n.name, partition, groups).Scan(&handled); err != nil {
		return "", err
	}
	if handled == 0 {
		return "", errSkipped
	}
	records, err := n.read(ctx, partition, random.Int64N(handled), 1)
	if err != nil {
		return "", err
	}
	r := records[0]
	var b scene.Body
	if err := json.Unmarshal(r.Value, &b); err != nil || b.Forged || r.Offset >= handled {
		return "", errSkipped // garbage, or forged before
	}
	b.Forged, b.Amount, b.Kind, b.Padding = true, b.Amount+1, scene.KindPlain, ""
	value, err := json.Marshal(b)
	if err != nil {
		return "", err
	}
	if err := n.ledger.Write(ledger.Forged, b.Order); err != nil {
		return "", err
	}
	return fmt.Sprintf("order %d", b.Order), n.client.ProduceSync(ctx, &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: value, Headers: r.Headers}).FirstErr()
}

// lowerLimit makes the topic refuse batches of records that it took before.
func (n *nemesis) lowerLimit(ctx context.Context, lasts time.Duration) error {
	if err := n.limitRecords(ctx, n.name, smallRecords/4); err != nil {
		return err
	}
	pause.For(ctx, lasts)
	usual := normalRecords
	if n.plan.Scene.SmallRecords {
		usual = smallRecords
	}
	return n.limitRecords(context.WithoutCancel(ctx), n.name, usual)
}

// garbage publishes a record that no handler can decode.
func (n *nemesis) garbage(ctx context.Context, random *rand.Rand) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	id := uuid.Must(uuid.NewV7()).String()
	if err := n.ledger.Write(ledger.Garbage, id); err != nil {
		return "", err
	}
	return id, n.client.ProduceSync(ctx, &kgo.Record{
		Topic: n.name, Partition: int32(random.IntN(n.plan.Scene.Partitions)), Key: []byte("garbage"), Value: []byte("}{"),
		Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}},
	}).FirstErr()
}

// heal repairs what a fault may have left when it could not heal itself.
func (n *nemesis) heal(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	var problems []error
	for _, set := range n.ways {
		problems = append(problems, proxies.LetThrough(ctx, slices.Concat(set.Postgres, set.Kafka)))
	}
	for {
		if err := n.pool.Ping(ctx); err == nil || !pause.For(ctx, 200*time.Millisecond) {
			problems = append(problems, err)
			break
		}
	}
	problems = append(problems, n.commitPrepared(ctx, 4*time.Second), n.operator.heal(ctx))
	return errors.Join(problems...)
}

// commitPrepared commits what processes prepared and then did not live to commit: what is that old.
func (n *nemesis) commitPrepared(ctx context.Context, age time.Duration) error {
	rows, _ := n.pool.Query(ctx, `SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND prepared <= clock_timestamp() - $1::interval`, age)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, name := range names {
		_, failed := n.pool.Exec(ctx, "COMMIT PREPARED '"+name+"'")
		err = errors.Join(err, failed)
	}
	return err
}
