// Package serving has what servers of requests with idempotency keys share, whatever the protocol.
package serving

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Detach makes a context that the client ends only as long as the work has not begun: a client that went away while its request
// waited for a connection costs nothing, one that goes later gets its work done, or all of it rolled back. begun marks the
// beginning, and reports false where the client was faster.
func Detach(parent context.Context, timeout time.Duration) (ctx context.Context, begun func() bool, end context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), timeout)
	stop := context.AfterFunc(parent, cancel)
	running := false
	begun = func() bool {
		running = running || stop()
		if !running {
			cancel() // what stop found under way may not have done so yet: an end that is no failure must be seen as one
		}
		return running
	}
	return ctx, begun, func() {
		stop()
		cancel()
	}
}

// GivenUpError is what a handler gave up with. Cut: its connection to the database was broken then.
type GivenUpError struct {
	Err error
	Cut bool
}

func (e *GivenUpError) Error() string { return e.Err.Error() }
func (e *GivenUpError) Unwrap() error { return e.Err }

// Passing reports errors that are gone with time: the database is away or busy, a program with other phases is being rolled out.
func Passing(err error) bool {
	var refusal *pgconn.PgError
	if errors.As(err, &refusal) {
		switch refusal.Code {
		case "25006", "25P03", "25P04": // it is a standby by now; the transaction was idle, or took, too long
			return true
		}
		return slices.Contains([]string{"08", "40", "53", "55", "57", "58"}, refusal.Code[:min(2, len(refusal.Code))])
	}
	var connect *pgconn.ConnectError
	return errors.As(err, &connect) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, idempotency.ErrUnknownRecoveryPoint) || pgconn.SafeToRetry(err) || cut(err)
}

// cut reports a broken connection to the database. A handler's own EOF may be anybody's: there the connection was asked.
func cut(err error) bool {
	var handlers *GivenUpError
	if errors.As(err, &handlers) {
		return handlers.Cut
	}
	var network net.Error
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &network)
}
