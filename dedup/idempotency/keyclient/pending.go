package keyclient

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/migrations"
)

// ErrPendingTooOld is a request whose first attempt is older than the time for which servers
// remember keys: a retry could be executed again. Find out whether the server acted, then Forget the
// key.
var ErrPendingTooOld = errors.New("request is pending for longer than its key is valid: find out whether the server acted, then forget it")

// PendingConfig of a Pending.
type PendingConfig struct {
	// Schema that holds the table. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Client that sends the requests: the same name of two clients is two requests. All processes
	// of a client use the same value. Required; 1 to 255 bytes.
	Client string
	// AgeMax is how long after its first attempt a request may be retried. It must be less than the
	// server's window, by more than all attempts of a request take. 1 min to 10 years; default 22 h, for
	// servers that remember keys for a day.
	AgeMax time.Duration
}

// Pending stores the keys of requests in PostgreSQL, table pending_requests, until their responses
// are stored, so that they survive the process. It is safe for concurrent use.
type Pending struct {
	pool *pgxpool.Pool
	cfg  PendingConfig
}

// NewPending returns a store, or all problems of its configuration at once. It opens no connection.
// The caller owns the pool, which must connect to the primary.
func NewPending(pool *pgxpool.Pool, cfg PendingConfig) (*Pending, error) {
	schema, err := migrations.Options{Schema: cfg.Schema}.Resolve()
	problems := []error{err}
	if pool == nil {
		problems = append(problems, errors.New("pool is nil: want a pool of the primary"))
	}
	if err := (idempotency.Key{Scope: cfg.Client, Operation: "-", Value: "-"}).Validate(); err != nil {
		problems = append(problems, fmt.Errorf("%s: %w", "Client", err))
	}
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "AgeMax", Value: &cfg.AgeMax, Default: 22 * time.Hour, Min: time.Minute, Max: 10 * 365 * 24 * time.Hour},
	)...)
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	cfg.Schema = schema
	return &Pending{pool: pool, cfg: cfg}, nil
}

// Begin returns the key that is pending under the name of a request ("charge order 4127"), 1 to 255
// bytes, or else makes fresh pending, such as idempotency.NewKey() or a key that List returned. Then
// send the request under WithKey(ctx, key). If fresh was sent before, and key is another one, send
// nothing: another process began the request anew. After an error the next Begin resolves the row.
//
// The name stands for one effect until it is forgotten: after that it gets a new key, and a second
// effect. So check first whether the response was stored.
func (p *Pending) Begin(ctx context.Context, request, fresh string) (key string, err error) {
	if err := (idempotency.Key{Scope: p.cfg.Client, Operation: "-", Value: request}).Validate(); err != nil {
		return "", fmt.Errorf("name of a request: %w", err)
	}
	var old bool
	err = pgx.BeginTxFunc(ctx, p.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		batch := &pgx.Batch{}
		batch.Queue(pendingSettingsSQL)
		batch.Queue(migrations.InSchema(beginPendingSQL, p.cfg.Schema), p.cfg.Client, request, fresh, p.cfg.AgeMax).QueryRow(func(row pgx.Row) error { return row.Scan(&key, &old) })
		return tx.SendBatch(ctx, batch).Close()
	})
	switch {
	case err != nil:
		return "", err
	case old:
		return "", ErrPendingTooOld
	}
	return key, nil
}

// Forget removes the name if it is still pending under that key, in the transaction that stores the
// response: both are committed, or neither. If the reply to that COMMIT is lost, check whether the
// response was stored before you retry: if it was, the name is free, and would get a new key. A name
// that is not pending is no error.
func (p *Pending) Forget(ctx context.Context, tx pgx.Tx, request, key string) error {
	if _, err := tx.Exec(ctx, migrations.InSchema(forgetPendingSQL, p.cfg.Schema), p.cfg.Client, request, key); err != nil {
		return fmt.Errorf("forget request %q: %w", request, err)
	}
	return nil
}

// PendingRequest is a request whose response was not stored, as far as is known.
type PendingRequest struct {
	Request   string
	Key       string
	CreatedAt time.Time // before the first attempt, by the database's clock
	TooOld    bool      // ErrPendingTooOld
}

// List returns what is pending after a restart: at most limit requests, in the order of their
// names, starting after the name after. For each, check first whether its response was stored: if
// so, Forget it. Otherwise retry at once, with Begin under its name and its key. Another process may
// have forgotten it since it was listed: with a new key it would have a second effect; under its key
// it is pending again, and the server replays. See the example of Pending.
func (p *Pending) List(ctx context.Context, after string, limit int) ([]PendingRequest, error) {
	rows, err := p.pool.Query(ctx, migrations.InSchema(listPendingSQL, p.cfg.Schema), p.cfg.Client, p.cfg.AgeMax, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list pending requests: %w", err)
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[PendingRequest])
}
