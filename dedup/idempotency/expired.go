package idempotency

import (
	"context"
	"errors"
)

// ErrExpired is for work, and phases of a flow, that find effects of an earlier execution of the
// request: the client retried after Config.Window, when the key was forgotten. Their writes are
// rolled back, the response that Config.Failed makes for ErrExpired is stored as the outcome
// (httpkey: 410), and Once and Flow.Do return it without an error.
//
// Work finds them by its own rows: it inserts one under Key.ChildID with ON CONFLICT DO NOTHING, and
// returns ErrExpired if none was inserted. In a flow a foreign system may have been called again before:
// then the key is indeterminate. To avoid that, insert the row in a phase before all calls.
var ErrExpired = errors.New("the request was executed before, and its idempotency key is forgotten")

// expired turns ErrExpired into an outcome.
func (o *Operation) expired(ctx context.Context, key Key, cause error) error {
	var final *FinalError
	if !errors.Is(cause, ErrExpired) || errors.As(cause, &final) || errors.Is(cause, ErrIndeterminate) {
		return cause
	}
	o.cfg.Logger.WarnContext(ctx, "a request was retried after its key was forgotten; it is not executed again", "key", key, "error", cause)
	return Final(o.cfg.Failed(cause), cause)
}
