package torture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/relay"
)

// fault is one thing that happens to the pipeline.
type fault struct {
	name string
	fake bool // only kfake has it
	do   func(ctx context.Context, r *run, f Fault)
}

// faults of each kind are equally likely.
func faults() []fault {
	return append([]fault{
		{name: "kill", do: func(ctx context.Context, r *run, f Fault) {
			i := f.Choice % len(r.replicas)
			r.replicas[i].wire.freeze(f.side()) // it saw the rest of the world for a while
			pause.For(ctx, f.Lasts/60)
			r.kill(ctx, i)
		}},
		{name: "stop", do: func(ctx context.Context, r *run, f Fault) {
			i := f.Choice % len(r.replicas)
			r.replicas[i].stop()
			r.replace(ctx, i)
		}},
		{name: "freeze", do: func(ctx context.Context, r *run, f Fault) {
			w := r.replicas[f.Choice%len(r.replicas)].wire
			w.freeze(f.side())
			r.later(ctx, f.Lasts, w.thaw)
		}},
		{name: "slow", do: func(ctx context.Context, r *run, f Fault) {
			w := r.replicas[f.Choice%len(r.replicas)].wire
			w.slow(f.Lasts / 60)
			r.later(ctx, f.Lasts, w.thaw)
		}},
		{name: "zombie", do: zombie},
		{name: "cut", do: func(_ context.Context, r *run, f Fault) { r.replicas[f.Choice%len(r.replicas)].wire.cut() }},
		{name: "terminate two", do: statement(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'torture%' ORDER BY random() LIMIT 2`)},
		{name: "terminate all", do: statement(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'torture%'`)},
		{name: "crash of PostgreSQL", do: func(ctx context.Context, r *run, f Fault) {
			r.crash(ctx, crash{server: &r.postgres.Server, behind: f.Lasts / 4})
		}},
		{name: "promotion", fake: true, do: promotion},
		{name: "lost commits", fake: true, do: lostCommits},
		{name: "trouble of PostgreSQL", do: trouble},
		{name: "retention", do: retention},
		{name: "crash of Kafka", do: func(ctx context.Context, r *run, f Fault) {
			if r.kafka.Fake == nil {
				r.crash(ctx, crash{server: &r.kafka.Server, behind: f.Lasts / 4})
			} else {
				r.kafka.Fake.ShufflePartitionLeaders()
			}
		}},
		{name: "requests die", fake: true, do: requestsDie},
		{name: "records refused", fake: true, do: recordsRefused},
		{name: "members removed", do: func(ctx context.Context, r *run, f Fault) { r.removeMembers(ctx, r.groups[f.Choice%len(r.groups)]) }},
		{name: "locked table", do: func(ctx context.Context, r *run, f Fault) {
			tables := []string{"effectonce.parked_messages", "effectonce.consumer_positions", "effectonce.outbox_dead", "effectonce.outbox", "public.torture_effects"}
			modes := []string{"EXCLUSIVE", "ACCESS EXCLUSIVE", "SHARE"}
			r.tx(ctx, f.Lasts/4, "SET LOCAL lock_timeout = '500ms'; LOCK TABLE "+tables[f.Choice%len(tables)]+" IN "+modes[f.Choice%len(modes)]+" MODE")
		}},
		{name: "long transaction", do: func(ctx context.Context, r *run, f Fault) { r.tx(ctx, f.Lasts, "SELECT pg_current_xact_id()") }},
	}, operators()...)
}

// operators do things that this module has commands for.
func operators() []fault {
	return []fault{
		{name: "paused topic", do: func(ctx context.Context, r *run, f Fault) {
			topic := f.topic()
			_, err := relay.Pause(ctx, r.pool, operator(), 0, topic)
			r.logger.Info("nemesis: pause", "error", err)
			r.later(ctx, f.Lasts/3, func() { r.resume(ctx, topic) })
		}},
		{name: "killed while rows leave", do: killedWhileRowsLeave},
		{name: "restarted topic", do: restartTopic},
		{name: "overtaking retention", do: overtake},
		{name: "paused group", do: func(ctx context.Context, r *run, f Fault) {
			of := ` consumer_group = '` + r.groups[f.Choice%len(r.groups)].name + `'`
			statement(`INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why)
				SELECT consumer_group, unnest(topics), 'torture', 'torture' FROM effectonce.consumers WHERE`+of+` ON CONFLICT DO NOTHING`)(ctx, r, f)
			r.later(ctx, f.Lasts/3, func() { r.insist(ctx, `DELETE FROM effectonce.consumer_pauses WHERE`+of) })
		}},
		{name: "prune", do: func(ctx context.Context, r *run, _ Fault) {
			r.pending.Go(func() {
				claims, _ := dedup.New(dedup.Config{})
				_, err := claims.Maintain(ctx, r.pool, dedup.MaintainOptions{Owner: "torture"})
				r.logger.Info("nemesis: prune", "error", err)
			})
		}},
		{name: "parked retried", do: statement(retryParkedSQL + ` AND random() < 0.3`)},
		{name: "parked discarded", do: func(ctx context.Context, r *run, f Fault) { // again and again, while they are released
			for over := time.Now().Add(f.Lasts / 10); time.Now().Before(over); pause.For(ctx, 2*lookEvery) {
				statement(discardSQL+` AND (reason = 'conflict' OR random() < 0.02)`+discardedSQL)(ctx, r, f)
			}
		}},
		{name: "dead retried", do: statement(retryDeadSQL + ` AND random() < 0.5`)},
		{name: "rewind", do: func(ctx context.Context, r *run, f Fault) {
			g := r.groups[f.Choice%len(r.groups)]
			if g.config.Dedup != consumer.DedupByID || r.plan.Retention { // without claims a rewind repeats; what is deleted cannot be read again
				r.report.Faults--
			} else {
				r.mu.Lock()
				r.rewound[g.name]++
				r.mu.Unlock()
				statement(`UPDATE effectonce.consumer_positions SET resume_at = greatest(handled_from, next_offset - 50)
					WHERE resume_at IS NULL AND consumer_group = '`+g.name+`'`)(ctx, r, f)
			}
		}},
	}
}

// killedWhileRowsLeave pauses and resumes a topic, and kills the relays while its rows leave outbox_dead.
func killedWhileRowsLeave(ctx context.Context, r *run, f Fault) {
	_, err := relay.Pause(ctx, r.pool, operator(), lease, topicMore) // they have seen it then
	r.logger.Info("nemesis: pause", "error", err)
	pause.For(ctx, f.Lasts/6)
	for _, p := range r.replicas {
		switch {
		case p.name != "relay":
		case f.Choice%2 == 0:
			p.wire.slow(50 * time.Millisecond)
		default: // what they send to a broker is not acknowledged
			p.wire.freeze(brokerSide(f.Choice / 2 % 3))
		}
	}
	r.resume(ctx, topicMore)
	pause.For(ctx, f.Lasts/4) // the relay looks once a second
	for i, p := range r.replicas {
		if p.name == "relay" {
			r.kill(ctx, i)
		}
	}
}

// kill ends a process as SIGKILL does, and starts another one in its place.
func (r *run) kill(ctx context.Context, i int) {
	r.replicas[i].wire.kill()
	r.replicas[i].stop()
	r.replace(ctx, i)
}

const (
	// retryParkedSQL retries what an operator may retry: a conflict has an effect of its own then.
	retryParkedSQL = `UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp() WHERE state = 'parked' AND reason <> 'conflict'`
	// discardSQL discards messages, while they are retried or not, and discardedSQL notes that their effects are not expected any more.
	discardSQL   = `WITH gone AS (DELETE FROM effectonce.parked_messages WHERE state <> 'behind'`
	discardedSQL = ` RETURNING consumer, convert_from(payload, 'UTF8')::jsonb AS event)
		INSERT INTO public.torture_discarded SELECT c.consumer_group, event->>'Source', (event->>'ID')::bigint FROM gone JOIN effectonce.consumers AS c ON c.id = gone.consumer`
)

// retryDeadSQL hands back what is held for no reason that ends by itself.
const retryDeadSQL = `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE state = 'held' AND reason NOT IN ('unknown_topic', 'paused', 'not_authorized')`

// resumeHaltedSQL resumes partitions whose first commits a promotion lost, or whose next records were deleted.
const resumeHaltedSQL = `UPDATE effectonce.consumer_positions SET resume_at = -2
	WHERE resume_at IS NULL AND (trouble LIKE '%this database has no position%' OR trouble LIKE '%were deleted before they were consumed%')`

// side is what a fault silences: a broker, all of them, PostgreSQL, or everything.
func (f Fault) side() sides {
	return []sides{brokerSide(f.Choice / 50 % 3), kafkaSide, postgresSide, bothSides}[f.Choice/10%4]
}

func (f Fault) topic() string { return []string{topicOrders, topicMore, topicChild}[f.Choice%3] }

func operator() relay.Operator { return relay.Operator{Who: "torture", Why: "torture"} }

func (r *run) resume(ctx context.Context, topics ...string) {
	r.restarting.RLock()
	defer r.restarting.RUnlock()
	for ctx.Err() == nil {
		if _, err := relay.Resume(ctx, r.pool, operator(), topics...); err == nil {
			return
		}
		pause.For(ctx, restartGap)
	}
}

// insist executes a statement until it succeeds.
func (r *run) insist(ctx context.Context, sql string) {
	for ctx.Err() == nil {
		if _, err := r.pool.Exec(ctx, sql); err == nil {
			return
		}
		pause.For(ctx, restartGap)
	}
}

func statement(sql string) func(context.Context, *run, Fault) {
	return func(ctx context.Context, r *run, _ Fault) {
		_, err := r.pool.Exec(ctx, sql)
		r.logger.Info("nemesis: statement", "error", err)
	}
}

// zombie freezes a process, starts another one in its place, and lets it wake up beside it, or die.
func zombie(ctx context.Context, r *run, f Fault) {
	i := f.Choice % len(r.replicas)
	old := r.replicas[i]
	old.wire.freeze(f.side())
	r.later(ctx, f.Lasts, func() {
		if f.Choice/100%2 == 0 {
			old.wire.thaw()
			pause.For(ctx, f.Lasts/4)
		}
		old.wire.kill()
		old.stop()
	})
	r.replace(ctx, i)
}

// crash kills a server after a while, does something, and starts it again after another while.
type crash struct {
	server         *servers.Server
	before, behind time.Duration
	meanwhile      func() error // nil: nothing
}

// crash carries out crashes, one behind the other.
func (r *run) crash(ctx context.Context, crashes ...crash) {
	if !r.crashing.TryLock() {
		r.report.Faults-- // one at a time: it may last for seconds
		return
	}
	r.pending.Go(func() {
		defer r.crashing.Unlock()
		for _, c := range crashes {
			pause.For(ctx, c.before)
			err := c.server.Kill(ctx)
			if err == nil && c.meanwhile != nil {
				err = c.meanwhile()
			}
			pause.For(ctx, c.behind)
			if err := errors.Join(err, c.server.Restart(ctx)); err != nil {
				r.abort(fmt.Errorf("kill a server and start it again: %w", err))
			}
		}
	})
}

// promotion ends PostgreSQL, and starts it as a standby which has everything, and is promoted after a while:
// until then it reads only, then it writes another timeline.
func promotion(ctx context.Context, r *run, f Fault) {
	r.crash(ctx, crash{server: &r.postgres.Server, behind: f.Lasts / 4, meanwhile: func() error { return r.standBy(ctx, f) }})
}

// standBy makes PostgreSQL start as a standby, which is promoted after a while.
func (r *run) standBy(ctx context.Context, f Fault) error {
	r.later(ctx, f.Lasts, func() { r.insist(ctx, `SELECT pg_promote() WHERE pg_is_in_recovery()`) })
	return os.WriteFile(filepath.Join(r.data, "standby.signal"), nil, 0o600)
}

// trouble lets PostgreSQL refuse to write a table for a while, as it does without disk or memory.
func trouble(ctx context.Context, r *run, f Fault) {
	states := []string{"53100", "53200", "58030", "XX000", "55P03", "40001"}
	tables := strings.Split(troubled, ",")
	_, table, _ := strings.Cut(tables[f.Choice%len(tables)], ".")
	_, err := r.pool.Exec(ctx, `INSERT INTO public.torture_trouble VALUES ($1, $2, clock_timestamp() + $3)`, table, states[f.Choice/10%len(states)], f.Lasts/6)
	r.logger.Info("nemesis: trouble", "table", table, "error", err)
}

// requestsDie ends the connections of the next requests of one kind.
func requestsDie(_ context.Context, r *run, f Fault) {
	kinds := []kmsg.Key{kmsg.Produce, kmsg.Fetch, kmsg.Metadata, kmsg.OffsetCommit, kmsg.OffsetFetch, kmsg.JoinGroup, kmsg.Heartbeat, kmsg.InitProducerID, kmsg.EndTxn, kmsg.TxnOffsetCommit}
	var left atomic.Int64
	left.Store(int64(1 + f.Choice%4))
	r.kafka.Fake.ControlKey(kinds[f.Choice%len(kinds)].Int16(), func(kmsg.Request) (kmsg.Response, error, bool) {
		if left.Add(-1) < 0 {
			return nil, nil, false
		}
		r.kafka.Fake.KeepControl()
		return nil, errors.New("torture: the connection dies"), true
	})
}

// recordsRefused answers what is produced for a while with an error of brokers.
func recordsRefused(_ context.Context, r *run, f Fault) {
	refusals := []*kerr.Error{
		kerr.NotEnoughReplicas, kerr.TopicAuthorizationFailed, kerr.MessageTooLarge, kerr.InvalidTimestamp, kerr.InvalidRecord, kerr.PolicyViolation,
		kerr.UnsupportedForMessageFormat, kerr.UnknownTopicOrPartition, kerr.KafkaStorageError, kerr.CorruptMessage, kerr.ClusterAuthorizationFailed,
	}
	over := time.Now().Add(f.Lasts / 6)
	r.kafka.Fake.ControlKey(kmsg.Produce.Int16(), func(q kmsg.Request) (kmsg.Response, error, bool) {
		if time.Now().After(over) {
			return nil, nil, false
		}
		r.kafka.Fake.KeepControl()
		produce := q.(*kmsg.ProduceRequest)
		answer := produce.ResponseKind().(*kmsg.ProduceResponse)
		for _, topic := range produce.Topics {
			t := kmsg.NewProduceResponseTopic()
			t.Topic, t.TopicID = topic.Topic, topic.TopicID
			for _, partition := range topic.Partitions {
				p := kmsg.NewProduceResponseTopicPartition()
				p.Partition, p.ErrorCode = partition.Partition, refusals[f.Choice%len(refusals)].Code
				t.Partitions = append(t.Partitions, p)
			}
			answer.Topics = append(answer.Topics, t)
		}
		return answer, nil, true
	})
}

// removeMembers makes all members of a group join it again.
func (r *run) removeMembers(ctx context.Context, g *group) {
	described, err := kadm.NewClient(r.client).DescribeGroups(ctx, g.name)
	leave := kmsg.NewPtrLeaveGroupRequest()
	leave.Group = g.name
	for _, member := range described[g.name].Members {
		m := kmsg.NewLeaveGroupRequestMember()
		m.MemberID = member.MemberID
		leave.Members = append(leave.Members, m)
	}
	_, leaveErr := leave.RequestWith(ctx, r.client)
	r.logger.Info("nemesis: members removed", "group", g.name, "members", len(leave.Members), "error", errors.Join(err, leaveErr))
}

func (r *run) faultNames() (names []string) {
	for _, f := range faults() {
		if !f.fake || r.kafka.Fake != nil {
			names = append(names, f.name)
		}
	}
	return names
}

// torment carries out the plan's faults.
func (r *run) torment(ctx context.Context) {
	all := faults()
	begun := time.Now()
	for i, f := range r.plan.Faults {
		if !pause.For(ctx, time.Until(begun.Add(f.At))) {
			return
		}
		if time.Since(begun) > r.Duration {
			r.logger.Info("nemesis: late, the other faults are left out", "done", i)
			return
		}
		if slices.Contains(r.Without, f.What) {
			continue
		}
		r.logger.Info("nemesis", "fault", i, "what", f.What, "choice", f.Choice, "lasts", f.Lasts)
		all[slices.IndexFunc(all, func(known fault) bool { return known.name == f.What })].do(ctx, r, f)
		r.report.Faults++
	}
}

// heal ends what would last, and repairs what refuses messages.
func (r *run) heal(ctx context.Context) {
	r.repaired.Store(true)
	for i, p := range r.replicas {
		p.wire.heal()
		if p.name == "relay" { // its configuration is another one now
			p.stop()
			r.replace(ctx, i)
		}
	}
	for _, p := range r.replicas {
		p.wire.heal()
	}
	r.resume(ctx, topicOrders, topicMore, topicChild)
	r.insist(ctx, `DELETE FROM effectonce.consumer_pauses`) // a promotion that lost the end of a pause brought it back
	for _, g := range r.groups {
		if r.kafka.Fake != nil {
			// It keeps a member for ever whose connection ended while it waited for the others of a rebalance: it starts
			// the session timer behind the answer only. Kafka removes such a member.
			r.removeMembers(ctx, g)
		}
	}
}
