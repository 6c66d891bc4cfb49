// Package crashpoint marks the gaps between two durable steps, so that tests can kill the process
// in each of them.
//
// In production nothing is armed and a point costs one atomic load. The package is internal: no
// setting, environment variable or header can arm a point from outside this module.
package crashpoint

import (
	"context"
	"sync/atomic"
)

// The points, in the order in which a message passes them.
const (
	RelayRead          = "relay.read"             // rows are read, nothing is produced
	RelayProduced      = "relay.produced"         // records are handed to the client, not acknowledged
	RelayAcknowledged  = "relay.acknowledged"     // Kafka has the records, progress does not say so
	RelayCommitted     = "relay.committed"        // exactly once: the transaction is committed, the database does not know
	RelayProgressed    = "relay.progressed"       // progress is stored
	ConsumerClaimed    = "consumer.claimed"       // claims are in the open transaction
	ConsumerHandled    = "consumer.handled"       // effects are in the open transaction
	ConsumerCommitting = "consumer.before_commit" // position and COMMIT are about to be sent
	ConsumerCommitted  = "consumer.committed"     // the effect is durable, Kafka's offset is not
	ConsumerMarked     = "consumer.marked"        // the offset is marked, perhaps not committed
	ConsumerReleasing  = "consumer.releasing"     // parked messages are about to be tried again
	KeyClaimed         = "key.claimed"            // the key is claimed: in the open transaction, or durably for a flow
	KeyWorked          = "key.worked"             // the work's effects are in the open transaction
	KeyCommitting      = "key.before_commit"      // response or recovery point and COMMIT are about to be sent
	KeyCommitted       = "key.committed"          // the outcome is durable, the client does not know it
	KeyCalling         = "key.calling"            // a foreign call is about to be made
	KeyCalled          = "key.called"             // the foreign system acted, the recovery point does not say so
	KeyAdvanced        = "key.advanced"           // a phase is durable, the next has not begun
)

//nolint:gochecknoglobals // one hook for the process is the purpose: it kills the process
var hook atomic.Pointer[func(name string)]

// Arm makes f run at every point. A nil f disarms.
func Arm(f func(name string)) {
	if f == nil {
		hook.Store(nil)
		return
	}
	hook.Store(&f)
}

// Here is a point. It returns unless the armed function ends the process.
func Here(name string) {
	if f := hook.Load(); f != nil {
		(*f)(name)
	}
}

type contextKey struct{}

// With makes f run at every point that work under the returned context passes, so that tests in one
// process do not have to share the hook of Arm.
func With(ctx context.Context, f func(name string)) context.Context {
	return context.WithValue(ctx, contextKey{}, f)
}

// At is a point of work under ctx.
func At(ctx context.Context, name string) {
	if f, ok := ctx.Value(contextKey{}).(func(name string)); ok {
		f(name)
	}
	Here(name)
}
