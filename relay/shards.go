package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// ErrUnknownRelay is returned by SetShards for a relay that never ran.
var ErrUnknownRelay = errors.New("no relay of this name ever ran on this outbox")

// ErrRelayRuns is returned by SetShards while a replica of the relay is alive or holds a lease.
// Nothing was changed. Remedy: stop the relays and try again. What a killed replica held ends by
// itself, after its Lease.
var ErrRelayRuns = errors.New("the number of shards changes only while no replica runs: stop the relays first")

// SetShards changes the number of shards of a relay, 1 to 256, and returns the number before. No
// replica of the relay may run: see ErrRelayRuns. Every new shard begins where the last of the old
// ones is, so rows that the others have published are published again, under the same IDs, also with
// ExactlyOnce: duplicates, never a loss, and the rows of a key stay in order. A dead row of these
// that an operator discarded is published, too. by.Who and by.Why are stored in operator_actions.
func SetShards(ctx context.Context, pool *pgxpool.Pool, by Operator, shards int16) (before int16, err error) {
	by, err = by.resolve()
	if shards < 1 || shards > shardsMax {
		err = errors.Join(err, fmt.Errorf("shards %d: want 1 to %d", shards, shardsMax))
	}
	if err != nil {
		return 0, err
	}
	in := func(sql string) string { return migrations.InSchema(sql, by.Schema) }
	// Read committed, whatever the role's default is: statements behind the locks must see what the
	// locks waited for.
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		// Whoever takes a lease waits for this lock, and then sees the new number.
		err := tx.QueryRow(ctx, in(lockRelaySQL), by.Relay).Scan(&before)
		if errors.Is(err, pgx.ErrNoRows) {
			return ErrUnknownRelay
		}
		if err != nil || before == shards {
			return err
		}
		if err := refuseRunning(ctx, tx, in(runningSQL), by.Relay); err != nil { // before it makes their renewals wait
			return err
		}
		if _, err := tx.Exec(ctx, in(lockProgressSQL), by.Relay); err != nil {
			return err
		}
		if err := refuseRunning(ctx, tx, in(runningSQL), by.Relay); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, in(positionsSQL), by.Relay)
		if err != nil {
			return err
		}
		old, err := pgx.CollectRows(rows, pgx.RowToStructByPos[position])
		if err != nil {
			return err
		}
		batch := &pgx.Batch{}
		if len(old) > 0 {
			begin, err := beginning(old, int(before))
			if err != nil {
				return err
			}
			batch.Queue(in(dropShardsSQL), by.Relay)
			batch.Queue(in(beginShardsSQL), by.Relay, shards, begin.Epoch, begin.System, begin.Timeline)
			batch.Queue(in(beginChainsSQL), by.Relay, shards, begin.Epoch, begin.Tick, begin.NextTick, begin.Seq, begin.Floor, begin.Published)
			batch.Queue(in(clearChainsSQL), by.Relay)
		}
		batch.Queue(in(setShardsSQL), by.Relay, shards)
		batch.Queue(in(noteShardsSQL), by.Relay, before, shards, by.Who, by.Why)
		return tx.SendBatch(ctx, batch).Close()
	})
	if pgerr.Is(err, pgerr.UniqueViolation) { // an old holder wrote progress meanwhile
		err = fmt.Errorf("%w: %w", ErrRelayRuns, err)
	}
	if err != nil {
		return before, fmt.Errorf("change the number of shards of relay %q: %w", by.Relay, err)
	}
	return before, nil
}

// refuseRunning returns an error that names the replicas that run.
func refuseRunning(ctx context.Context, tx pgx.Tx, sql, relay string) error {
	var owners []string
	if err := tx.QueryRow(ctx, sql, relay).Scan(&owners); err != nil {
		return err
	}
	if len(owners) > 0 {
		return fmt.Errorf("%w (%s)", ErrRelayRuns, strings.Join(owners, ", "))
	}
	return nil
}

// position is where a shard is, as stored.
type position struct {
	Tick, Seq        int64
	NextTick         *int64
	Floor            int64
	Epoch, Published int64
	System           *int64
	Timeline         *int32
	Snapshot         *string // of the tick; nil: the tick is missing
	SeqLast          *int64
}

// beginning returns where new shards begin: a position that every old shard has reached. Its epoch is
// later than all old ones, so that neither an old holder's statements nor its records in the progress
// topic count, and Published is the sum.
//
// One shard's position is taken as it is. Of several, the earliest tick is taken, without the part of
// the batch behind it that its shard has published: the other shards have other batches.
func beginning(old []position, shards int) (begin position, err error) {
	ticks := make([]*tick, len(old))
	for i, p := range old {
		if p.Snapshot == nil || p.SeqLast == nil {
			return begin, fmt.Errorf("tick %d is missing", p.Tick)
		}
		if ticks[i], err = newTick(*p.Snapshot, *p.SeqLast); err != nil {
			return begin, err
		}
	}
	first := slices.IndexFunc(ticks, func(t *tick) bool {
		return !slices.ContainsFunc(ticks, func(other *tick) bool { return !t.within(other) })
	})
	if first < 0 {
		return begin, errSeveralClusters
	}
	begin = old[first]
	if len(old) > 1 {
		begin.NextTick, begin.Seq = nil, 0
	}
	begin.Published = 0
	for _, p := range old {
		if deref(p.System) != deref(begin.System) {
			return begin, errSeveralClusters
		}
		if p.Timeline != nil && (begin.Timeline == nil || *p.Timeline > *begin.Timeline) {
			begin.Timeline = p.Timeline
		}
		begin.Floor, begin.Epoch = min(begin.Floor, p.Floor), max(begin.Epoch, p.Epoch)
		begin.Published += p.Published
	}
	begin.Epoch++
	if len(old) < shards { // a shard that was never leased has published nothing
		begin.Tick, begin.NextTick, begin.Seq, begin.Floor = 0, nil, 0, 0
	}
	return begin, nil
}

var errSeveralClusters = errors.New("the shards have progress of several database clusters: start the relay, wait until each shard has a holder (outbox-relay positions), stop it and try again")

// within reports whether all rows that count as published at a tick do so at another one of the same
// cluster. Of two snapshots of one server, the earlier one is within the later one.
func (t *tick) within(other *tick) bool {
	if t.xmax > other.xmax || t.snapshot == other.snapshot && t.seqLast > other.seqLast {
		return false
	}
	return !slices.ContainsFunc(other.xip, func(open string) bool {
		id, _ := parseXID(open)
		return id < t.xmax && !slices.Contains(t.xip, open)
	})
}
