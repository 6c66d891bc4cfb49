package torture

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/relay"
)

// fault is one thing that happens to the pipeline.
type fault struct {
	name string
	fake bool // only kfake has it
	ours bool // an operator of this module does it
	do   func(ctx context.Context, r *run, f Fault)
}

// faults of each kind are equally likely.
func faults() []fault {
	return []fault{
		{name: "kill", do: func(ctx context.Context, r *run, f Fault) { r.kill(ctx, f.Choice%len(r.replicas)) }},
		{name: "stop", do: func(ctx context.Context, r *run, f Fault) {
			i := f.Choice % len(r.replicas)
			r.replicas[i].stop()
			r.replace(ctx, i)
		}},
		{name: "freeze", do: func(ctx context.Context, r *run, f Fault) {
			w := r.replicas[f.Choice%len(r.replicas)].wire
			w.freeze()
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
		{name: "crash of PostgreSQL", do: crash(func(r *run) *servers.Server { return &r.postgres.Server })},
		{name: "crash of Kafka", do: func(ctx context.Context, r *run, f Fault) {
			if r.kafka.Fake == nil {
				crash(func(r *run) *servers.Server { return &r.kafka.Server })(ctx, r, f)
			} else {
				r.kafka.Fake.ShufflePartitionLeaders()
			}
		}},
		{name: "requests die", fake: true, do: requestsDie},
		{name: "members removed", do: func(ctx context.Context, r *run, f Fault) { r.removeMembers(ctx, r.groups[f.Choice%len(r.groups)]) }},
		{name: "locked table", do: func(ctx context.Context, r *run, f Fault) {
			tables := []string{"effectonce.parked_messages", "effectonce.consumer_positions", "effectonce.outbox_dead", "effectonce.outbox", "public.torture_effects"}
			modes := []string{"EXCLUSIVE", "ACCESS EXCLUSIVE", "SHARE"}
			r.tx(ctx, f.Lasts/4, "SET LOCAL lock_timeout = '500ms'; LOCK TABLE "+tables[f.Choice%len(tables)]+" IN "+modes[f.Choice%len(modes)]+" MODE")
		}},
		{name: "long transaction", do: func(ctx context.Context, r *run, f Fault) { r.tx(ctx, f.Lasts, "SELECT pg_current_xact_id()") }},
		{name: "paused topic", ours: true, do: func(ctx context.Context, r *run, f Fault) {
			topic := []string{topicOrders, topicMore, topicChild}[f.Choice%3]
			_, err := relay.Pause(ctx, r.pool, operator(), 0, topic)
			r.logger.Info("nemesis: pause", "error", err)
			r.later(ctx, f.Lasts/3, func() { r.resume(ctx, topic) })
		}},
		{name: "killed while rows leave", ours: true, do: killedWhileRowsLeave},
		{name: "parked retried", ours: true, do: statement(`UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp() WHERE state = 'parked' AND random() < 0.3`)},
		{name: "dead retried", ours: true, do: statement(retryDeadSQL + ` AND random() < 0.5`)},
		{name: "rewind", ours: true, do: func(ctx context.Context, r *run, f Fault) {
			g := r.groups[f.Choice%len(r.groups)]
			if g.config.Dedup != consumer.DedupByID { // without claims a rewind repeats
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
	_, err := relay.Pause(ctx, r.pool, operator(), 0, topicMore)
	r.logger.Info("nemesis: pause", "error", err)
	pause.For(ctx, f.Lasts/6)
	for _, p := range r.replicas {
		if p.name == "relay" {
			p.wire.slow(50 * time.Millisecond)
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

// retryDeadSQL hands back what is held for no reason that ends by itself.
const retryDeadSQL = `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE state = 'held' AND reason NOT IN ('unknown_topic', 'paused', 'not_authorized')`

func operator() relay.Operator { return relay.Operator{Who: "torture", Why: "torture"} }

func (r *run) resume(ctx context.Context, topics ...string) {
	for ctx.Err() == nil {
		if _, err := relay.Resume(ctx, r.pool, operator(), topics...); err == nil {
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

// zombie freezes a process, starts another one in its place, and lets it wake up beside it.
func zombie(ctx context.Context, r *run, f Fault) {
	i := f.Choice % len(r.replicas)
	old := r.replicas[i]
	old.wire.freeze()
	r.later(ctx, f.Lasts, func() {
		old.wire.thaw()
		pause.For(ctx, f.Lasts/4)
		old.wire.kill()
		old.stop()
	})
	r.replace(ctx, i)
}

func crash(of func(*run) *servers.Server) func(context.Context, *run, Fault) {
	return func(ctx context.Context, r *run, f Fault) {
		if !r.crashing.TryLock() {
			r.report.Faults-- // one at a time: it may last for seconds
			return
		}
		r.pending.Go(func() {
			defer r.crashing.Unlock()
			server := of(r)
			if err := server.Kill(ctx); err != nil {
				r.broken("kill a server: %v", err)
				return
			}
			pause.For(ctx, f.Lasts/4)
			if err := server.Restart(ctx); err != nil {
				r.broken("start a server that was killed: %v", err)
			}
		})
	}
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
		if (!f.fake || r.kafka.Fake != nil) && (!f.ours || !r.Textbook) {
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
	for _, g := range r.groups {
		if r.kafka.Fake != nil {
			// It keeps a member for ever whose connection ended while it waited for the others of a rebalance: it starts
			// the session timer behind the answer only. Kafka removes such a member.
			r.removeMembers(ctx, g)
		}
	}
}
