package idempotency

import "context"

// markSelfCommitted marks a key whose work sent COMMIT itself as indeterminate: its effects exist at
// least in part, and its outcome is not stored, so a person has to decide. Until then its row says
// finished, and no index finds it. If markSelfCommitted fails, the next request does it, or the
// reaper of an operation that forgets keys. It reports whether it changed the key.
func (o *Operation) markSelfCommitted(ctx context.Context, key Key) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.cfg.StatementTimeout)
	defer cancel()
	rows, err := o.durably(ctx, o.sql.selfCommitted, key.Scope, key.Operation, key.Value)
	switch {
	case err != nil:
		o.cfg.Logger.WarnContext(ctx, "could not check a key whose work may have committed by a statement of its own; the next request with the key checks it",
			"key", key, "error", err)
	case rows > 0:
		o.cfg.Logger.ErrorContext(ctx, "work committed by a statement of its own: its key is indeterminate, and a person has to check what it did", "key", key)
	}
	return rows > 0
}
