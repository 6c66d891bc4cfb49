package mutants

import (
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

func consumerMutants() []Mutant { //nolint:funlen // data
	return []Mutant{
		{
			Name: "claim-does-not-count", File: "consumer/choose.go",
			Old:   `case !c.fresh[i]:`,
			New:   `case !c.fresh[i] && c.conflicts != nil && c.conflicts[i]:`,
			What:  "messages that were claimed before are handled again",
			Check: "doubled",
		},
		{
			Name: "claim-before-transaction", File: "consumer/batch.go",
			Old:   `claim := e.claim(batch, w)`,
			New:   "own := &pgx.Batch{}\n\t\tclaim := e.claim(own, w)\n\t\t_ = e.pool.SendBatch(context.Background(), own).Close()",
			What:  "claims are committed before the effects, in a transaction of their own",
			Check: "lost", Fits: group(byID),
		},
		{
			Name: "position-before-transaction", File: "consumer/batch.go",
			Old: `claimed, err := e.begin(ctx, t, w)`,
			New: `if last := w.msgs[len(w.msgs)-1]; !w.released() && !w.apart {
		_, _ = e.pool.Exec(ctx, e.sql.advance, e.cfg.Group, w.pos.topic, w.pos.partition, w.pos.epoch, w.pos.stored, last.next(), last.Time)
	}
	claimed, err := e.begin(ctx, t, w)`,
			What:  "the position is committed before the effects",
			Check: "lost", Fits: group(inPartition),
		},
		{
			Name: "position-past-open-worker", File: "consumer/tracker.go",
			Old:   "return t.passed\n",
			New:   "if n := len(t.open); n > 0 {\n\t\treturn passed{t.open[n-1].behind, t.open[n-1].at}\n\t}\n\treturn t.passed\n",
			What:  "the position moves past messages that workers have not finished",
			Check: "lost", Fits: group(workers),
		},
		{
			Name: "advance-ignores-epoch", File: "migrations/0002_consumer.up.sql",
			Old:   "AND partition = p_partition AND epoch = p_epoch\n    AND (p_known IS NULL OR next_offset >= p_known)\n  RETURNING",
			New:   "AND partition = p_partition\n  RETURNING",
			What:  "a holder that lost its partition advances the position",
			Check: "doubled", Fits: group(byPosition),
		},
		{
			Name: "check-ignores-epoch", File: "migrations/0005_promise.up.sql",
			Old:   "AND partition = p_partition AND epoch = p_epoch\n    AND (p_known IS NULL OR next_offset >= p_known)\n  FOR SHARE",
			New:   "AND partition = p_partition\n  FOR SHARE",
			What:  "workers of a holder that lost its partition commit effects and parking",
			Check: "out_of_order", Fits: all(group(workers, ordered), mild),
		},
		{
			Name: "position-starts-over", File: "consumer/batch.go",
			Old:   `fresh[i] = w.pos.stored == nil || msg.Offset >= *w.pos.stored`,
			New:   `fresh[i] = msg != nil`,
			What:  "by position, messages before the stored position are handled",
			Check: "doubled", Fits: all(group(byPosition), proxied),
		},
		{
			Name: "unanswered-commit-runs-again", File: "consumer/lane.go",
			Old:   `if l.engine.cfg.Dedup == DedupByPosition && f.origin == originCommit {`,
			New:   `if l.engine.cfg.Dedup == DedupByPosition && f.origin == originCommit && waits > 1<<30 {`,
			What:  "by position, a batch whose COMMIT was not answered is handled again without a look",
			Check: "doubled", Fits: all(group(byPosition), proxied),
		},
		{
			Name: "position-follows-kafka", File: "consumer/start.go",
			Old:   `d.why = "resumes at the stored position; Kafka's offset lags behind it"`,
			New:   `d.at, d.next, d.why = committed.offset, &committed.offset, "resumes at Kafka's offset"`,
			What:  "a takeover sets the stored position back to Kafka's offset",
			Check: "backwards",
		},
		{
			Name: "release-opens-other-keys", File: "consumer/queries.go",
			Old:   `AND n.partition = $3 AND sha256(n.key) = due.hash AND n.seq > due.seq`,
			New:   `AND n.partition = $3 AND n.seq > due.seq`,
			What:  "handing one parked key back releases what waits behind other keys, too",
			Check: "out_of_order", Fits: all(group(ordered, parks), mild, with("retry-parked")),
		},
		{
			Name: "parked-key-holds-nothing", File: "consumer/choose.go",
			Old:   `behind := msg.row == 0 && (holds(c.held, msg.Key) || holds(s.keys, msg.Key))`,
			New:   `behind := msg.row < 0`,
			What:  "later messages of a parked key are handled",
			Check: "out_of_order", Fits: all(group(ordered, parks), mild),
		},
		{
			Name: "held-keys-forgotten-at-takeover", File: "consumer/release.go",
			Old:   `return l.loadHeld(parent)`,
			New:   `return nil`,
			What:  "a new holder does not know which keys are parked",
			Check: "out_of_order", Fits: all(group(ordered, parks), mild),
		},
		{
			Name: "held-key-freed-at-once", File: "consumer/park.go",
			Old:   `if !still && !again {`,
			New:   `if (still || !still) && !again {`,
			What:  "a parked key is free as soon as one message was parked behind it",
			Check: "out_of_order", Fits: all(group(ordered, parks), mild),
		},
		{
			Name: "parking-apart", File: "consumer/batch.go",
			Old:   `e.queuePark(batch, w.consumer, s)`,
			New:   "own := &pgx.Batch{}\n\t\t\te.queuePark(own, w.consumer, s)\n\t\t\t_ = e.pool.SendBatch(ctx, own).Close()",
			What:  "parked messages are stored in a transaction of their own, before the claim",
			Check: "doubled", Fits: all(group(parks), mild),
		},
		{
			Name: "parking-fails", File: "consumer/queries.go",
			Old:   `ON CONFLICT (consumer, topic, partition, "offset", message_id) DO NOTHING` + "`",
			New:   `ON CONFLICT (consumer, topic, partition, message_id) DO NOTHING` + "`",
			What:  "a message cannot be parked, and blocks its partition",
			Check: "stuck", Fits: all(group(parks), mild),
		},
		{
			Name: "released-is-not-removed", File: "consumer/queries.go",
			Old:   `DELETE FROM effectonce.parked_messages WHERE seq = ANY ($1::bigint[])` + "`",
			New:   `DELETE FROM effectonce.parked_messages WHERE seq = ANY ($1::bigint[]) AND seq % 2 = 0` + "`",
			What:  "a parked message that was handled stays parked",
			Check: "doubled", Fits: all(group(parks), mild),
		},
		{
			Name: "half-skips-one", File: "consumer/lane.go",
			Old:   `waits, losses, msgs = 0, 0, msgs[half:]`,
			New:   `waits, losses, msgs = 0, 0, msgs[min(half+1, len(msgs)):]`,
			What:  "a message between two halves of a batch is skipped",
			Check: "lost", Fits: all(group(batches), mild),
		},
		{
			Name: "culprit-skipped", File: "consumer/lane.go",
			Old:   `msgs = msgs[at:]`,
			New:   `msgs = msgs[min(at+1, len(msgs)-1):]`,
			What:  "a message that fails is skipped",
			Check: "lost", Fits: mild,
		},
		{
			Name: "old-fetch-counts", File: "consumer/session.go",
			Old:   `case p.during >= poll:`,
			New:   `case p.during >= poll && poll == 0:`,
			What:  "records that were fetched before a partition was taken over again count, and those before them are skipped",
			Check: "lost", Fits: with("move-back"),
			Lacks: "orders to resume elsewhere while a fetch of that partition is on its way, again and again: the window is microseconds",
		},
		{
			Name: "two-workers-on-a-key", File: "consumer/lines.go",
			Old:   "from.taken = true\n",
			New:   "from.taken = false\n",
			What:  "two workers have messages of one key",
			Check: "out_of_order", Fits: group(workers, ordered),
		},
		{
			Name: "no-limit-for-handlers", File: "consumer/attempt.go",
			Old:   `limit := time.NewTimer(e.cfg.HandlerTimeout)`,
			New:   `limit := time.NewTimer(1 << 60)`,
			What:  "a handler that hangs is not ended",
			Check: "stuck", Fits: troubled,
		},
		{
			Name: "one-call-key-for-all-groups", File: "consumer/message.go",
			Old:   `return m.secrets.CallKey(m.scope, m.ID, step, m.Time)`,
			New:   `return m.secrets.CallKey("consumer", m.ID, step, m.Time)`,
			What:  "two consumers call the foreign system under one key for one message",
			Check: "lost", Fits: group(calls),
		},
		{
			Name: "call-key-of-attempt", File: "consumer/message.go",
			Old:   `return m.secrets.CallKey(m.scope, m.ID, step, m.Time)`,
			New:   `return m.secrets.CallKey(m.scope, m.ID, step+fmt.Sprint(m.attempts), m.Time)`,
			What:  "the key of a foreign call differs at a retry",
			Check: "doubled", Fits: group(calls),
		},
		{
			Name: "call-key-of-release", File: "consumer/message.go",
			Old:   `return m.secrets.CallKey(m.scope, m.ID, step, m.Time)`,
			New:   `return m.secrets.CallKey(m.scope, m.ID, step+m.released.String(), m.Time)`,
			What:  "the key of a foreign call differs once the message was parked",
			Check: "doubled", Fits: all(group(calls, parks), mild),
		},
		{
			Name: "call-key-of-partition-time", File: "consumer/message.go",
			Old:   `return m.secrets.CallKey(m.scope, m.ID, step, m.Time)`,
			New:   `return m.secrets.CallKey(m.scope, m.ID, step+m.Time.String(), m.Time)`,
			What:  "the key of a foreign call depends on the record's time, which a copy does not share",
			Check: "doubled", Fits: group(calls),
		},
		{
			Name: "child-id-is-random", File: "consumer/tx.go",
			Old:   `m.ID = v.msg.publishID("publish:"+strconv.Itoa(v.msg.published), !m.DeliverAt.IsZero())`,
			New:   "m.ID = uuid.Must(uuid.NewV7())\n\t\t\t_ = strconv.Itoa(v.msg.published)",
			What:  "children get IDs that a second execution does not repeat",
			Check: "doubled", Fits: group(children),
		},
		{
			Name: "publish-at-once", File: "consumer/tx.go",
			Old:   `v.collected = append(v.collected, collected{outbox: o, msgs: derived, index: index})`,
			New:   "_ = index\n\tbatch := &pgx.Batch{}\n\tif err := o.Queue(context.Background(), batch, derived...); err != nil {\n\t\treturn err\n\t}\n\treturn v.conn.SendBatch(context.Background(), batch).Close()",
			What:  "a handler's messages get their numbers before its later locks",
			Check: "out_of_order", Fits: group(journals, inPartition),
		},
		{
			Name: "savepoint-keeps-messages", File: "consumer/tx.go",
			Old:   `s.view.collected = s.view.collected[:s.collected]`,
			New:   `s.view.collected = s.view.collected[:len(s.view.collected)]`,
			What:  "messages that were published in a savepoint that was rolled back are published",
			Check: "phantoms", Fits: group(singleParents),
		},
		{
			Name: "released-not-claimed", File: "consumer/release.go",
			Old:   `if e.cfg.Dedup == DedupByID || e.cfg.Dedup == DedupByIDAndPayload {`,
			New:   `if e.cfg.Dedup == DedupByID && len(w.msgs) == 0 {`,
			What:  "released messages are not claimed again after their claims were forgotten",
			Check: "doubled", Fits: all(group(parks), troubled),
			Lacks: "a short dedup window with forgetting while messages are parked, and copies after their release",
		},
		{
			Name: "large-parked-never-leaves", File: "consumer/queries.go",
			Old:   `(c.n = 1 OR c.n <= $4 AND c.bytes <= $5)`,
			New:   `(c.n <= $4 AND c.bytes <= least($5, 16000))`,
			What:  "a parked message larger than the limit of a release is never released",
			Check: "stuck", Fits: all(group(parks), mild),
		},
		{
			Name: "expiry-by-own-clock", File: "consumer/choose.go",
			Old:   "if forgotten.IsZero() {\n\t\treturn nil\n\t}",
			New:   "if forgotten.IsZero() {\n\t\tforgotten = time.Now().Add(-7 * 24 * time.Hour)\n\t}",
			What:  "whether a message is expired is decided by the program's clock",
			Check: "unsettled",
			Lacks: "a process whose clock is days ahead (faketime), or messages older than the window",
		},
		{
			Name: "conflict-ignored", File: "dedup/claim.go",
			Old:   `result.conflicts[at-1] = true`,
			New:   `result.conflicts[at-1] = false`,
			What:  "a message with the ID of another one is dropped as its duplicate",
			Check: "lost", Fits: all(group(byContent), with("conflict")),
		},
		{
			Name: "claims-of-all-consumers", File: "dedup/queries.go",
			Old:   "SELECT id, $2 FROM pg_catalog.unnest($1::uuid[]) AS id\nON CONFLICT DO NOTHING\nRETURNING message_id`\n\n// copySQL",
			New:   "SELECT id, least($2, 1) FROM pg_catalog.unnest($1::uuid[]) AS id\nON CONFLICT DO NOTHING\nRETURNING message_id`\n\n// copySQL",
			What:  "what one consumer claimed is a duplicate for all others",
			Check: "lost", Fits: twoByID,
		},
		{
			Name: "hashes-without-scope", File: "dedup/id.go",
			Old:   "\thash.Write(length[:])\n\thash.Write([]byte(scope))\n\thash.Write(raw)",
			New:   "\thash.Write(length[:])\n\thash.Write(raw)",
			What:  "IDs that are hashed are the same in all topics",
			Check: "lost",
			Lacks: "messages whose IDs are no UUIDv7, in several topics of one group",
		},
		{
			Name: "conflicts-are-attempts", File: "consumer/lane.go",
			Old:   `pgerr.Deadlock) && msg.conflicts < conflictsMax {`,
			New:   `pgerr.Deadlock) && msg.conflicts < -conflictsMax {`,
			What:  "deadlocks and serialization failures of a handler are counted as attempts",
			Check: "lost", Fits: group(deadLetters, serializable),
		},
		{
			Name: "own-errors-are-the-message's", File: "consumer/failure.go",
			Old:   `{"any other failure of the engine", []origin{originEngine}, always, verdictWait},`,
			New:   `{"any other failure of the engine", []origin{originEngine}, always, verdictPark},`,
			What:  "a message is parked or dead-lettered because of an error of the engine's own statements",
			Check: "lost", Fits: group(deadLetters),
		},
		{
			Name: "panic-ends-the-process", File: "consumer/handler.go",
			Old:   `if v := recover(); v != nil {`,
			New:   `if v := any(nil); v != nil {`,
			What:  "a handler that panics ends its process",
			Check: "stuck", Fits: all(troubled, wild),
		},
		{
			Name: "dead-letter-dropped", File: "consumer/deadletter.go",
			Old:   `err = e.outbox.Queue(ctx, batch, e.deadLetter(msg, s.why[i]))`,
			New:   `err = e.outbox.Queue(ctx, &pgx.Batch{}, e.deadLetter(msg, s.why[i]))`,
			What:  "a message is given up without a dead letter",
			Check: "lost", Fits: all(group(deadLetters), mild),
		},
		{
			Name: "password-is-logged", File: "consumer/consumer.go",
			Old:   "cfg.Logger.InfoContext(ctx, \"consumer started\", attrs...)",
			New:   "cfg.Logger.InfoContext(ctx, \"consumer started\", append(attrs, \"database\", c.engine.pool.Config().ConnString())...)",
			What:  "the connection string is logged, with its password",
			Check: "leaked",
		},
		{
			Name: "rewind-by-offsets-ignored", File: "consumer/start.go",
			Old:   `d.at = max(committed.offset, k.log.first)`,
			New:   `d.at = stored`,
			What:  "an operator's rewind by Kafka's offsets is ignored",
			Check: "lost", Fits: with("rewind-offsets"),
		},
		{
			Name: "order-to-resume-ignored", File: "consumer/start.go",
			Old:   `case k.row.resumeAt != nil && (*k.row.resumeAt < 0 || !k.recreated()):`,
			New:   `case k.row.resumeAt != nil && *k.row.resumeAt < -2:`,
			What:  "an operator's order to resume elsewhere is removed without being carried out",
			Check: "unsettled", Fits: with("move-back"),
		},
		{
			Name: "promoted-key-waits", File: "migrations/0005_promise.up.sql",
			Old:   `FROM first WHERE p.seq = first.seq AND p.state = 'behind';`,
			New:   `FROM first WHERE p.seq = first.seq AND p.state = 'parked';`,
			What:  "messages behind a parked one are not released when it goes",
			Check: "stuck", Fits: all(group(ordered, parks), mild),
		},
		{
			Name: "fence-takes-equal", File: "dedup/fence_queries.go",
			Old:   "WHERE f.version < excluded.version",
			New:   "WHERE f.version <= excluded.version",
			What:  "a fence lets the same version through twice",
			Check: "doubled", Fits: group(fences),
		},
	}
}

// group reports whether a plan has a group that fits all conditions.
func group(conditions ...func(scene.Group) bool) func(torture.Plan) bool {
	return func(p torture.Plan) bool {
		for _, g := range p.Scene.Groups {
			fits := true
			for _, condition := range conditions {
				fits = fits && condition(g)
			}
			if fits {
				return true
			}
		}
		return false
	}
}

func byID(g scene.Group) bool { return g.Dedup != "position" }

func byPosition(g scene.Group) bool { return g.Dedup == "position" }

func inPartition(g scene.Group) bool { return g.Order == "partition" }

func workers(g scene.Group) bool { return g.Order != "partition" }

func ordered(g scene.Group) bool { return g.Order != "none" && g.Parent == 0 }

func parks(g scene.Group) bool { return !g.DeadLetter && g.Parent == 0 }

func batches(g scene.Group) bool { return g.Shape == scene.ShapeBatch && g.Parent == 0 }

func byContent(g scene.Group) bool { return g.Dedup == "payload" && g.Parent == 0 }

func deadLetters(g scene.Group) bool { return g.DeadLetter && g.Parent == 0 }

func serializable(g scene.Group) bool { return g.Isolation == "serializable" && g.AttemptsMax == 1 }

func journals(g scene.Group) bool { return g.Journal }

func fences(g scene.Group) bool { return g.Fences }

func singleParents(g scene.Group) bool { return g.Children && g.Shape == scene.ShapeEach }

func calls(g scene.Group) bool { return g.Calls }

func children(g scene.Group) bool { return g.Children && g.Shape != scene.ShapeBatch }

func twoByID(p torture.Plan) bool {
	n := 0
	for _, g := range p.Scene.Groups {
		if g.Dedup == "id" && !g.Forever && g.Parent == 0 {
			n++
		}
	}
	return n > 1
}

// mild: many messages are sick.
func mild(p torture.Plan) bool { return p.Scene.Mild }

func wild(p torture.Plan) bool { return !p.Scene.Mild }

func troubled(p torture.Plan) bool { return p.Scene.Trouble >= 300 }
