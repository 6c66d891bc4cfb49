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

// New returns the operation of a server, whose failed makes the responses of cfg.Failed, or all problems.
// handlerTimeout must be more than cfg.WaitMax.
func New(pool *pgxpool.Pool, cfg idempotency.Config, failed func(error) idempotency.Response, scoped bool, handlerTimeout time.Duration) (*idempotency.Operation, error) {
	var problems []error
	if !scoped {
		problems = append(problems, errors.New("scope is nil: want a function that returns the tenant of a request"))
	}
	if cfg.Failed != nil {
		problems = append(problems, errors.New("Operation.Failed: want none: a failure has the handler's response"))
	}
	cfg.Failed = failed
	op, err := idempotency.New(pool, cfg)
	if err == nil && op.Config().WaitMax >= handlerTimeout {
		err = bounds.Problem("HandlerTimeout", handlerTimeout, fmt.Sprintf("more than Operation.WaitMax, %v", op.Config().WaitMax))
	}
	return op, errors.Join(append(problems, err)...)
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

// Outliving returns a context that does not end with the client: its retry gets the outcome.
func Outliving(client context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(client), timeout)
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

// Passing reports errors that pass with time: the database is unavailable or busy, or a program
// with other phases is being deployed.
func Passing(err error) bool {
	if pgerr.State(err) != "" { // the three states: the server became a standby; the transaction was idle, or took, too long
		return pgerr.Is(err, pgerr.ReadOnlyTransaction, pgerr.IdleTransactionTimeout, pgerr.TransactionTimeout) || pgerr.InClass(err, "08", "40", "53", "55", "57", "58")
	}
	var connect *pgconn.ConnectError
	return errors.As(err, &connect) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, idempotency.ErrUnknownRecoveryPoint) || pgconn.SafeToRetry(err) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, new(net.Error)) // a broken connection
}
