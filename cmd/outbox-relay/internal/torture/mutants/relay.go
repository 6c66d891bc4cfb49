package mutants

import (
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture"
)

func relayMutants() []Mutant { //nolint:funlen // data
	return []Mutant{
		{
			Name: "truncate-ignores-open", File: "relay/queries.go",
			Old:   `(o.txid >= pg_snapshot_xmax(t.snapshot) OR o.txid = ANY (ARRAY(SELECT pg_snapshot_xip(t.snapshot)))) AND`,
			New:   `o.txid >= pg_snapshot_xmax(t.snapshot) AND`,
			What:  "a slot is truncated although it has rows of transactions that were open in the tick",
			Check: "lost", Fits: pausesOfWriters,
		},
		{
			Name: "truncate-looks-once", File: "relay/slots.go",
			Old:   `found, err := unpublished(tx)`,
			New:   `found, err := false, error(nil)`,
			What:  "a slot is truncated without a second look behind the lock",
			Check: "lost", Fits: pausesOfWriters,
		},
		{
			Name: "truncate-by-age", File: "relay/queries.go",
			Old:   "SELECT EXISTS (\n  SELECT FROM effectonce.outbox_progress_now p LEFT JOIN",
			New:   "SELECT false AND EXISTS (\n  SELECT FROM effectonce.outbox_progress_now p LEFT JOIN",
			What:  "a slot is truncated when it is old, published or not",
			Check: "lost", Fits: shortKeep,
		},
		{
			Name: "rows-by-number-only", File: "relay/reader.go",
			Old:   `if len(c.from.xip) == 0 && !r.sized {`,
			New:   `if !r.sized {`,
			What:  "rows of transactions that were open in the tick are not looked up",
			Check: "lost",
		},
		{
			Name: "seq-safe-too-late", File: "relay/reader.go",
			Old:   "seen, err := newTick(read.snapshot, seqSafe)",
			New:   "seqSafe = r.progress.seqSafe.Load()\n\tseen, err := newTick(read.snapshot, seqSafe)",
			What:  "the number that a tick has passed is read behind its snapshot",
			Check: "lost",
			Lacks: "a server process that is frozen between a snapshot and the answer of its statement, while small pages are read ahead",
		},
		{
			Name: "last-number-is-passed", File: "relay/reader.go",
			Old:   `seen.seqLast = max(seqSafe, r.passing.below(seen.xmax), c.floor)`,
			New:   `seen.seqLast = max(read.seqLast, r.passing.below(seen.xmax), c.floor)`,
			What:  "a tick counts every number as passed that was assigned when it was taken",
			Check: "lost",
		},
		{
			Name: "floor-too-early", File: "relay/tick.go",
			Old:   `if t.xmin < m.xmax {`,
			New:   `if t.xmin > t.xmax {`,
			What:  "the floor moves although transactions from before it are open",
			Check: "lost",
		},
		{
			Name: "progress-before-acknowledgement", File: "relay/target.go",
			Old:   `b.pending = len(b.records)`,
			New:   `b.pending = 0`,
			What:  "rows count as acknowledged when they are handed to the client",
			Check: "lost", Fits: all(atLeastOnce, proxied),
		},
		{
			Name: "failed-record-is-passed", File: "relay/flight.go",
			Old:   `f.batches[0].pending == 0 && f.failure == nil {`,
			New:   `f.batches[0].pending == 0 {`,
			What:  "progress moves behind a record that Kafka refused",
			Check: "lost", Fits: all(atLeastOnce, with("lower-limit")),
		},
		{
			Name: "full-page-ends-batch", File: "relay/page.go",
			Old:   `p.full = p.full || len(p.rows) == want.rows`,
			New:   `p.full = p.full || len(p.rows) > want.rows`,
			What:  "a page with the greatest number of rows counts as the end of its batch",
			Check: "lost",
		},
		{
			Name: "pages-read-on", File: "relay/reader.go",
			Old:   `upTo = &c.to.snapshot`,
			New:   `upTo = nil`,
			What:  "later pages of a batch have rows that became visible behind its tick",
			Check: "out_of_order", Fits: smallPages,
		},
		{
			Name: "records-backwards", File: "relay/target.go",
			Old:   "for _, record := range b.records {\n\t\tif p.valid.Err() != nil {",
			New:   "for _, record := range slices.Backward(b.records) {\n\t\tif p.valid.Err() != nil {",
			What:  "a page is handed over in the wrong order",
			Check: "out_of_order",
		},
		{
			Name: "dead-row-holds-nothing", File: "relay/dead.go",
			Old:   `found[topicKey{names[at-1], string(keys[at-1])}] = ofEarlierPage`,
			New:   `delete(found, topicKey{names[at-1], string(keys[at-1])})`,
			What:  "rows behind a dead row of their key are published before it",
			Check: "out_of_order", Fits: with("pause-topic"),
		},
		{
			Name: "dead-rows-forgotten-at-takeover", File: "relay/exactly.go",
			Old:   `if dead := found.verdicts(); len(dead.seqs) > 0 {`,
			New:   `if dead := found.verdicts(); len(dead.seqs) > 1<<40 {`,
			What:  "a takeover moves behind dead rows that are not in outbox_dead yet",
			Check: "lost", Fits: all(exactlyOnce, with("pause-topic")),
		},
		{
			Name: "released-removed-first", File: "relay/dead.go",
			Old:   `p.dead.remove(ctx, seqs(a.dropped))`,
			New:   `p.dead.remove(ctx, append(seqs(a.dropped), seqs(a.rows)...))`,
			What:  "released dead rows are removed before they are published",
			Check: "lost", Fits: all(with("pause-topic"), proxied),
		},
		{
			Name: "progress-topic-ignored", File: "relay/exactly.go",
			Old:   `if !found.after(t.lease) {`,
			New:   `if found.after(t.lease) || true {`,
			What:  "an exactly-once relay begins at the database's copy of its progress",
			Check: "doubled", Fits: exactlyOnce,
		},
		{
			Name: "tick-is-not-durable", File: "relay/queries.go",
			Old:   "FROM (SELECT ` + flushed + ` AS setting) AS durable\nWHERE durable.setting IS NOT NULL AND CASE WHEN $3",
			New:   "FROM (SELECT set_config('synchronous_commit', 'off', true) AS setting) AS durable\nWHERE durable.setting IS NOT NULL AND CASE WHEN $3",
			What:  "a tick can be lost in a crash although progress in Kafka refers to it",
			Check: "doubled", Fits: all(exactlyOnce, with("crash-postgres")),
			Lacks: "a crash of the database while nobody commits and its WAL writer rests: every other commit makes the tick durable, too",
		},
		{
			Name: "prune-takes-ticks-in-use", File: "relay/queries.go",
			Old:   "WHERE tick > 0 AND created_at < clock_timestamp() - interval '10 minutes'\n    AND tick < (SELECT pg_catalog.min(tick) FROM effectonce.outbox_progress)",
			New:   "WHERE tick > 0",
			What:  "pruning removes the ticks that progress stands on",
			Check: "stuck",
		},
		{
			Name: "reshard-behind-the-cut", File: "relay/reshard.go",
			Old: `batch.Queue(m.sql.cutOver, m.cfg.Name, m.cut.id)`,
			New: `var snapshot string
		var floor int64
		if err := tx.QueryRow(ctx, m.sql.snapshot, m.cut.run, m.cfg.Name).Scan(&snapshot, &floor, &held); err != nil {
			return err
		}
		late, err := newTick(snapshot, m.cut.seqLast)
		if err != nil {
			return err
		}
		if late.run = m.cut.run; m.storeTick(ctx, tx, late) != nil {
			return errLeaseLost
		}
		batch.Queue(m.sql.cutOver, m.cfg.Name, late.id)`,
			What:  "new shards begin at a tick behind the one up to which the old ones published",
			Check: "lost", Fits: with("reshard"),
		},
		{
			Name: "later-loses-its-tail", File: "relay/queries.go",
			Old:   `'0001-01-01') FROM gone ORDER BY due_at, place`,
			New:   `'0001-01-01') FROM gone ORDER BY due_at, place LIMIT 3`,
			What:  "of many messages that are due together the last ones are deleted and not published",
			Check: "lost", Fits: later,
		},
		{
			Name: "replay-with-a-new-id", File: "cmd/outbox-relay/internal/replay/replay.go",
			Old:   `record.Row{ID: r.id, Topic: topic,`,
			New:   `record.Row{ID: [16]byte(append(r.id[8:16:16], r.id[:8]...)), Topic: topic,`,
			What:  "replayed rows get new message IDs",
			Check: "phantoms", Fits: with("replay"),
		},
		{
			Name: "pause-of-topic-ignored", File: "relay/attempt.go",
			Old:   `if p.lease.obeys.set.Load().has(r.topic) {`,
			New:   `if p.lease.obeys.set.Load().has(r.topic) && r.seq < 0 {`,
			What:  "rows of a paused topic are published",
			Check: "phantoms", Fits: all(with("pause-topic"), judgedPauses),
		},
		{
			Name: "sequence-behind-ignored", File: "relay/queries.go",
			Old:   "OR (SELECT behind FROM effectonce.outbox_sequence_state(0, 0))`",
			New:   "`",
			What:  "a slot is truncated although numbers were assigned twice",
			Check: "lost", Fits: all(shortKeep, with("set-sequence-back")),
		},
	}
}

// Conditions on plans.

func exactlyOnce(p torture.Plan) bool { return p.Scene.Relay.ExactlyOnce }

func atLeastOnce(p torture.Plan) bool { return !p.Scene.Relay.ExactlyOnce }

func proxied(p torture.Plan) bool { return p.Scene.Proxies }

// judgedPauses: no relay has in flight, for long, what it sent before a pause.
func judgedPauses(p torture.Plan) bool {
	return !p.Scene.Proxies && !with("freeze")(p) && !with("replay")(p)
}

func later(p torture.Plan) bool { return p.Scene.Producers.Later > 0 }

func pausesOfWriters(p torture.Plan) bool { return p.Scene.Producers.Pauses && shortKeep(p) }

func smallPages(p torture.Plan) bool { return p.Scene.Relay.PageRows <= 50 }

func shortKeep(p torture.Plan) bool { return p.Scene.Relay.Keep < 1e9 }

// with reports whether a plan has a fault.
func with(kind string) func(torture.Plan) bool {
	return func(p torture.Plan) bool {
		for _, f := range p.Faults {
			if f.Kind == kind {
				return true
			}
		}
		return false
	}
}

func all(conditions ...func(torture.Plan) bool) func(torture.Plan) bool {
	return func(p torture.Plan) bool {
		for _, fits := range conditions {
			if !fits(p) {
				return false
			}
		}
		return true
	}
}
