package pipeline

import (
	"context"
	"math"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

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
