package torture

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/pause"
)

const (
	// StuckAfter is how long nothing may take effect while something is missing, behind the last fault.
	StuckAfter = time.Minute
	// quiet is how long effects that come twice are waited for.
	quiet = 2 * time.Second

	examplesMax = 8
)

// expectedSQL has a row for each effect that should be: of each order in the groups that read it, and of
// the children that two of them publish, in the third; but for what an operator discarded.
const expectedSQL = `WITH expected AS (
  SELECT w.consumer, w.source, o.id, o.key, o.habit FROM public.torture_orders AS o
  CROSS JOIN (VALUES ('torture-0', ''), ('torture-1', ''), ('torture-2', 'torture-0'), ('torture-2', 'torture-1')) AS w (consumer, source)
  WHERE NOT EXISTS (SELECT FROM public.torture_discarded AS d WHERE d.id = o.id AND (d.consumer = w.consumer AND d.source = w.source OR d.consumer = w.source))
) `

const missingSQL = expectedSQL + `SELECT * FROM expected AS w WHERE NOT EXISTS
  (SELECT FROM public.torture_effects AS e WHERE e.consumer = w.consumer AND e.source = w.source AND e.id = w.id)
  AND NOT EXISTS (SELECT FROM public.torture_overtaken AS o WHERE o.id = w.id AND o.source IN ('', w.source))`

const (
	countSQL      = `SELECT count(*) FROM `
	unfinishedSQL = `SELECT FROM effectonce.idempotency_keys WHERE state <> 'finished' UNION ALL SELECT FROM pg_prepared_xacts`
)

// drain waits until every order has its effects, and retries what is parked or dead as an operator does.
func (r *run) drain(ctx context.Context) {
	begun := time.Now()
	moved, before := begun, 0
	for ctx.Err() == nil {
		looked := time.Now()
		for _, sql := range []string{
			discardSQL + ` AND reason = 'conflict'` + discardedSQL, retryParkedSQL, retryDeadSQL, resumeHaltedSQL,
		} {
			statement(sql)(ctx, r, Fault{})
		}
		r.readLetters(ctx)
		n := 1
		for _, count := range r.rows(ctx, countSQL+`(SELECT FROM (`+missingSQL+`) AS missing UNION ALL (`+unfinishedSQL+`)) AS rest`) {
			_, _ = fmt.Sscan(count, &n)
		}
		r.report.DrainSeconds = math.Round(time.Since(begun).Seconds()*10) / 10
		switch {
		case n == 0:
			pause.For(ctx, quiet)
			return
		case n != before:
			moved, before = time.Now(), n
		case time.Since(moved) > StuckAfter:
			r.report.Stuck = n
			r.broken("%d effects are missing, or keys or transactions not finished, and none came for %v: %s", n, StuckAfter, examples(r.rows(ctx, missingSQL+` LIMIT 9`)))
			_ = pprof.Lookup("goroutine").WriteTo(r.Log, 1) // nothing can be done about an error
			for _, g := range r.groups {
				if r.kafka.Fake != nil {
					r.logger.Error("stuck", "group", fmt.Sprintf("%+v", r.kafka.Fake.GroupInfo(g.name)))
				}
			}
			return
		}
		pause.For(ctx, max(restartGap, 5*time.Since(looked))) // the more there is, the longer it takes to look
	}
}

// readLetters notes that the effects of dead letters are not expected any more.
func (r *run) readLetters(ctx context.Context) {
	polling, cancel := context.WithTimeout(ctx, restartGap)
	defer cancel()
	r.client.PollFetches(polling).EachRecord(func(record *kgo.Record) {
		of := slices.IndexFunc(record.Headers, func(h kgo.RecordHeader) bool { return h.Key == "kafka_dlt-original-consumer-group" })
		var e event
		err := json.Unmarshal(record.Value, &e)
		if err == nil {
			_, err = r.pool.Exec(ctx, `INSERT INTO public.torture_discarded VALUES ($1, $2, $3)`, string(record.Headers[of].Value), e.Source, e.ID)
		}
		if err != nil {
			r.broken("a dead letter cannot be read: %v", err)
		}
	})
}

// watch looks whether a position goes back more often than operators rewound its group.
func (r *run) watch(ctx context.Context) {
	last, back := map[string]int64{}, map[string]int{}
	for pause.For(ctx, restartGap) {
		rows, _ := r.pool.Query(ctx, `SELECT consumer_group, consumer_group || ' ' || topic || '/' || partition, next_offset FROM effectonce.consumer_positions
			WHERE next_offset IS NOT NULL AND NOT pg_is_in_recovery()`) // a standby shows the past until it has replayed everything
		var group, place string
		var next int64
		_, _ = pgx.ForEachRow(rows, []any{&group, &place, &next}, func() error { // a server that is down is asked again
			r.mu.Lock()
			rewound := r.rewound[group]
			r.mu.Unlock()
			if next < last[place] {
				back[place]++
			}
			if next < last[place] && back[place] > rewound {
				r.broken("position went back, %d times for %d orders: %s from %d to %d", back[place], rewound, place, last[place], next)
			}
			last[place] = next
			return nil
		})
	}
}

// judge compares what is left with what was ordered, once nothing runs any more.
func (r *run) judge(ctx context.Context) {
	kept := slices.DeleteFunc(slices.Clone(r.acknowledged), r.orderMayBeLost)
	r.logger.Info("judge: orders that a promotion may have lost", "orders", len(r.acknowledged)-len(kept))
	r.report.Lost = r.none(ctx, "order was acknowledged and is not stored",
		`SELECT a.id FROM unnest($1::bigint[]) AS a (id) WHERE NOT EXISTS (SELECT FROM public.torture_orders AS o WHERE o.id = a.id)`, kept)
	if r.report.Stuck == 0 {
		r.report.Lost += r.none(ctx, "effect is missing", missingSQL)
	}
	r.report.Doubled = r.none(ctx, "effect happened more than once",
		`SELECT consumer, source, id, count(*), min(at), max(at) FROM public.torture_effects GROUP BY consumer, source, id HAVING count(*) > 1`)
	for _, l := range r.losses { // some of these orders were published before, and their numbers of a key come again
		_ = r.rows(ctx, `DELETE FROM public.torture_effects AS e WHERE abs(id) > $1 AND abs(id) <= $2
			AND NOT EXISTS (SELECT FROM public.torture_orders AS o WHERE o.id = abs(e.id))`, l.ordersFrom, l.ordersTo)
	}
	r.report.Doubled += r.none(ctx, "effect was never ordered", expectedSQL+`SELECT consumer, source, id, at FROM public.torture_effects AS e
			WHERE NOT EXISTS (SELECT FROM expected AS w WHERE w.consumer = e.consumer AND w.source = e.source AND w.id = e.id)`)
	for i, g := range r.plan.Groups {
		ordered := func(i int) bool { return r.plan.Groups[i].ordered() }
		if r.plan.Scheduled || !g.ordered() || i == 2 && (!ordered(0) || !ordered(1)) {
			continue
		}
		r.report.OutOfOrder += r.none(ctx, "effect is out of the order of its key", `SELECT * FROM (
			SELECT source, key, id, version, lag(version) OVER (PARTITION BY source, key ORDER BY min(seq)) AS before FROM public.torture_effects
			WHERE consumer = $1 GROUP BY source, key, id, version
		) AS e WHERE version < before`, g.config.Group)
	}
	r.judgeRequests(ctx)
	r.none(ctx, "message stays parked", `SELECT consumer, topic, partition, "offset", state, reason, attempts, error FROM effectonce.parked_messages`)
	r.none(ctx, "row stays dead", `SELECT seq, topic, state, reason, error FROM effectonce.outbox_dead`)
	r.none(ctx, "lease stays behind", `SELECT relay, shard, owner FROM effectonce.outbox_progress WHERE owner IS NOT NULL AND lease_until > clock_timestamp()`)
	r.none(ctx, "session stays behind", `SELECT pid, application_name, state, query FROM pg_stat_activity WHERE application_name LIKE 'torture %'`)
	r.none(ctx, "prepared transaction stays behind", `SELECT gid FROM pg_prepared_xacts`)
	for _, count := range r.rows(ctx, countSQL+`public.torture_effects`) {
		_, _ = fmt.Sscan(count, &r.report.Messages)
	}
	if len(r.acknowledged) == 0 || r.report.Messages == 0 {
		r.broken("nothing was ordered, or nothing took effect: the run proves nothing")
	}
}

func (g GroupPlan) ordered() bool { return g.config.Order != consumer.OrderUnordered }

// none adds a problem if a query returns rows, and returns how many.
func (r *run) none(ctx context.Context, what, sql string, args ...any) int {
	found := r.rows(ctx, sql, args...)
	if len(found) > 0 {
		r.broken("%d times: %s: %s", len(found), what, examples(found))
	}
	return len(found)
}

// rows returns the rows of a query as text.
func (r *run) rows(ctx context.Context, sql string, args ...any) []string {
	rows, _ := r.pool.Query(ctx, sql, args...) // CollectRows returns its error
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		values, err := row.Values()
		return strings.Trim(fmt.Sprint(values), "[]"), err
	})
	if err != nil && ctx.Err() == nil {
		r.broken("the judge cannot read: %v", err)
	}
	return all
}

func examples(all []string) string {
	if len(all) > examplesMax {
		all = append(all[:examplesMax:examplesMax], "…")
	}
	return strings.Join(all, "; ")
}
