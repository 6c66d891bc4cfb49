package inspect

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// nothingVisible is a snapshot before every transaction.
const nothingVisible = "1:1:"

// Cut is what a relay has published at one moment: the progress of each of its shards. A row that
// is published in a Cut stays published.
type Cut struct {
	Relay string
	// Moved: progress belongs to another cluster (a dump was restored), so only what is below the
	// floor counts.
	Moved bool

	count  int32 // of shards
	shards []int16
	ticks  []string
	nexts  []*string
	seqs   []int64
	floors []int64
}

// ErrNeverRan means that a relay has no progress: it has published nothing.
var ErrNeverRan = errors.New("the relay never ran: check the name in --relay")

// ReadCut reads the progress of a relay, or ErrNeverRan.
func ReadCut(ctx context.Context, db operator.Querier, schema, relay string) (*Cut, error) {
	c := &Cut{Relay: relay}
	// Not every role and service shows the system identifier.
	var system *int64
	if err := db.QueryRow(ctx, systemSQL).Scan(&system); err != nil {
		system = nil
	}
	if err := db.QueryRow(ctx, inSchema(shardsSQL, schema), relay).Scan(&c.count); err != nil {
		return nil, fmt.Errorf("read the number of shards: %w", err)
	}
	rows, err := db.Query(ctx, inSchema(cutSQL, schema), relay)
	if err != nil {
		return nil, fmt.Errorf("read progress: %w", err)
	}
	var shard int16
	var tick, next *string
	var hasNext bool
	var seq, floor int64
	var from *int64
	_, err = pgx.ForEachRow(rows, []any{&shard, &tick, &hasNext, &next, &seq, &floor, &from}, func() error {
		if tick == nil || hasNext && next == nil {
			return fmt.Errorf("a tick of relay %q is missing from outbox_ticks: it was deleted by hand", relay)
		}
		c.add(shard, *tick, next, seq, floor, from != nil && system != nil && *from != *system)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read progress: %w", err)
	}
	if len(c.shards) == 0 {
		return nil, fmt.Errorf("relay %q: %w", relay, ErrNeverRan)
	}
	return c, nil
}

func (c *Cut) add(shard int16, tick string, next *string, seq, floor int64, moved bool) {
	if moved {
		c.Moved, tick, next = true, nothingVisible, nil
	}
	c.shards, c.ticks, c.floors, c.seqs = append(c.shards, shard), append(c.ticks, tick), append(c.floors, floor), append(c.seqs, seq)
	if next != nil {
		text := *next // the caller scans into it again
		next = &text
	}
	c.nexts = append(c.nexts, next)
}

// Args returns $1 to $6 of a statement with CutCTE and CutJoin, followed by more.
func (c *Cut) Args(more ...any) []any {
	return append([]any{c.shards, c.ticks, c.nexts, c.seqs, c.floors, c.count}, more...)
}

func relays(ctx context.Context, db operator.Querier, schema string) ([]string, error) {
	rows, err := db.Query(ctx, inSchema(relaysSQL, schema))
	if err != nil {
		return nil, fmt.Errorf("read the relays: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read the relays: %w", err)
	}
	return all, nil
}
