package keyclient

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/migrations"
)

// PendingStore remembers keys of requests that have a name, beyond the process. It is called from many goroutines.
type PendingStore interface {
	// Begin returns the key that is pending under the name, or else makes fresh pending: durably, before it returns. Where
	// the caller chose another key than the pending one, the pending one counts: it may have been sent.
	Begin(ctx context.Context, request, fresh string) (key string, err error)
	// Forget ends it, if it still is that key's. A name that is not pending is no error.
	Forget(ctx context.Context, request, key string) error
}

// ErrPendingTooOld is a request that was first asked longer ago than servers remember keys: asking again could be executed
// again. Nothing was sent. Find out whether the server acted, then Forget the key.
var ErrPendingTooOld = errors.New("request is pending for longer than its key is good for: find out whether the server acted, then forget it")

// PendingConfig of a Pending.
type PendingConfig struct {
	// Schema that holds the table. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Client whose requests these are: names of two clients never meet. The same in all its processes. Required; 1 to 255
	// bytes.
	Client string
	// AgeMax is how long after its first attempt a request may be asked again. Less than the server's window, by more than
	// TransportConfig.TotalMax. 1 min to 10 years; default 22 h, for servers that remember keys for a day.
	AgeMax time.Duration
}

// Pending is the PendingStore in PostgreSQL, table pending_requests. It is safe for concurrent use.
type Pending struct {
	pool *pgxpool.Pool
	cfg  PendingConfig
	sql  pendingQueries
}

// NewPending returns a store, or all problems of its configuration at once. It opens no connection; the pool is borrowed,
// and must be one of the primary.
func NewPending(pool *pgxpool.Pool, cfg PendingConfig) (*Pending, error) {
	schema, err := migrations.Options{Schema: cfg.Schema}.Resolve()
	problems := []error{err}
	if pool == nil {
		problems = append(problems, errors.New("pool is nil: want a pool of the primary"))
	}
	if !storable(cfg.Client) {
		problems = append(problems, bounds.Problem("Client", fmt.Sprintf("of %d bytes", len(cfg.Client)), "1 to 255 bytes of UTF-8 without control characters"))
	}
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "AgeMax", Value: &cfg.AgeMax, Default: 22 * time.Hour, Min: time.Minute, Max: 10 * 365 * 24 * time.Hour},
	)...)
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return &Pending{pool: pool, cfg: cfg, sql: newPendingQueries(schema)}, nil
}

// beginsMax bounds how often a name is looked at again that changes hands all the time.
const beginsMax = 10

// Begin implements PendingStore. It commits before it returns. An error says that nothing is known about the row: the
// next Begin finds out.
func (p *Pending) Begin(ctx context.Context, request, fresh string) (key string, err error) {
	if !storable(request) {
		return "", fmt.Errorf("a name of %d bytes: want 1 to 255 bytes of UTF-8 without control characters", len(request))
	}
	for range beginsMax {
		var old bool
		err = pgx.BeginTxFunc(ctx, p.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			batch := &pgx.Batch{}
			batch.Queue(pendingSettingsSQL)
			batch.Queue(p.sql.begin, p.cfg.Client, request, fresh, p.cfg.AgeMax).QueryRow(func(row pgx.Row) error { return row.Scan(&key, &old) })
			return tx.SendBatch(ctx, batch).Close()
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			continue
		case err != nil:
			return "", err
		case old:
			return "", ErrPendingTooOld
		}
		return key, nil
	}
	return "", errors.New("it is begun and forgotten all the time")
}

// Forget implements PendingStore.
func (p *Pending) Forget(ctx context.Context, request, key string) error {
	return p.forget(ctx, p.pool, request, key)
}

// ForgetTx forgets a request in the transaction that writes its answer down: both hold, or none. key is SentKey of
// the response. Where the reply to that COMMIT is lost, look whether the answer was written down before asking again: if it
// was, the name is free, and would get a new key.
func (p *Pending) ForgetTx(ctx context.Context, tx pgx.Tx, request, key string) error {
	return p.forget(ctx, tx, request, key)
}

func (p *Pending) forget(ctx context.Context, db interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}, request, key string,
) error {
	if _, err := db.Exec(ctx, p.sql.forget, p.cfg.Client, request, key); err != nil {
		return fmt.Errorf("forget request %q: %w", request, err)
	}
	return nil
}

// PendingRequest is a request whose answer was not written down, as far as is known.
type PendingRequest struct {
	Request   string
	Key       string
	CreatedAt time.Time // before the first attempt, by the database's clock
	TooOld    bool      // ErrPendingTooOld
}

// List returns what is pending after a restart: at most limit requests, in the order of their names, from the first one
// behind after. Look first whether its answer was written down: if so, Forget it. Else ask again at once, under its name and
// its key: WithKey(WithRequestName(ctx, r.Request), r.Key). Somebody else may have forgotten it since it was listed: under the
// name alone it would get a new key, and a second effect; under its key it is pending again, and the server replays. See the
// example of Pending.
func (p *Pending) List(ctx context.Context, after string, limit int) ([]PendingRequest, error) {
	rows, err := p.pool.Query(ctx, p.sql.list, p.cfg.Client, p.cfg.AgeMax, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list pending requests: %w", err)
	}
	pending, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r PendingRequest, err error) {
		return r, row.Scan(&r.Request, &r.Key, &r.CreatedAt, &r.TooOld)
	})
	if err != nil {
		return nil, fmt.Errorf("list pending requests: %w", err)
	}
	return pending, nil
}

func storable(text string) bool {
	return text != "" && len(text) <= 255 && utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f })
}
