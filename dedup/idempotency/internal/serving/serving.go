// Package serving has code that servers of requests with idempotency keys share, whatever the
// protocol.
package serving

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgerr"
)

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
