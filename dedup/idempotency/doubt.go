package idempotency

import "context"

// unanswered makes a key indeterminate whose work committed by a statement of its own, if it did: its effects are there at least
// in part, and its outcome is not, so that a person has to look. Until then it stands in the table as finished, where
// no index finds it. Where this fails, the next request does it, or the reaper of an operation that forgets. It tells
// whether the key was such a one.
func (o *Operation) unanswered(ctx context.Context, key Key) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.cfg.StatementTimeout)
	defer cancel()
	rows, err := o.durably(ctx, o.sql.unanswered, key.Scope, key.Operation, key.Value)
	switch {
	case err != nil:
		o.cfg.Logger.WarnContext(ctx, "a key whose work may have committed by a statement of its own could not be looked at; the next request with it does so",
			"key", key, "error", err)
	case rows > 0:
		o.cfg.Logger.ErrorContext(ctx, "work committed by a statement of its own: its key is indeterminate, and a person has to look at what it did", "key", key)
	}
	return rows > 0
}
