package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Cut is what a relay has published at one moment: the progress of each of its shards. A row that
// is published in a Cut stays published.
type Cut struct {
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
	shards, err := Shards(ctx, db, schema, &relay)
	if err != nil {
		return nil, err
	}
	if !ran(shards) {
		return nil, fmt.Errorf("relay %q: %w", relay, ErrNeverRan)
	}
	return cutOf(shards), nil
}

// Cuts reads the progress of all relays that ever ran, by name.
func Cuts(ctx context.Context, db operator.Querier, schema string) (map[string]*Cut, error) {
	shards, err := Shards(ctx, db, schema, nil)
	if err != nil {
		return nil, err
	}
	cuts := map[string]*Cut{}
	return cuts, eachRelay(shards, func(shards []Progress) error {
		if ran(shards) {
			cuts[shards[0].Relay] = cutOf(shards)
		}
		return nil
	})
}

func ran(shards []Progress) bool {
	return slices.ContainsFunc(shards, func(p Progress) bool { return p.stored })
}

// cutOf takes all shards of a relay.
func cutOf(shards []Progress) *Cut {
	c := &Cut{}
	for i := range shards {
		s := &shards[i]
		c.count = s.shards
		c.shards, c.ticks, c.nexts = append(c.shards, s.Shard), append(c.ticks, s.tick), append(c.nexts, s.next)
		c.seqs, c.floors = append(c.seqs, s.seq), append(c.floors, s.Floor)
	}
	return c
}

// Args returns $1 to $6 of a statement with CutCTE and CutJoin, followed by more.
func (c *Cut) Args(more ...any) []any {
	return append([]any{c.shards, c.ticks, c.nexts, c.seqs, c.floors, c.count}, more...)
}
