// Package serving has code that servers of requests with idempotency keys share, whatever the
// protocol.
package serving

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// ErrUnauthenticated is what a Scope returns for a request without a principal.
var ErrUnauthenticated = errors.New("the request is not authenticated")

// New returns the operation of a server, whose failed makes the responses of cfg.Failed.
// handlerTimeout must be more than cfg.WaitMax.
func New(pool *pgxpool.Pool, cfg idempotency.Config, failed func(error) idempotency.Response, handlerTimeout time.Duration) (*idempotency.Operation, error) {
	given := cfg.Failed != nil
	cfg.Failed = failed
	op, err := idempotency.New(pool, cfg)
	if given {
		err = errors.Join(err, errors.New("Operation.Failed: want none: a failure has the handler's response"))
	}
	if err == nil && op.Config().WaitMax >= handlerTimeout {
		err = bounds.Problem("HandlerTimeout", handlerTimeout, fmt.Sprintf("more than Operation.WaitMax, %v", op.Config().WaitMax))
	}
	return op, err
}

// ValidKey reports whether a client's key has 1 to 255 visible ASCII characters.
func ValidKey(value string) bool {
	invisible := func(r rune) bool { return r <= ' ' || r > '~' }
	return value != "" && len(value) <= 255 && !strings.ContainsFunc(value, invisible)
}

// Safe reports whether a method changes nothing, so that a key is ignored.
func Safe(method string) bool {
	return method == "" || slices.Contains([]string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace}, method)
}

// CheckScope returns the problem of what a Scope returned, or "".
func CheckScope(ctx context.Context, op *idempotency.Operation, scope string, err error) Problem {
	if errors.Is(err, ErrUnauthenticated) {
		return Unauthenticated
	}
	if err == nil {
		err = op.Key(scope, "-", idempotency.Fingerprint{}).Validate()
	}
	if err != nil {
		op.Config().Logger.ErrorContext(ctx, "the scope of a request is unknown: it is refused", "error", err)
		return Internal
	}
	return ""
}

// Once executes the work of a request. started: it had begun, so that its failure is worth a line
// in the log also if the client is gone.
func Once(parent context.Context, op *idempotency.Operation, key idempotency.Key, timeout time.Duration, work func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (_ idempotency.Response, started bool, _ error) {
	ctx, begun, end := Detach(parent, timeout)
	defer end()
	response, err := op.Once(ctx, key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		if !begun() {
			return idempotency.Response{}, context.Canceled
		}
		started = true
		return work(ctx, tx)
	})
	return response, started, err
}

// Exchange is what a handler can access. It is passed in the context, because a handler has no other
// argument for it. Err is what the handler failed with, if its protocol cannot return an error.
type Exchange struct {
	Tx  pgx.Tx
	Key idempotency.Key
	Err error
}

type exchangeKey struct{}

// With returns a context for a handler.
func With(ctx context.Context, e *Exchange) context.Context {
	return context.WithValue(ctx, exchangeKey{}, e)
}

// Of returns what With was given. It panics without that, with the remedy.
func Of(ctx context.Context, remedy string) *Exchange {
	if e := From(ctx); e != nil {
		return e
	}
	panic(remedy)
}

// From returns what With was given, or nil.
func From(ctx context.Context) *Exchange {
	e, _ := ctx.Value(exchangeKey{}).(*Exchange)
	return e
}

// Same reports whether a replay will return, byte for byte, what the handler answered.
func Same(a, b idempotency.Response) bool {
	return a.Status == b.Status && bytes.Equal(a.Body, b.Body) && maps.EqualFunc(a.Header, b.Header, slices.Equal)
}

// Detach returns a context that the client ends only until the work has begun: a client that
// disconnects while its request waits for a connection costs nothing; for one that disconnects
// later, the work is committed, or rolled back, as a whole. begun marks the beginning, and reports
// false if the client disconnected first.
func Detach(parent context.Context, timeout time.Duration) (ctx context.Context, begun func() bool, end context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), timeout)
	stop := context.AfterFunc(parent, cancel)
	running := false
	begun = func() bool {
		running = running || stop()
		if !running {
			cancel() // the AfterFunc that stop found started may not have cancelled yet: the caller must see a cancelled ctx
		}
		return running
	}
	return ctx, begun, func() {
		stop()
		cancel()
	}
}

// GivenUpError is the error that a handler failed with. Cut: its database connection was broken at
// that time.
type GivenUpError struct {
	Err error
	Cut bool
}

func (e *GivenUpError) Error() string { return e.Err.Error() }
func (e *GivenUpError) Unwrap() error { return e.Err }

// Passing reports errors that pass with time: the database is unavailable or busy, or a program
// with other phases is being deployed.
func Passing(err error) bool {
	if pgerr.State(err) != "" { // the three states: the server became a standby; the transaction was idle, or took, too long
		return pgerr.Is(err, pgerr.ReadOnlyTransaction, pgerr.IdleTransactionTimeout, pgerr.TransactionTimeout) || pgerr.InClass(err, "08", "40", "53", "55", "57", "58")
	}
	var connect *pgconn.ConnectError
	return errors.As(err, &connect) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, idempotency.ErrUnknownRecoveryPoint) || pgconn.SafeToRetry(err) || cut(err)
}

// cut reports a broken database connection. An EOF of a handler may come from elsewhere: there Cut
// decides.
func cut(err error) bool {
	var handlers *GivenUpError
	if errors.As(err, &handlers) {
		return handlers.Cut
	}
	var network net.Error
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &network)
}
