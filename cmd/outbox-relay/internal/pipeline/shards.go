package pipeline

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Progress is that of one shard of a relay.
type Progress struct {
	Relay string `json:"relay"`
	Shard int16  `json:"shard"`
	// Owner is the replica that holds the lease; empty: none does.
	Owner            string   `json:"owner"`
	LeaseLeftSeconds float64  `json:"lease_left_seconds"`
	Epoch            int64    `json:"epoch"`
	Tick             int64    `json:"tick"`
	TickAgeSeconds   *float64 `json:"tick_age_seconds"` // null: it is at the beginning
	Floor            int64    `json:"floor"`
	Published        int64    `json:"published"`
	// Waiting counts committed rows that are not published yet, without dead ones, once Count has
	// counted. Where it is not exact, it is an estimate from the sequence that tends to be too high.
	Waiting      int64 `json:"waiting"`
	WaitingExact bool  `json:"waiting_exact"`
	// OldestWaitingSeconds is the age of the oldest of the rows that were counted; 0: none was.
	OldestWaitingSeconds float64 `json:"oldest_waiting_seconds"`

	// Moved: its progress belongs to another cluster (a dump was restored, or pg_upgrade ran), whose
	// transaction ids mean nothing here: only what is below the floor counts as published.
	Moved bool `json:"-"`
	// At is when this was read, in seconds of the database's clock.
	At float64 `json:"-"`

	shards  int32
	stored  bool // a replica has taken it
	tick    string
	seqLast int64   // every row with a transaction id from tick's xmax on has a higher seq
	next    *string // inside of a batch: its end
	seq     int64   // inside of a batch: everything in it up to there is published
}

// nothingVisible is a snapshot before every transaction.
const nothingVisible = "1:1:"

// Shards reads the progress of every shard of a relay (nil: of all relays), in the order of their
// names, also of shards that no replica has taken yet. A relay that never ran has none.
func Shards(ctx context.Context, db operator.Querier, schema string, relay *string) ([]Progress, error) {
	return operator.Rows(ctx, db, "read progress", schema, shardsSQL, scanProgress, relay)
}

func scanProgress(row pgx.CollectableRow) (s Progress, err error) {
	var tick *string
	var seqLast *int64
	var within bool
	err = row.Scan(&s.Relay, &s.Shard, &s.shards, &s.stored, &s.Owner, &s.LeaseLeftSeconds, &s.Epoch, &s.Tick, &s.TickAgeSeconds, &s.Floor, &s.Published,
		&tick, &seqLast, &within, &s.next, &s.seq, &s.Moved, &s.At)
	switch {
	case err != nil:
		return s, err
	case tick == nil || within && s.next == nil:
		return s, fmt.Errorf("tick %d of relay %q is missing from outbox_ticks: it was deleted by hand", s.Tick, s.Relay)
	}
	s.tick, s.seqLast = *tick, *seqLast
	if s.Moved {
		nothing := nothingVisible
		s.tick, s.next, s.seq = nothingVisible, &nothing, s.Floor
	}
	return s, nil
}

// ShardsOf reads the progress of the shards of one relay (empty: of all). If it never ran, the result
// has one shard all the same, for which every row waits; if none ever ran, of the relay "default".
func ShardsOf(ctx context.Context, db operator.Querier, schema, relay string) ([]Progress, error) {
	var named *string
	if relay != "" {
		named = &relay
	}
	all, err := Shards(ctx, db, schema, named)
	if err == nil && len(all) == 0 {
		all = []Progress{{Relay: cmp.Or(relay, "default"), shards: 1, tick: nothingVisible}}
	}
	return all, err
}

// place is the seq behind which its unpublished rows are, but for those of transactions that were
// open.
func (s *Progress) place() int64 {
	if s.next != nil {
		return s.seq
	}
	return s.seqLast
}

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
