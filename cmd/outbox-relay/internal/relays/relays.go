// Package relays lists the relays that an outbox knows by name, and deletes one that never comes
// back: the outbox keeps every row that a known relay has not published.
package relays

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// Relay is one reader of the outbox.
type Relay struct {
	Relay     string    `json:"relay"`
	Shards    int16     `json:"shards"`
	Leased    int64     `json:"leased"`   // shards whose lease is live
	Replicas  int64     `json:"replicas"` // live ones
	Published int64     `json:"published"`
	Dead      int64     `json:"dead"` // rows in outbox_dead, at most DeadMax
	CreatedAt time.Time `json:"created_at"`
	// QuietSeconds is the time since a replica was last known to work; 0 while one does.
	QuietSeconds float64 `json:"quiet_seconds"`
}

// DeadMax bounds how many dead rows of a relay are counted.
const DeadMax = 100_000

// Live reports whether a replica of it runs, with a shard or in standby.
func (r *Relay) Live() bool { return r.Leased > 0 || r.Replicas > 0 }

// List returns every known relay, by name.
func List(ctx context.Context, db operator.Querier, schema string) ([]Relay, error) {
	return operator.Rows(ctx, db, "list relays", schema, listSQL, pgx.RowToStructByPos[Relay], DeadMax)
}

// Replica is a live process of a relay.
type Replica struct {
	Relay string `json:"relay"`
	Owner string `json:"owner"`
	// State is publishing, standing_by, kafka_away or stuck; empty: it does not say.
	State   string `json:"state"`
	Problem string `json:"problem"` // why its rows wait
}

// Away reports whether rows wait for the brokers or the receiver.
func (r Replica) Away() bool { return r.Problem != "" && !r.Stuck() }

// Stuck reports whether one of its shards hangs.
func (r Replica) Stuck() bool { return r.State == "stuck" }

// ReplicasMax bounds how many replicas are listed.
const ReplicasMax = 1000

// Replicas returns the live replicas of all relays.
func Replicas(ctx context.Context, db operator.Querier, schema string) ([]Replica, error) {
	return operator.Rows(ctx, db, "list replicas", schema, replicasSQL, pgx.RowToStructByPos[Replica], ReplicasMax)
}

// What prevents the deletion of a relay. Nothing was changed then.
var (
	ErrUnknown = errors.New("no relay has this name")
	ErrLive    = errors.New("replicas of this relay are running or standing by: stop all of them first")
	ErrDead    = errors.New("it has rows in outbox_dead, which no other relay publishes: decide on them first, with \"outbox-relay dead list\" and \"outbox-relay dead discard\"")
)

// Deleted is what was deleted. Rows that the relay has not published are not published, unless
// another relay publishes them.
type Deleted struct {
	Relay    string `json:"relay"`
	Shards   int64  `json:"shards"` // that had progress
	Paused   int64  `json:"paused_topics"`
	Replicas int64  `json:"replicas"` // dead ones that were still listed
}

// Delete deletes a relay, its progress and its pauses in one transaction, and records who did so.
// The database decides, with the relay locked, whether a replica is live: a replica that takes a
// shard waits for that lock, and a lease that is renewed at the same time keeps its row. An error
// means that nothing was changed, unless the connection broke during COMMIT; it is safe to repeat
// the call.
func Delete(ctx context.Context, db operator.Beginner, schema, relay string, by operator.By) (*Deleted, error) {
	in := func(sql string) string { return migrations.InSchema(sql, schema) }
	gone := &Deleted{Relay: relay}
	err := operator.Change(ctx, db, func(tx pgx.Tx, _ time.Time) error {
		locked, err := tx.Exec(ctx, in(lockSQL), relay)
		if err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, in(deleteSQL), relay).Scan(&gone.Shards, &gone.Paused, &gone.Replicas); err != nil {
			return err
		}
		var shards, replicas, dead bool
		if err := tx.QueryRow(ctx, in(leftSQL), relay).Scan(&shards, &replicas, &dead); err != nil {
			return err
		}
		switch {
		case locked.RowsAffected()+gone.Shards == 0 && !shards:
			return ErrUnknown
		case shards || replicas:
			return ErrLive
		case dead:
			return ErrDead
		}
		for _, sql := range []string{endChainsSQL, clearChainsSQL} {
			if _, err := tx.Exec(ctx, in(sql), relay); err != nil {
				return err
			}
		}
		return operator.Note(ctx, tx, schema, by, "relay.delete", map[string]any{"relay": relay, "shards": gone.Shards, "paused_topics": gone.Paused})
	})
	switch {
	case pgerr.Is(err, pgerr.UniqueViolation): // a holder wrote progress meanwhile
		return nil, fmt.Errorf("relay %q: %w", relay, ErrLive)
	case err != nil:
		return nil, fmt.Errorf("relay %q: %w", relay, err)
	}
	return gone, nil
}

// listSQL: a replica was last known to work when it renewed a lease, stored progress or reported
// that it is alive.
const listSQL = `-- relays.list
SELECT known.relay, coalesce(r.shards, 1), coalesce(p.leased, 0), coalesce(a.alive, 0), coalesce(p.published, 0)::bigint,
  (SELECT count(*) FROM (SELECT FROM effectonce.outbox_dead d WHERE d.relay = known.relay AND d.state IN ('held', 'behind', 'retry') LIMIT $1) bounded), coalesce(r.created_at, p.seen),
  greatest(extract(epoch FROM clock_timestamp() - greatest(r.created_at, p.seen, a.seen)), 0)::float8
FROM (SELECT relay FROM effectonce.outbox_relays UNION SELECT relay FROM effectonce.outbox_progress) known
LEFT JOIN effectonce.outbox_relays r ON r.relay = known.relay
LEFT JOIN (
  SELECT relay, count(*) FILTER (WHERE lease_until > clock_timestamp()) AS leased, pg_catalog.sum(published) AS published,
    pg_catalog.max(greatest(lease_until, updated_at)) AS seen
  FROM effectonce.outbox_progress_now GROUP BY relay
) p ON p.relay = known.relay
LEFT JOIN (
  SELECT relay, count(*) FILTER (WHERE alive_until > clock_timestamp()) AS alive, pg_catalog.max(alive_until) AS seen
  FROM effectonce.outbox_replicas GROUP BY relay
) a ON a.relay = known.relay
ORDER BY known.relay`

// replicasSQL lists the live processes, as they last described themselves.
const replicasSQL = `-- relays.replicas
SELECT relay, owner, coalesce(state, ''), coalesce(problem, '')
FROM effectonce.outbox_replicas WHERE alive_until > clock_timestamp() ORDER BY relay, owner LIMIT $1`

// lockSQL locks the row that a replica locks to take a shard or to change the number of shards.
const lockSQL = `-- relays.lock
SELECT FROM effectonce.outbox_relays WHERE relay = $1 FOR UPDATE`

// deleteSQL leaves live rows. If a row is being renewed, it waits and then checks the renewed row.
const deleteSQL = `-- relays.delete
WITH progress AS (
  DELETE FROM effectonce.outbox_progress WHERE relay = $1 AND (lease_until IS NULL OR lease_until < clock_timestamp()) RETURNING 1
), replicas AS (
  DELETE FROM effectonce.outbox_replicas WHERE relay = $1 AND alive_until < clock_timestamp() RETURNING 1
), paused AS (
  DELETE FROM effectonce.outbox_paused WHERE relay = $1 RETURNING 1
), dropped AS (
  UPDATE effectonce.outbox_dead SET state = 'discarded' WHERE relay = $1 AND state = 'discard'
), relay AS (
  DELETE FROM effectonce.outbox_relays WHERE relay = $1
)
SELECT (SELECT count(*) FROM progress), (SELECT count(*) FROM paused), (SELECT count(*) FROM replicas)`

// endChainsSQL ends the chains of progress: a holder that was frozen meanwhile finds its next number
// taken. clearChainsSQL leaves these ends.
const endChainsSQL = `-- relays.end_chains
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, seq, floor, published)
SELECT DISTINCT ON (shard) relay, shard, n + 1, -1, tick, seq, floor, published FROM effectonce.outbox_advances WHERE relay = $1 ORDER BY shard, n DESC`

const clearChainsSQL = `-- relays.clear_chains
DELETE FROM effectonce.outbox_advances WHERE relay = $1 AND epoch >= 0`

const leftSQL = `-- relays.left
SELECT EXISTS (SELECT FROM effectonce.outbox_progress WHERE relay = $1), EXISTS (SELECT FROM effectonce.outbox_replicas WHERE relay = $1),
  EXISTS (SELECT FROM effectonce.outbox_dead WHERE relay = $1 AND state IN ('held', 'behind', 'retry'))`
