package torture

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/pause"
)

const (
	// readyMax bounds the start of all processes, up to the first effect.
	readyMax = 4 * time.Minute
	// stallMax is how long nothing may move when all faults are healed: longer than sessions, leases,
	// timeouts of statements and transactions, and pauses of retries together.
	stallMax = 75 * time.Second
	// drainMax bounds the drain of a round as a whole.
	drainMax = 15 * time.Minute
	// rivalDrainMax is drainMax for rivals, who are expected to lose.
	rivalDrainMax = 5 * time.Minute
	// stopMax is how long a process may take to end after SIGTERM.
	stopMax = 20 * time.Second
	// answerMax bounds the time that services need for an answer to every request, when all is well.
	answerMax = 3 * time.Minute
	// quietMax is how long nothing may move before the operator hands back what is parked and dead:
	// longer than sessions, leases and pauses of retries. What could still move by itself by then is
	// stuck.
	quietMax = 15 * time.Second
	// nudgesMax bounds how often consumers on kfake are restarted because nothing moves.
	nudgesMax = 4
	// askEvery is how often the database is asked.
	askEvery = 500 * time.Millisecond
	// retryEvery is how often, at the end, the operator hands back what is parked and dead.
	retryEvery = 3 * time.Second
	// sayEvery is how often a drain is logged.
	sayEvery = 10 * time.Second
)

// Result is what became of a round.
type Result struct {
	Round   int            `json:"round"`
	Verdict judge.Verdict  `json:"verdict"`
	Faults  map[string]int `json:"faults"`
	Seconds float64        `json:"seconds"`
	Busy    float64        `json:"busy"`           // seconds from the first effects to the last one
	Logs    string         `json:"logs,omitempty"` // of a round that failed
}

// round is a round in progress.
type round struct {
	*nemesis

	bank   *bank
	stuck  []string
	nudges int
	nudged time.Time     // last
	busy   time.Duration // from the first effects to the last one

	clients *clients // nil: no service
}

// play plays a round on an arena. An error means that it could not be played or judged.
func (t *run) play(ctx context.Context, a *arena, p Plan) (result Result, err error) {
	begun := time.Now()
	dir, err := os.MkdirTemp(t.Dir, fmt.Sprintf("round-%d-", p.Round))
	if err != nil {
		return Result{}, err
	}
	result = Result{Round: p.Round, Logs: dir}
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return result, err
	}
	if err := os.WriteFile(filepath.Join(dir, "plan.json"), text, 0o600); err != nil {
		return result, err
	}
	log, err := newLog(t.Out, filepath.Join(dir, "log"))
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, log.close()) }()
	log.say("round %d of seed %d: %s", p.Round, p.Seed, describe(p))
	s, err := a.lay(ctx, p.Scene)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, s.clear(ctx)) }()
	r, err := t.assemble(ctx, s, p, dir, log)
	if err != nil {
		return result, err
	}
	defer r.close(ctx)
	if err := t.prepare(ctx, s, p, dir); err != nil {
		return result, err
	}
	if err := r.carryOut(ctx); errors.Is(err, errCrashes) || p.Scene.Rival != "" && errors.Is(err, errIdle) {
		r.stuck = append(r.stuck, err.Error())
		r.Close()
	} else if err != nil {
		return result, err
	}
	if err := r.endSessionsOfPooler(ctx); err != nil {
		return result, err
	}
	verdict, err := r.judge(ctx)
	if err != nil {
		return result, fmt.Errorf("judge the round: %w", err)
	}
	result.Verdict, result.Faults, result.Seconds, result.Busy = verdict, r.done, time.Since(begun).Seconds(), r.busy.Seconds()
	total := 0
	for _, n := range r.done {
		total += n
	}
	log.say("%s; %d faults in %.0f s", verdict.String(), total, result.Seconds)
	for _, text := range verdict.Examples {
		log.say("  %s", text)
	}
	if verdict.Held() {
		result.Logs = ""
		err = os.RemoveAll(dir)
	}
	return result, err
}

func describe(p Plan) string {
	text, err := json.Marshal(p.Scene)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d faults planned, %s", len(p.Faults), text)
}

// errIdle means that nothing happens. For a rival that is judged, too.
var errIdle = errors.New("there are no effects")

// errCrashes means that a process cannot be kept running: that is judged, too.
var errCrashes = errors.New("a process ends again and again")

// assemble makes everything that a round has besides its site.
func (t *run) assemble(ctx context.Context, s *site, p Plan, dir string, log *log) (*round, error) {
	b, err := openBank(ctx, dir)
	if err != nil {
		return nil, err
	}
	book, err := ledger.Open(dir, "nemesis")
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	c, err := hire(ctx, t, dir, s, p, b.url)
	if err != nil {
		return nil, errors.Join(err, b.close(), book.Close())
	}
	o := &operator{site: s, program: t.Program, plan: p, ledger: book, gone: map[int16]int64{}}
	return &round{bank: b, nemesis: &nemesis{
		site: s, dir: dir, crew: c, plan: p, operator: o, ledger: book, log: log, done: map[string]int{},
	}}, nil
}

func (r *round) close(ctx context.Context) {
	r.crew.close(ctx)
	_ = r.bank.close() // its ledger is read already
	_ = r.ledger.Close()
}

// carryOut starts everything, injects faults while orders are written, and lets everything drain.
func (r *round) carryOut(ctx context.Context) error {
	if err := r.start(worker.RoleRelay, worker.RoleConsumer, worker.RoleService, worker.RoleProducer); err != nil {
		return err
	}
	if err := r.untilFirstEffects(ctx); err != nil {
		return err
	}
	began := time.Now()
	working, stop := context.WithTimeout(ctx, time.Duration(r.plan.Scene.Seconds)*time.Second)
	defer stop()
	until, _ := working.Deadline()
	r.begin(until)
	background := make(chan error, 3)
	jobs := 1
	go func() { background <- r.run(working) }()
	watching, unwatch := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() { defer close(watched); r.watch(watching) }()
	defer func() { unwatch(); <-watched }()
	if r.plan.Scene.Service {
		book, err := ledger.Open(r.dir, "clients")
		if err != nil {
			return err
		}
		defer func() { _ = book.Close() }()
		r.clients = &clients{services: r.services, ledger: book, seed: r.plan.Seed + uint64(r.plan.Round), asked: map[string]string{}}
		jobs++
		go func() { background <- r.clients.run(working) }()
	}
	for range jobs {
		select {
		case err := <-background:
			if err != nil {
				return err
			}
		case err := <-r.Failed:
			return fmt.Errorf("%w: %w", errCrashes, err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r.log.say("calm: no more faults")
	return r.drain(ctx, began)
}

// untilFirstEffects waits until every group has one: on a slow machine the faults would otherwise
// hit nothing.
func (r *round) untilFirstEffects(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyMax)
	defer cancel()
	for {
		var idle int
		err := r.pool.QueryRow(ctx, `SELECT count(*) FROM (SELECT grp FROM shop.balances GROUP BY grp HAVING sum(effects) = 0) AS g`).Scan(&idle)
		if err == nil && idle == 0 {
			return nil
		}
		select {
		case err := <-r.Failed:
			return fmt.Errorf("%w: %w", errCrashes, err)
		default:
		}
		if !pause.For(ctx, askEvery) {
			return fmt.Errorf("%w after %v: %w", errIdle, readyMax, errors.Join(err, context.Cause(ctx)))
		}
	}
}

// watch writes down the stored positions.
func (r *round) watch(ctx context.Context) {
	last := map[string]int64{}
	for pause.For(ctx, askEvery) {
		var group, topic string
		var partition int32
		var next int64
		rows, _ := r.pool.Query(ctx, `SELECT consumer_group, topic, partition, next_offset FROM effectonce.consumer_positions WHERE next_offset IS NOT NULL`)
		_, err := pgx.ForEachRow(rows, []any{&group, &topic, &partition, &next}, func() error {
			name := fmt.Sprintf("%s/%s/%d", group, topic, partition)
			if known, ok := last[name]; ok && known == next {
				return nil
			}
			last[name] = next
			return r.ledger.Write(ledger.Position, group, topic, partition, next)
		})
		_ = err // the database may be away
	}
}

// drain stops the writers, cures what was sick, and waits until nothing is left to do.
func (r *round) drain(ctx context.Context, began time.Time) error {
	limit := drainMax
	if r.plan.Scene.Rival != "" {
		limit = rivalDrainMax
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if r.clients != nil {
		limited, cancel := context.WithTimeout(ctx, answerMax)
		r.clients.finish(limited)
		cancel()
	}
	r.blame(fleet.Stop(ctx, append(r.of(worker.RoleProducer), r.of(worker.RoleService)...), stopMax))
	if err := r.commitPrepared(ctx, 0); err != nil { // of producers that were killed since the last fault was healed
		return err
	}
	if _, err := r.pool.Exec(ctx, `INSERT INTO shop.cured DEFAULT VALUES`); err != nil {
		return err
	}
	if err := r.limitRecords(ctx, r.name, largeRecords); err != nil {
		return err
	}
	last, err := r.settle(ctx)
	if err != nil {
		return err
	}
	r.log.say("settled: every order has its effects")
	r.busy = last.Sub(began)
	r.blame(fleet.Stop(ctx, r.of(worker.RoleRelay), stopMax))
	if err := r.untilRead(ctx); err != nil {
		return err
	}
	r.blame(fleet.Stop(ctx, r.of(worker.RoleConsumer), stopMax))
	r.stuck = append(r.stuck, r.Crashes()...)
	return nil
}

func (r *round) blame(err error) {
	if err != nil {
		r.stuck = append(r.stuck, err.Error())
	}
}

// progressSQL is everything that moves while a round drains.
const progressSQL = `-- torture.progress
SELECT (SELECT coalesce(sum(version), 0) FROM shop.keys)::bigint AS orders,
  (SELECT coalesce(sum(effects), 0) FROM shop.balances)::bigint AS effects,
  (SELECT count(*) FROM effectonce.parked_messages) AS parked,
  (SELECT count(*) FROM effectonce.outbox_dead) AS dead,
  (SELECT count(*) FROM effectonce.outbox_scheduled) AS later,
  (SELECT coalesce(sum(rows), 0) FROM effectonce.outbox_backlog)::bigint + (SELECT count(*) FROM shop.outbox) AS waiting`

type progress struct{ Orders, Effects, Parked, Dead, Later, Waiting int64 }

// settle waits until every group has handled every order, and discards what can never be handled. It
// returns when something moved last.
func (r *round) settle(ctx context.Context) (time.Time, error) {
	var last progress
	moved, retried, said := time.Now(), time.Time{}, time.Now()
	for {
		rows, _ := r.pool.Query(ctx, progressSQL)
		now, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[progress])
		if err != nil {
			return moved, err
		}
		missing, err := r.missing(ctx)
		if err != nil {
			return moved, err
		}
		if missing == 0 && now.Parked+now.Dead+now.Later+now.Waiting == 0 {
			return moved, nil
		}
		if now != last {
			last, moved = now, time.Now()
		}
		if time.Since(said) > sayEvery {
			said = time.Now()
			r.log.say("draining: %d effects are missing, %+v", missing, now)
		}
		if err := r.nudge(ctx, moved); err != nil {
			return moved, err
		}
		if !r.plan.Scene.Foreign() && time.Since(moved) > quietMax && now.Parked+now.Dead+now.Later+now.Waiting == 0 {
			if left, err := r.unread(ctx); err != nil || left == 0 {
				return moved, err // nothing is on its way: what is missing is lost, and the judge says so
			}
		}
		if time.Since(moved) > stallMax {
			r.stuck = append(r.stuck, fmt.Sprintf("nothing moved for %v: %d effects are missing, %+v", stallMax, missing, now))
			return moved, nil
		}
		if now.Parked+now.Dead > 0 {
			if retried, err = r.handBack(ctx, moved, retried); err != nil {
				return moved, err
			}
		}
		select {
		case err := <-r.Failed:
			return moved, fmt.Errorf("%w: %w", errCrashes, err)
		default:
		}
		if !pause.For(ctx, askEvery) {
			r.stuck = append(r.stuck, fmt.Sprintf("not settled in time: %d effects are missing, %+v", missing, now))
			return moved, nil
		}
	}
}

// handBack hands back what is parked and dead every retryEvery, and first when nothing has moved by
// itself for quietMax. It returns when it did so last.
func (r *round) handBack(ctx context.Context, moved, last time.Time) (time.Time, error) {
	switch {
	case last.IsZero() && min(time.Since(moved), time.Since(r.nudged)) < quietMax || time.Since(last) < retryEvery:
		return last, nil
	case last.IsZero():
		rows, _ := r.pool.Query(ctx, forgottenSQL)
		forgotten, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return last, err
		}
		r.stuck = append(r.stuck, forgotten...)
	}
	return time.Now(), r.operator.settle(ctx)
}

// forgottenSQL finds what nobody waits for: parked and dead rows that were handed back, or that wait
// behind a row that is gone, or for a topic that is not paused any more.
const forgottenSQL = `-- torture.forgotten
SELECT 'forgotten: ' || topic || '/' || partition || '/' || "offset" || ' is ' || state FROM (
  SELECT topic, partition, "offset", state, seq, min(seq) FILTER (WHERE state = 'parked') OVER (PARTITION BY consumer, topic, partition, key) AS head
  FROM effectonce.parked_messages) AS p
WHERE state <> 'parked' AND coalesce(head > seq, true)
UNION ALL
SELECT 'forgotten: dead row ' || seq || ' of ' || topic || ' is ' || state || ', ' || reason FROM (
  SELECT topic, state, reason, seq, min(seq) FILTER (WHERE state = 'held') OVER (PARTITION BY relay, topic, key) AS head FROM effectonce.outbox_dead) AS d
WHERE state <> 'held' AND coalesce(head > seq, true) OR reason = 'paused'`

// missing is how many effects are still to come, by the counts that handlers keep: what was
// discarded or dead-lettered is no effect.
func (r *round) missing(ctx context.Context) (int64, error) {
	if r.plan.Scene.Rival != "" {
		return r.missingOfRival(ctx)
	}
	var missing int64
	for _, g := range r.plan.Scene.Groups {
		if g.Parent > 0 {
			continue
		}
		var orders, effects int64
		if err := r.pool.QueryRow(ctx, `SELECT (SELECT coalesce(sum(version), 0) FROM shop.keys)::bigint, (SELECT coalesce(sum(effects), 0) FROM shop.balances WHERE grp = $1)::bigint`, g.Number).Scan(&orders, &effects); err != nil {
			return 0, err
		}
		gone := r.operator.gone[g.Number]
		if g.DeadLetter {
			ends, err := r.admin.ListEndOffsets(ctx, worker.Job{Topic: r.name}.DeadTopic(g.Number))
			if err != nil {
				return 0, err
			}
			// An upper bound: the judge counts exactly, and the test of the end of the topics follows.
			ends.Each(func(o kadm.ListedOffset) { gone += o.Offset })
		}
		missing += max(0, orders-effects-gone)
	}
	return missing, nil
}

// untilRead waits until the consumers have read their topics to the end, so that late copies are
// seen, too. The relays are stopped, so that the end does not move.
func (r *round) untilRead(ctx context.Context) error {
	best, moved, said := int64(-1), time.Now(), time.Now()
	for {
		behind, err := r.unread(ctx)
		if err != nil || behind == 0 {
			return err
		}
		if best < 0 || behind < best {
			best, moved = behind, time.Now()
		}
		if time.Since(said) > sayEvery {
			said = time.Now()
			r.log.say("draining: %d records are not read", behind)
		}
		if err := r.nudge(ctx, moved); err != nil {
			return err
		}
		if time.Since(moved) > stallMax || !pause.For(ctx, askEvery) {
			r.stuck = append(r.stuck, fmt.Sprintf("%d records are not read after %v", behind, stallMax))
			return nil
		}
	}
}

// unread is how many records the groups have still to read.
func (r *round) unread(ctx context.Context) (behind int64, err error) {
	j := worker.Job{Topic: r.name}
	for _, g := range r.plan.Scene.Groups {
		topic := r.name
		if g.Parent > 0 {
			topic = j.ChildTopic(g.Parent)
		}
		n, err := r.behind(ctx, j.GroupID(g.Number), topic)
		if err != nil {
			return 0, err
		}
		behind += n
	}
	return behind, nil
}

// nudge restarts the consumers, once, if nothing moved for longer than a rebalance takes. Only kfake
// needs it: a member that is killed while its request to join waits stays in the group, without a
// session that could end. Kafka's brokers have no such members; there, a group that does not move is
// left as it is.
func (r *round) nudge(ctx context.Context, moved time.Time) error {
	if r.arena.kafka.Fake == nil || r.nudges == nudgesMax || time.Since(moved) < quietMax/2 || time.Since(r.nudged) < 2*quietMax {
		return nil
	}
	r.nudges++
	defer func() { r.nudged = time.Now() }()
	r.log.say("nothing moved for %v: kfake may have kept members that were killed; the consumers are restarted", quietMax/2)
	for _, p := range r.of(worker.RoleConsumer) {
		if err := p.Restart(ctx, stopMax); err != nil {
			return err
		}
	}
	return nil
}

func (r *round) behind(ctx context.Context, group, topic string) (behind int64, err error) {
	ends, err := r.admin.ListEndOffsets(ctx, topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return 0, err
	}
	positions := map[int32]int64{}
	if r.plan.Scene.Rival != "" {
		committed, err := r.admin.FetchOffsetsForTopics(ctx, group, topic)
		if err != nil {
			return 0, err
		}
		committed.Each(func(o kadm.OffsetResponse) { positions[o.Partition] = max(0, o.At) })
	}
	var partition int32
	var next int64
	rows, _ := r.pool.Query(ctx, `SELECT partition, next_offset FROM effectonce.consumer_positions WHERE consumer_group = $1 AND topic = $2 AND next_offset IS NOT NULL AND resume_at IS NULL`, group, topic)
	if _, err := pgx.ForEachRow(rows, []any{&partition, &next}, func() error { positions[partition] = next; return nil }); err != nil {
		return 0, err
	}
	ends.Each(func(o kadm.ListedOffset) {
		// Behind the last record there may be the marker of its transaction.
		if left := o.Offset - positions[o.Partition]; left > 1 || left == 1 && !r.plan.Scene.Relay.ExactlyOnce {
			behind += left
		}
	})
	return behind, nil
}

// judge reads all evidence and judges it.
func (r *round) judge(ctx context.Context) (judge.Verdict, error) {
	j := worker.Job{Topic: r.name}
	e := &judge.Evidence{Scene: r.plan.Scene, Topic: r.name, ChildTopic: j.ChildTopic, DeadTopic: j.DeadTopic, JournalTopic: j.JournalTopic, Stuck: r.stuck}
	e.Consumer = func(group int16) string { return j.GroupID(group) + "/" + r.name }
	e.Leaked = leaks(r.dir, r.secret)
	if err := e.ReadLedgers(r.dir); err != nil {
		return judge.Verdict{}, err
	}
	conn, err := pgx.Connect(ctx, r.databaseURL)
	if err != nil {
		return judge.Verdict{}, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := e.ReadDatabase(ctx, conn); err != nil {
		return judge.Verdict{}, err
	}
	topics := []string{r.name}
	for _, g := range r.plan.Scene.Groups {
		if g.Children {
			topics = append(topics, j.ChildTopic(g.Number))
		}
		if g.Journal {
			topics = append(topics, j.JournalTopic(g.Number))
		}
		if g.DeadLetter {
			topics = append(topics, j.DeadTopic(g.Number))
		}
	}
	if err := e.ReadTopics(ctx, []kgo.Opt{kgo.SeedBrokers(r.arena.kafka.Brokers...)}, topics...); err != nil {
		return judge.Verdict{}, err
	}
	if err := e.ReadMirror(r.dir); err != nil {
		return judge.Verdict{}, err
	}
	for what, n := range e.Struck {
		kind, _, _ := strings.Cut(what, " ")
		r.done[kind] += n
		r.log.say("%s: %d times", what, n)
	}
	return judge.Judge(e), nil
}

// hopeless reports whether a message can never be handled, and what the ledger calls it: by its order,
// by the order whose ID it has, or not at all.
func hopeless(value []byte) (name string, yes bool) {
	var b scene.Body
	err := json.Unmarshal(value, &b)
	switch {
	case err != nil:
		return "", true
	case b.Forged:
		return scene.ForgedPrefix + strconv.FormatInt(b.Order, 10), true
	}
	return strconv.FormatInt(b.Order, 10), b.Kind == scene.KindForever
}

// leaks returns the files of a directory that contain a secret.
func leaks(dir, secret string) []string {
	files, _ := filepath.Glob(filepath.Join(dir, "*")) // the pattern is well-formed
	var found []string
	for _, name := range files {
		if text, err := os.ReadFile(name); err != nil || bytes.Contains(text, []byte(secret)) { //nolint:gosec // in the directory of the round
			found = append(found, name)
		}
	}
	return found
}
