package consumer

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// origin is where in a transaction an error arose. It decides what the error means, before its
// SQLSTATE does.
type origin uint8

const (
	// originEngine is a statement of the engine: connection, BEGIN, claim, position, parking,
	// attempts.
	originEngine origin = iota
	// originStatement is a statement of the handler in the engine's transaction, including the
	// insert of a message that it published.
	originStatement
	// originHandler is the handler itself: what it returned, its other connections, a panic, its
	// time limit.
	originHandler
	// originCommit is COMMIT: deferred constraints, or a connection that was lost before the
	// answer.
	originCommit
)

func (o origin) String() string {
	return [...]string{"engine", "statement", "handler", "commit"}[o]
}

// failure is why a transaction did not commit.
type failure struct {
	origin origin
	msg    *Message // that failed; nil: unknown
	lost   bool     // the engine's own connection is lost
	closes bool     // the engine's last statements succeed without the handler
	letter *letter  // that the server refused
	err    error
}

// engineFailure is a failure of a statement of the engine.
func engineFailure(err error) *failure { return &failure{origin: originEngine, err: err} }

// state is the SQLSTATE of a failure; empty: the server did not answer with one.
func (f *failure) state() string { return pgerr.State(f.err) }

// verdict is what a failure means for its batch.
type verdict uint8

const (
	// verdictRepeat: a conflict with a concurrent transaction. Run again soon. Not an attempt.
	verdictRepeat verdict = iota
	// verdictWait: the database, or the connection to it, does not work. Wait, then run again. Not
	// an attempt.
	verdictWait
	// verdictFenced: the position has another holder, or moved back. Take it over again, or leave
	// it. Not an attempt.
	verdictFenced
	// verdictDivide: one message makes the engine's own statements fail. Find it by halving the
	// batch; a single message waits.
	verdictDivide
	// verdictCount: an attempt at the message failed; a later one may succeed.
	verdictCount
	// verdictPark: no further attempt can succeed.
	verdictPark
)

// rule is one row of the table that decides what a failure means.
type rule struct {
	name    string // for people, and tests
	origins []origin
	matches func(f *failure) bool
	verdict verdict
}

// rules are evaluated from the top; the first matching row decides.
//
//nolint:gochecknoglobals // a table
var rules = []rule{
	{"position refused (EO001), or another server", []origin{originEngine, originCommit}, isFenced, verdictFenced},
	{"concurrent transaction (class 40, 55P03)", []origin{originEngine, originCommit}, stateIn("40", "55P03"), verdictRepeat},
	{"data that the engine's statements cannot store (classes 22, 23, 54)", []origin{originEngine}, stateIn("22", "23", "54"), verdictDivide},
	{"any other failure of the engine", []origin{originEngine}, always, verdictWait},
	{"the engine's connection is lost", []origin{originStatement, originHandler, originCommit}, isLost, verdictWait},
	{"marked permanent, undecodable, unknown type", []origin{originStatement, originHandler, originCommit}, isPermanentFailure, verdictPark},
	{"server ends sessions or lacks resources (classes 08, 53, 57 but 57014, 58, 25006)", []origin{originCommit}, isServerState, verdictWait},
	{"no answer to COMMIT", []origin{originCommit}, stateIn(""), verdictWait},
	{"anything else", []origin{originStatement, originHandler, originCommit}, always, verdictCount},
}

func (f *failure) verdict() verdict {
	for _, r := range rules {
		if slices.Contains(r.origins, f.origin) && r.matches(f) {
			return r.verdict
		}
	}
	return verdictWait
}

func always(*failure) bool { return true }

// stateIn matches SQLSTATE codes and classes; "" matches an error without a SQLSTATE.
func stateIn(states ...string) func(*failure) bool {
	return func(f *failure) bool {
		code := f.state()
		return slices.ContainsFunc(states, func(s string) bool { return s == code || len(s) == 2 && strings.HasPrefix(code, s) })
	}
}

func isFenced(f *failure) bool {
	return f.state() == "EO001" || errors.Is(f.err, errFenced)
}

func isLost(f *failure) bool { return f.lost }

func isPermanentFailure(f *failure) bool { return IsPermanent(f.err) }

// isServerState: a standby after a failover counts, too.
func isServerState(f *failure) bool {
	return pgerr.OfServer(f.err) || pgerr.Is(f.err, pgerr.ReadOnlyTransaction)
}

// reason is the reason under which a failed message is parked.
func (f *failure) reason(v verdict) string {
	var permanent *permanentError
	if v == verdictPark && errors.As(f.err, &permanent) {
		return permanent.reason
	}
	return reasonFailed
}

// waitable reports whether an error at the start may end once the database is available.
func waitable(err error) bool {
	for _, final := range []error{migrations.ErrTooOld, migrations.ErrTooNew, dedup.ErrNameTaken, dedup.ErrForeverDecided, dedup.ErrIDRule, ErrNotPrimary, ErrUnknownTopic, errOtherName} {
		if errors.Is(err, final) {
			return false
		}
	}
	state := pgerr.State(err)
	return state == "" || pgerr.Unavailable(err) || state == pgerr.ReadOnlyTransaction || pgerr.InClass(err, "40") || state == pgerr.LockNotAvailable
}

// handlerFailure converts the error of a handler to a failure.
func handlerFailure(ctx context.Context, t *tx, err error) *failure {
	f := &failure{origin: originHandler, err: err}
	var one *messageError
	if errors.As(err, &one) {
		f.msg, f.err = one.msg, one.err
	}
	if why := context.Cause(ctx); errors.Is(why, errHandlerTimeout) {
		if !errors.Is(f.err, why) {
			f.err = errors.Join(why, f.err)
		}
		return f
	}
	if f.state() != "" && (t.conn.IsClosed() || t.conn.PgConn().TxStatus() == 'E') {
		f.origin = originStatement
	}
	f.lost = errors.Is(err, errConnectionLost)
	return f
}
