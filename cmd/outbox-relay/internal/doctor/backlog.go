package doctor

import (
	"context"
	"fmt"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Backlog is what a relay has not published yet, without dead rows.
type Backlog struct {
	// Waiting is exact up to the limit of the count. Above it, it is an estimate from the sequence
	// that tends to be too high.
	Waiting       int64
	Exact         bool
	OldestSeconds float64 // 0: nothing waits
}

// ReadBacklog counts the rows that wait for a relay, up to countMax rows of each shard. If the
// relay never ran, every row waits. system is from SystemIdentifier.
func ReadBacklog(ctx context.Context, db operator.Querier, schema, relay string, system *int64, countMax int) (Backlog, error) {
	all, err := ReadProgress(ctx, db, schema)
	if err != nil {
		return Backlog{}, err
	}
	sum := Backlog{Exact: true}
	for _, p := range named(all, relay) {
		if p.moved(system) {
			p.aboveFloor()
		}
		b, err := p.backlog(ctx, db, schema, countMax)
		if err != nil {
			return Backlog{}, err
		}
		sum.Waiting += b.Waiting
		sum.Exact = sum.Exact && b.Exact
		sum.OldestSeconds = max(sum.OldestSeconds, b.OldestSeconds)
	}
	return sum, nil
}

// SystemIdentifier returns nil if the role or the service does not show it. Do not call it inside a
// transaction: a refusal would abort that transaction.
func SystemIdentifier(ctx context.Context, db operator.Querier) *int64 {
	return systemIdentifier(ctx, db)
}

func (p *Progress) backlog(ctx context.Context, db operator.Querier, schema string, countMax int) (Backlog, error) {
	var b Backlog
	var first, last int64
	waiting := p.waiting()
	err := db.QueryRow(ctx, inSchema(countSQL, schema), waiting.args(countMax+1)...).
		Scan(&b.Waiting, &b.OldestSeconds, &first, &last)
	if err != nil {
		return b, fmt.Errorf("count waiting rows: %w", err)
	}
	b.Exact = b.Waiting <= int64(countMax)
	if !b.Exact {
		b.Waiting = max(b.Waiting, last-max(waiting.above, first-1))
	}
	return b, nil
}
