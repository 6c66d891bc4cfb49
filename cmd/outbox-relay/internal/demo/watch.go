package demo

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pause"
)

const countsSQL = `-- demo.counts
SELECT (SELECT count(*) FROM shop.orders), (SELECT count(DISTINCT order_id) FROM shop.effects)`

// unreadySQL counts the partitions, and the relay, that have no owner yet.
const unreadySQL = `-- demo.unready
SELECT greatest($1::bigint - (SELECT count(*) FROM shop.consumer_positions), 0)
  + (SELECT count(*) FROM (VALUES (1)) AS one WHERE NOT EXISTS (SELECT FROM shop.outbox_progress WHERE owner IS NOT NULL))`

// behindSQL compares what the consumers stored in their transactions with the ends of the
// partitions.
const behindSQL = `-- demo.behind
SELECT coalesce(sum(ends.next - coalesce(p.next_offset, 0)), 0)::bigint
FROM unnest($3::int[], $4::bigint[]) AS ends (partition, next)
LEFT JOIN shop.consumer_positions p ON p.consumer_group = $1 AND p.topic = $2 AND p.partition = ends.partition
WHERE ends.next > coalesce(p.next_offset, 0)`

// stallMax is how long a wait continues without progress. It is longer than a session, a rebalance,
// a lease and a lock timeout together can block progress. When it is over, the checker reports what
// is missing.
const stallMax = 25 * time.Second

// pollEvery is how often the database is queried during a wait.
const pollEvery = 200 * time.Millisecond

// counts are the numbers in the database.
type counts struct{ orders, effects int }

func readCounts(ctx context.Context, conn *pgx.Conn, j job) (counts, error) {
	var c counts
	if err := conn.QueryRow(ctx, inShop(countsSQL, j.Schema)).Scan(&c.orders, &c.effects); err != nil {
		return c, fmt.Errorf("count orders and effects: %w", err)
	}
	return c, nil
}

// until calls ask repeatedly. It ends when ask returns 0, or when its result has not decreased for
// stallMax, which is no error.
func (r *run) until(ctx context.Context, phase string, ask func() (int64, error)) error {
	r.phase = phase
	least, since := int64(-1), time.Now()
	for {
		left, err := ask()
		if err != nil {
			return err
		}
		if least < 0 || left < least {
			least, since = left, time.Now()
		}
		r.report()
		if left <= 0 || time.Since(since) > stallMax {
			return nil
		}
		if err := r.nudge(ctx, since); err != nil {
			return err
		}
		select {
		case err := <-r.fleet.failed:
			return err
		case err := <-r.trouble:
			return err
		default:
		}
		if !pause.For(ctx, pollEvery) {
			return ctx.Err()
		}
	}
}

// nudge restarts a consumer, once, if there was no progress for longer than a rebalance takes. Only
// kfake needs it: a member that is killed while its join request waits for an answer gets its share
// of the partitions but no session timer, and stays until the next rebalance. Kafka's brokers have
// no such members; there, a group without progress is left as it is, and the checker finds it.
func (r *run) nudge(ctx context.Context, since time.Time) error {
	if !r.fake || !r.calm || r.nudged || time.Since(since) < 3*r.Session {
		return nil
	}
	r.nudged = true
	p := r.fleet.of(roleConsumer)[0]
	r.note(fmt.Errorf("no progress for %v: kfake kept a member that was killed, so %s was restarted to force a rebalance", 3*r.Session, p.job.Name))
	return p.restart(ctx, consumerStopMax)
}
