package idempotency

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/migrations"
)

// Config of an Operation. The zero value works, except that Operation is required.
type Config struct {
	// Schema that holds the tables. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// Operation that keys are for: the same value for two operations is two keys. Required; 1 to
	// 255 bytes.
	Operation string
	// Window is how long a finished key is remembered, and its response replayed. A later request
	// with the same key is executed again. 1 min to 10 years; default 24 h.
	Window time.Duration
	// Forever remembers finished keys indefinitely. Not with Window.
	Forever bool
	// WaitMax is how long a request waits for another one with the same key before it gets
	// ErrInProgress. Waiting requests hold no connection; one request per process and key polls
	// whether another process is done. 1 ms to 1 min; default 250 ms.
	WaitMax time.Duration
	// Lock is how long a dead worker of a flow blocks other workers. A live worker renews the lock
	// every third of that. 1 s to 1 h; default 30 s. It is measured by the database's clock.
	Lock time.Duration
	// StatementTimeout, LockTimeout and IdleTimeout are the server's limits in transactions of the
	// work. They replace the role's own settings. 1 ms to 1 h; default 30 s, 5 s and 30 s.
	StatementTimeout, LockTimeout, IdleTimeout time.Duration
	// Isolation of the transactions of the work. Default read committed.
	Isolation pgx.TxIsoLevel
	// Strict stores the first outcome even if it is a failure that a retry could fix: Failed makes
	// the response. Default: such a failure stores nothing, and the next request executes.
	Strict bool
	// Failed makes the response for a failure that Strict turned into the outcome, and for ErrExpired. Default: status 500, or 410 for ErrExpired, without a body.
	Failed func(err error) Response
	// ResponseBytesMax is the largest body that is stored. Of a larger body only status, headers
	// and the fact that it was dropped are stored: a later request gets Response.BodyDropped. 1
	// byte to 64 MiB; default 1 MiB.
	ResponseBytesMax int
	// Seal encrypts what is stored of requests and responses: see NewAESSealer. Rows stored in clear,
	// from before it was set or finished by an operator, are read as they are. Default: none.
	Seal Sealer
	// Logger gets abandoned and indeterminate keys, failures that became outcomes, lost locks, and errors of
	// the maintenance loops. Default: none.
	Logger *slog.Logger
	// Hooks are called synchronously; they must return quickly.
	Hooks Hooks
}

// Hooks are optional callbacks, for metrics.
type Hooks struct {
	// Answered is called for each request, with its verdict.
	Answered func(operation string, verdict Verdict)
	// Weak is called for each weakness of the value of a key that a request brings: see Advise.
	Weak func(operation string, weakness Weakness)
	// Compared is called after each comparison with a ledger, with the numbers of differences: see Flow.Compare.
	Compared func(operation, phase string, differences map[DifferenceKind]int)
}

// Verdict says how a request ended.
type Verdict string

// The verdicts.
const (
	Executed     Verdict = "executed"    // the work ran, and its outcome is stored
	Replayed     Verdict = "replayed"    // the outcome was stored before
	Crowded      Verdict = "crowded"     // InProgressError.Crowded
	Mismatch     Verdict = "mismatch"    // ErrMismatch
	InProgress   Verdict = "in_progress" // ErrInProgress
	Undecided    Verdict = "undecided"   // ErrIndeterminate, ErrAbandoned, ErrUnknownRecoveryPoint
	FailedForNow Verdict = "failed"      // the work failed, and a retry could succeed
	InvalidKey   Verdict = "invalid"     // ErrInvalid
	LostItsLock  Verdict = "lock_lost"   // ErrLockLost
	NotAnswered  Verdict = "unanswered"  // ErrUnanswered
)

// Sealer encrypts what is stored. aad identifies what the text belongs to: Open must refuse a text
// that was sealed with a different aad. MAC returns a keyed hash of a text, 33 to 400 bytes: under the
// current key, or under that of an earlier one, if like is not nil. So a fingerprint tells no reader of the table
// which of few possible requests it is of.
type Sealer interface {
	Seal(plain, aad []byte) ([]byte, error)
	Open(sealed, aad []byte) ([]byte, error)
	MAC(text, like []byte) ([]byte, error)
}

// Operation executes requests once for each key. It is safe for concurrent use.
type Operation struct {
	pool  *pgxpool.Pool
	cfg   Config
	sql   map[string]string // statements in the schema: see newQueries
	gate  gate
	flow  atomic.Bool // NewFlow made its flow
	owner string      // names this process in locks
}

// New returns an operation, or all problems of its configuration at once. It opens no connection.
// The caller owns the pool, which must connect to the primary.
func New(pool *pgxpool.Pool, cfg Config) (*Operation, error) {
	cfg, err := cfg.withDefaults()
	if pool == nil {
		err = errors.Join(err, errors.New("pool is nil: want a pool of the primary"))
	}
	if err != nil {
		return nil, err
	}
	return &Operation{pool: pool, cfg: cfg, sql: newQueries(cfg.Schema), gate: gate{lines: map[name]*line{}, running: map[name]int{}}, owner: bounds.Owner()}, nil
}

func (c Config) withDefaults() (Config, error) {
	schema, err := migrations.Options{Schema: c.Schema}.Resolve()
	problems := []error{err}
	c.Schema = schema
	if err := (Key{Scope: "-", Operation: c.Operation, Value: "-"}).Validate(); err != nil {
		problems = append(problems, fmt.Errorf("Operation: %w", err))
	}
	if c.Forever && c.Window != 0 {
		problems = append(problems, bounds.Problem("Window", c.Window, "none, with Forever"))
	}
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "Window", Value: &c.Window, Default: 24 * time.Hour, Min: time.Minute, Max: 10 * 365 * 24 * time.Hour},
		bounds.Duration{Field: "WaitMax", Value: &c.WaitMax, Default: 250 * time.Millisecond, Min: time.Millisecond, Max: time.Minute},
		bounds.Duration{Field: "Lock", Value: &c.Lock, Default: 30 * time.Second, Min: time.Second, Max: time.Hour},
		bounds.Duration{Field: "StatementTimeout", Value: &c.StatementTimeout, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "LockTimeout", Value: &c.LockTimeout, Default: 5 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "IdleTimeout", Value: &c.IdleTimeout, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
	)...)
	problems = append(problems, bounds.Ints(
		bounds.Int{Field: "ResponseBytesMax", Value: &c.ResponseBytesMax, Default: 1 << 20, Min: 1, Max: 64 << 20},
	)...)
	switch c.Isolation {
	case "":
		c.Isolation = pgx.ReadCommitted
	case pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		problems = append(problems, bounds.Problem("Isolation", c.Isolation, "read committed, repeatable read or serializable"))
	}
	if c.Failed == nil {
		c.Failed = func(err error) Response {
			if errors.Is(err, ErrExpired) {
				return Response{Status: 410}
			}
			return Response{Status: 500}
		}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(problems...)
}

// Config returns the settings of the operation, with defaults in place of zeros.
func (o *Operation) Config() Config { return o.cfg }

// window is nil for Forever.
func (o *Operation) window() *time.Duration {
	if o.cfg.Forever {
		return nil
	}
	return &o.cfg.Window
}

// Key returns a key of this operation. It is validated when it is used.
func (o *Operation) Key(scope, value string, fingerprint Fingerprint) Key {
	return Key{Scope: scope, Operation: o.cfg.Operation, Value: value, Fingerprint: fingerprint}
}

// complete fills in the operation of a key, and rejects a key of another operation.
func (o *Operation) complete(k Key) (Key, error) {
	if k.Operation == "" {
		k.Operation = o.cfg.Operation
	}
	if k.Operation != o.cfg.Operation {
		return k, fmt.Errorf("%w: it is of operation %q, not of %q", ErrInvalid, k.Operation, o.cfg.Operation)
	}
	err := k.Validate()
	if err == nil && o.cfg.Hooks.Weak != nil {
		for _, weakness := range Advise(k.Value) {
			o.cfg.Hooks.Weak(k.Operation, weakness)
		}
	}
	return k, err
}

// ForgetScope deletes the finished keys of a scope, of all operations, whose responses may have personal
// data, in small transactions, and returns how many. A request that comes again under one of them is
// executed again. Unfinished keys stay: call it again when they are finished.
func (o *Operation) ForgetScope(ctx context.Context, scope string) (forgotten int64, err error) {
	for {
		tag, err := o.pool.Exec(ctx, o.sql[forgetScopeSQL], scope, pageMax)
		forgotten += tag.RowsAffected()
		if err != nil {
			return forgotten, fmt.Errorf("forget the keys of scope %q: %w", scope, err)
		}
		if tag.RowsAffected() < pageMax {
			return forgotten, nil
		}
	}
}

// answered reports the verdict on a request to the hook.
func (o *Operation) answered(response Response, err error) (Response, error) {
	if o.cfg.Hooks.Answered != nil {
		o.cfg.Hooks.Answered(o.cfg.Operation, verdictOf(response, err))
	}
	return response, err
}

func verdictOf(response Response, err error) Verdict {
	var busy *InProgressError
	switch {
	case err == nil && response.Replayed:
		return Replayed
	case err == nil:
		return Executed
	case errors.Is(err, ErrInvalid):
		return InvalidKey
	case errors.Is(err, ErrMismatch):
		return Mismatch
	case errors.As(err, &busy) && busy.Crowded:
		return Crowded
	case errors.Is(err, ErrInProgress):
		return InProgress
	case errors.Is(err, ErrLockLost):
		return LostItsLock
	case errors.Is(err, ErrUnanswered):
		return NotAnswered
	case errors.Is(err, ErrIndeterminate), errors.Is(err, ErrAbandoned), errors.Is(err, ErrUnknownRecoveryPoint):
		return Undecided
	default:
		return FailedForNow
	}
}
