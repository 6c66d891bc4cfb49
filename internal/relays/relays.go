// Package relays lists the relays that an outbox knows by name, and forgets one that never comes back: the outbox
// keeps every row that one of them has not published.
package relays

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// Relay is one reader of the outbox.
type Relay struct {
	Relay     string    `json:"relay"`
	Shards    int16     `json:"shards"`
	Leased    int64     `json:"leased"`   // shards whose lease is live
	Replicas  int64     `json:"replicas"` // that are alive
	Published int64     `json:"published"`
	Dead      int64     `json:"dead"` // rows in outbox_dead, at most DeadMax
	CreatedAt time.Time `json:"created_at"`
	// QuietSeconds is since a replica was last known to work; 0 while one does.
	QuietSeconds float64 `json:"quiet_seconds"`
}

// DeadMax bounds how many dead rows of a relay are counted.
const DeadMax = 100_000

// Live tells whether somebody works under the name, or stands by.
func (r *Relay) Live() bool { return r.Leased > 0 || r.Replicas > 0 }

// Querier is what List needs: a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// List returns every relay that is known, by name.
func List(ctx context.Context, db Querier, schema string) ([]Relay, error) {
	rows, err := db.Query(ctx, migrations.InSchema(listSQL, schema), DeadMax)
	if err != nil {
		return nil, fmt.Errorf("list relays: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Relay])
	if err != nil {
		return nil, fmt.Errorf("list relays: %w", err)
	}
	return all, nil
}

// Replica is a process of a relay that is alive.
type Replica struct {
	Relay string `json:"relay"`
	Owner string `json:"owner"`
	// State is publishing, standing_by, kafka_away, sink_away or stuck; empty: a replica of an earlier release.
	State   string `json:"state"`
	Problem string `json:"problem"` // why it is away or stuck
	// ReachedSeconds is since the brokers, or the sink, answered it last. Null: never, or it did not say.
	ReachedSeconds *float64 `json:"reached_seconds"`
}

// Away tells whether rows cannot leave because what they go to does not answer.
func (r *Replica) Away() bool { return r.State == "kafka_away" || r.State == "sink_away" }

// Stuck tells whether a shard of it hangs.
func (r *Replica) Stuck() bool { return r.State == "stuck" }

// What names what rows go to.
func (r *Replica) What() string {
	if r.State == "sink_away" {
		return "its sink"
	}
	return "Kafka"
}

// ReplicasMax bounds how many replicas are listed.
const ReplicasMax = 1000

// Replicas returns the replicas of all relays that are alive.
func Replicas(ctx context.Context, db Querier, schema string) ([]Replica, error) {
	rows, err := db.Query(ctx, migrations.InSchema(replicasSQL, schema), ReplicasMax)
	if err != nil {
		return nil, fmt.Errorf("list replicas: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Replica])
	if err != nil {
		return nil, fmt.Errorf("list replicas: %w", err)
	}
	return all, nil
}

// What keeps a relay from being deleted. Nothing was changed then.
var (
	ErrUnknown = errors.New("no relay of this name is known")
	ErrLive    = errors.New("a replica works under this name, or stands by: stop all of them first")
	ErrDead    = errors.New("rows of it are in outbox_dead, and nobody else publishes them: decide on them first, with \"outbox-relay dead list\" and \"dead discard\"")
	ErrBusy    = errors.New("somebody holds its rows: try again")
)

// Deleted is what was forgotten. What a relay has not published is published by nobody, unless another one does.
type Deleted struct {
	Relay    string `json:"relay"`
	Shards   int64  `json:"shards"` // that had progress
	Paused   int64  `json:"paused_topics"`
	Replicas int64  `json:"replicas"` // dead ones that were still listed
}

// Delete forgets a relay, its progress and its pauses, in one transaction, and writes down who did so. The database
// decides, with the relay locked, whether a replica is live: whoever takes a shard waits for that lock, and a lease
// that is renewed meanwhile keeps its row. An error means that nothing was changed, unless the connection broke during
// COMMIT; to repeat the call is safe.
func Delete(ctx context.Context, db operator.Beginner, schema, relay string, by operator.By) (*Deleted, error) {
	in := func(sql string) string { return migrations.InSchema(sql, schema) }
	gone := &Deleted{Relay: relay}
	// Read committed, whatever the role's default is: what follows the lock has to see what came before it.
	err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, settingsSQL); err != nil {
			return err
		}
		locked, err := tx.Exec(ctx, in(lockSQL), relay)
		if err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, in(deleteSQL), relay).Scan(&gone.Shards, &gone.Paused, &gone.Replicas); err != nil {
			return err
		}
		if locked.RowsAffected()+gone.Shards == 0 {
			var left bool
			if err := tx.QueryRow(ctx, in(knownSQL), relay).Scan(&left); err != nil {
				return err
			}
			if !left {
				return ErrUnknown
			}
		}
		var live, dead bool
		if err := tx.QueryRow(ctx, in(leftSQL), relay).Scan(&live, &dead); err != nil {
			return err
		}
		switch {
		case live:
			return ErrLive
		case dead:
			return ErrDead
		}
		_, err = tx.Exec(ctx, in(noteSQL), relay, by.Who, by.Why, gone.Shards, gone.Paused)
		return err
	})
	var refused *pgconn.PgError
	switch {
	case errors.As(err, &refused) && (refused.Code == "55P03" || refused.Code == "40P01"):
		return nil, fmt.Errorf("relay %q: %w (%s)", relay, ErrBusy, refused.Code)
	case err != nil:
		return nil, fmt.Errorf("relay %q: %w", relay, err)
	}
	return gone, nil
}
