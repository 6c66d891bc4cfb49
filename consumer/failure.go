package consumer

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/migrations"
)

// origin is where in a transaction an error arose. It decides what the error means, before its SQLSTATE does.
type origin uint8

const (
	// originEngine is a statement of the engine: connection, BEGIN, claim, position, parking, attempts.
	originEngine origin = iota
	// originStatement is a statement of the handler in the engine's transaction, also one that it published.
	originStatement
	// originHandler is the handler itself: what it returned, its other connections, a panic, its time limit.
	originHandler
	// originCommit is COMMIT: deferred constraints, or a connection that was lost before the answer.
	originCommit
)

func (o origin) String() string {
	return [...]string{"engine", "statement", "handler", "commit"}[o]
}

// unknownIndex stands for a failure of a whole batch.
const unknownIndex = -1

// failure is why a transaction did not commit.
type failure struct {
	origin origin
	index  int  // of the message in the batch; unknownIndex: not known
	lost   bool // the engine's own connection is lost
	err    error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// state is the SQLSTATE of a failure; empty: the server did not answer with one.
func (f *failure) state() string {
	var pgErr *pgconn.PgError
	if errors.As(f.err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// verdict is what a failure means for its batch.
type verdict uint8

const (
	// verdictRepeat: a concurrent transaction was in the way. Run again soon. No attempt.
	verdictRepeat verdict = iota
	// verdictWait: the database, or the way to it, does not work. Wait, then run again. No attempt.
	verdictWait
	// verdictFenced: the position has another holder, or went back. Take it over again, or leave it. No attempt.
	verdictFenced
	// verdictDivide: one message is in the way of the engine's own statements. Find it by halves; alone, it waits.
	verdictDivide
	// verdictCount: an attempt of the message failed that may succeed later.
	verdictCount
	// verdictPark: no further attempt can succeed.
	verdictPark
)

func (v verdict) String() string {
	return [...]string{"repeat", "wait", "fenced", "divide", "count", "park"}[v]
}

// rule is one row of the table that decides what a failure means.
type rule struct {
	name    string // for docs/design.md and tests
	origins []origin
	matches func(e *engine, f *failure) bool
	verdict verdict
}

// rules are read from the top; the first row that matches decides. docs/design.md shows the same table.
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
	{"Config.PermanentStates", []origin{originStatement, originHandler, originCommit}, isConfiguredState, verdictPark},
	{"anything else", []origin{originStatement, originHandler, originCommit}, always, verdictCount},
}

func (e *engine) verdict(f *failure) verdict {
	for _, r := range rules {
		if slices.Contains(r.origins, f.origin) && r.matches(e, f) {
			return r.verdict
		}
	}
	return verdictWait
}

func always(*engine, *failure) bool { return true }

// stateIn matches SQLSTATE codes and classes; the empty one stands for none.
func stateIn(states ...string) func(*engine, *failure) bool {
	return func(_ *engine, f *failure) bool {
		code := f.state()
		return slices.ContainsFunc(states, func(s string) bool { return s == code || len(s) == 2 && strings.HasPrefix(code, s) })
	}
}

func isFenced(_ *engine, f *failure) bool { return f.state() == "EO001" || errors.Is(f.err, errFenced) }

func isLost(_ *engine, f *failure) bool { return f.lost }

func isPermanentFailure(_ *engine, f *failure) bool { return IsPermanent(f.err) }

func isServerState(_ *engine, f *failure) bool { return serverState(f.state()) }

func isConfiguredState(e *engine, f *failure) bool {
	code := f.state()
	return code != "" && slices.ContainsFunc(e.cfg.PermanentStates, func(state string) bool { return strings.HasPrefix(code, state) })
}

// serverState reports whether a SQLSTATE is about the server and not about a statement.
func serverState(code string) bool {
	if len(code) != 5 {
		return false
	}
	switch code[:2] {
	case "08", "53", "57", "58":
		return code != "57014" // query_canceled: a statement timeout is the statement's
	}
	return code == "25006" // read-only: failed over
}

// reason is under which reason a failed message is parked.
func (f *failure) reason(v verdict) string {
	switch {
	case isUndecodable(f.err):
		return reasonUndecodable
	case isUnknownType(f.err):
		return reasonUnknownType
	case v == verdictPark:
		return reasonPermanent
	}
	return reasonFailed
}

// waitable reports whether an error at the start passes when the database is back.
func waitable(err error) bool {
	for _, final := range []error{migrations.ErrTooOld, migrations.ErrTooNew, dedup.ErrNameTaken, dedup.ErrForeverDecided, dedup.ErrIDRule, ErrNotPrimary} {
		if errors.Is(err, final) {
			return false
		}
	}
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return serverState(pgErr.Code) || strings.HasPrefix(pgErr.Code, "40") || pgErr.Code == "55P03"
	}
	return true
}

// handlerFailure makes a failure of what a handler's shape returned. index maps places in the handler's messages to
// places in the batch.
func handlerFailure(ctx context.Context, t *tx, s *selection, err error) *failure {
	f := &failure{origin: originHandler, index: unknownIndex, err: err}
	var one *messageError
	if errors.As(err, &one) {
		f.err = one.err
		if one.index >= 0 && one.index < len(s.index) {
			f.index = s.index[one.index]
		}
	}
	switch why := context.Cause(ctx); {
	case errors.Is(why, errSilent):
		f.origin, f.lost, f.err = originStatement, true, errors.Join(why, f.err)
		return f
	case errors.Is(why, errHandlerTimeout):
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
