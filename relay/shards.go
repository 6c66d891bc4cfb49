package relay

import (
	"context"
	"errors"
	"fmt"
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
// replica of the relay may run: see ErrRelayRuns. Every new shard begins at the lowest floor of the
// old ones (see recover.go), so rows above it that were published are published again, under the same
// IDs, also with ExactlyOnce: duplicates, never a loss, and the rows of a key stay in order. by.Who
// and by.Why are stored in operator_actions.
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
		if _, err := tx.Exec(ctx, in(lockProgressSQL), by.Relay); err != nil {
			return err
		}
		var owners []string
		if err := tx.QueryRow(ctx, in(runningSQL), by.Relay).Scan(&owners); err != nil {
			return err
		}
		if len(owners) > 0 {
			return fmt.Errorf("%w (%s)", ErrRelayRuns, strings.Join(owners, ", "))
		}
		var old, floor, epoch, published int64
		var system *int64
		var timeline *int32
		if err := tx.QueryRow(ctx, in(oldShardsSQL), by.Relay, before).Scan(&old, &floor, &epoch, &published, &system, &timeline); err != nil {
			return err
		}
		batch := &pgx.Batch{}
		if old > 0 {
			batch.Queue(in(dropShardsSQL), by.Relay)
			batch.Queue(in(beginShardsSQL), by.Relay, shards, epoch, system, timeline)
			batch.Queue(in(beginChainsSQL), by.Relay, shards, epoch, floor, published)
		}
		batch.Queue(in(setShardsSQL), by.Relay, before, shards, by.Who, by.Why)
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
