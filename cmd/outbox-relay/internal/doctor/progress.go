package doctor

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// tick is a stored snapshot, as far as counting needs it. Transaction ids stay text: they are 64
// bits wide, and nothing computes with them.
type tick struct {
	seqLast int64 // every row with a transaction id from xmax on has a higher seq
	xmax    string
	xip     []string
}

// beginning is tick 0: nothing is visible in it.
func beginning() tick { return tick{xmax: "1"} }

// Progress is the progress of one relay, at one moment of the database's clock.
type Progress struct {
	relay     string
	shard     int16
	shards    int16
	owner     string
	leaseLeft float64
	epoch     int64
	published int64
	tick      int64
	floor     int64
	seq       int64 // 0 unless a batch takes several pages
	from      tick
	next      tick
	system    *int64
	at        float64
}

// ReadProgress reads the progress of every relay of the schema. A relay that never ran has no
// entry.
func ReadProgress(ctx context.Context, db operator.Querier, schema string) ([]Progress, error) {
	rows, err := db.Query(ctx, inSchema(progressSQL, schema))
	if err != nil {
		return nil, fmt.Errorf("read progress: %w", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Progress, error) {
		var p Progress
		var fromLast *int64
		var fromMax, nextMax *string
		err := row.Scan(&p.relay, &p.shard, &p.owner, &p.leaseLeft, &p.epoch, &p.published, &p.tick, &p.floor, &p.seq,
			&fromLast, &fromMax, &p.from.xip, &nextMax, &p.next.xip, &p.system, &p.at, &p.shards)
		if err != nil {
			return p, err
		}
		if fromLast == nil {
			return p, fmt.Errorf("tick %d of relay %q is missing from outbox_ticks: it was deleted by hand", p.tick, p.relay)
		}
		p.from.seqLast, p.from.xmax = *fromLast, *fromMax
		p.next.xmax = p.from.xmax
		if nextMax != nil {
			p.next.xmax = *nextMax
		}
		return p, nil
	})
	if err != nil {
		return nil, fmt.Errorf("read progress: %w", err)
	}
	return all, nil
}

// waitingRange has the parameters of waitingRows.
type waitingRange struct {
	above    int64  // $1
	xmax     string // $2
	floor    int64  // $3
	seq      int64  // $4
	nextXmax string // $5
	// Transactions that a tick names as open, and the ranges of seq in which their rows wait.
	open     []string
	openLow  []int64
	openHigh []int64

	shards, shard int16
}

// waiting returns where the rows are that p has not published.
func (p *Progress) waiting() waitingRange {
	r := waitingRange{
		above: max(p.from.seqLast, p.floor, p.seq), xmax: p.from.xmax,
		floor: p.floor, seq: p.seq, nextXmax: p.next.xmax,
		shards: p.shards, shard: p.shard, open: []string{}, openLow: []int64{}, openHigh: []int64{},
	}
	add := func(txid string, low, high int64) {
		r.open, r.openLow, r.openHigh = append(r.open, txid), append(r.openLow, low), append(r.openHigh, high)
	}
	for _, txid := range p.from.xip {
		if p.seq > 0 && !slices.Contains(p.next.xip, txid) {
			add(txid, max(p.floor, p.seq), math.MaxInt64) // it ended before the next tick
		} else {
			add(txid, p.floor, math.MaxInt64)
		}
	}
	for _, txid := range p.next.xip {
		if !slices.Contains(p.from.xip, txid) {
			// Its id is not below the tick's xmax: above seq that finds it
			add(txid, p.floor, p.seq)
		}
	}
	return r
}

func (r waitingRange) args(limit int) []any {
	return []any{r.above, r.xmax, r.floor, r.seq, r.nextXmax, r.open, r.openLow, r.openHigh, limit, r.shards, r.shard}
}

// moved reports whether the cursor belongs to another cluster: a dump was restored, or pg_upgrade
// ran. Its transaction ids mean nothing then, and the relay publishes everything above the floor
// again.
func (p *Progress) moved(system *int64) bool {
	return p.system != nil && system != nil && *p.system != *system
}

// aboveFloor replaces a cursor that has no meaning in this cluster.
func (p *Progress) aboveFloor() {
	p.from, p.next, p.seq = beginning(), beginning(), 0
}

// systemIdentifier returns nil if the role or the service does not show it.
func systemIdentifier(ctx context.Context, db operator.Querier) *int64 {
	var system *int64
	if err := db.QueryRow(ctx, systemSQL).Scan(&system); err != nil {
		return nil
	}
	return system
}
