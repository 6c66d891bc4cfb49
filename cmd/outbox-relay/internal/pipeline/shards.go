package pipeline

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

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
		s.tick, s.next, s.seq = nothingVisible, new(nothingVisible), s.Floor
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

// CountMax bounds what commands count: rows that wait for a relay, dead rows of a relay, parked
// messages of a consumer.
const CountMax = 100_000

// The parts in which waitingRows reads the rows that may wait, each of them once.
const (
	partFresh = 1 // of transactions that began behind the ticks
	partBatch = 2 // inside of a batch, behind what is published of it
	partLate  = 3 // of transactions that were open at a tick
)

// Count counts what waits for each of the shards. It reads at most limit rows of each part of a
// relay's rows, whatever their number and that of the shards; beyond, it estimates.
func Count(ctx context.Context, db operator.Querier, schema string, shards []Progress, limit int) error {
	return eachRelay(shards, func(shards []Progress) error {
		all, err := operator.Rows(ctx, db, "count waiting rows", schema, countSQL, pgx.RowToStructByPos[tally], waitingArgs(shards, limit)...)
		for i := range shards {
			shards[i].judge(all, int64(limit))
		}
		return err
	})
}

// tally is what a part holds of a shard.
type tally struct {
	Part          int
	Shard         int16
	Rows, Waiting int64
	Oldest        float64
	First, Last   int64 // the smallest seq of it, and the newest of the outbox
}

// judge sums up what waits. If its part has more rows than were read, the rest is taken from the
// distance to the end of the sequence, and the shard's share from the rows that were read.
func (s *Progress) judge(all []tally, limit int64) {
	part := partFresh
	if s.next != nil {
		part = partBatch
	}
	read, mine, late := int64(0), int64(0), int64(0)
	first, last := int64(math.MaxInt64), int64(0)
	s.Waiting, s.OldestWaitingSeconds = 0, 0
	for _, t := range all {
		switch t.Part {
		case part:
			read, first, last = read+t.Rows, min(first, t.First), t.Last
		case partLate:
			late += t.Rows
		}
		if t.Shard != s.Shard {
			continue
		}
		if t.Part == part {
			mine = t.Rows
		}
		s.Waiting += t.Waiting
		s.OldestWaitingSeconds = max(s.OldestWaitingSeconds, t.Oldest)
	}
	s.WaitingExact = read <= limit && late <= limit
	if read > limit {
		behind := float64(last - max(s.place(), first-1))
		s.Waiting = max(s.Waiting, int64(behind*float64(mine)/float64(read)))
	}
}

// Topics returns the topics of rows that wait, with the bytes of the largest one's key, payload and
// headers, from at most limit rows of each part.
func Topics(ctx context.Context, db operator.Querier, schema string, shards []Progress, limit int) (map[string]int64, error) {
	largest := map[string]int64{}
	err := eachRelay(shards, func(shards []Progress) error {
		var name string
		var bytes int64
		return operator.Each(ctx, db, "read topics of waiting rows", schema, topicsSQL, waitingArgs(shards, limit), []any{&name, &bytes}, func() error {
			largest[name] = max(largest[name], bytes)
			return nil
		})
	})
	return largest, err
}

func eachRelay(shards []Progress, work func([]Progress) error) error {
	for len(shards) > 0 {
		n := 1
		for n < len(shards) && shards[n].Relay == shards[0].Relay {
			n++
		}
		if err := work(shards[:n:n]); err != nil {
			return err
		}
		shards = shards[n:]
	}
	return nil
}

// waitingArgs returns the arguments of waitingRows for the shards of one relay.
func waitingArgs(shards []Progress, limit int) []any {
	low, open := uint64(math.MaxInt64), []string{}
	var batch *int64
	for i := range shards {
		s := &shards[i]
		end := s.tick
		if s.next != nil {
			end = *s.next
			if batch == nil || s.seq < *batch {
				batch = &s.seq
			}
		}
		fields := strings.Split(end, ":") // xmin:xmax:xip,xip
		if xmax, err := strconv.ParseUint(fields[1], 10, 64); err == nil {
			low = min(low, xmax)
		}
		if fields[2] != "" {
			open = append(open, strings.Split(fields[2], ",")...)
		}
	}
	return cutOf(shards).Args(strconv.FormatUint(low, 10), open, batch, limit+1)
}
