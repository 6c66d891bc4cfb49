// Package pause waits for a time, or until a context ends.
package pause

import (
	"context"
	"time"
)

// For waits for d and reports whether ctx is still alive then. It returns early when ctx ends.
func For(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return ctx.Err() == nil
}

// Outlast returns a context that ends with base, and some time after ctx.
func Outlast(base, ctx context.Context, by time.Duration) (context.Context, context.CancelFunc) {
	lasting, cancel := context.WithCancel(base)
	stop := context.AfterFunc(ctx, func() {
		if For(lasting, by) {
			cancel()
		}
	})
	return lasting, func() { stop(); cancel() }
}
