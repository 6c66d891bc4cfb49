// Package nodedup takes the claim out of a consumer. It is internal: the demo shows with it what happens without
// the claim, and the benchmark measures what the claim costs. Nothing outside of this module can do the same.
package nodedup

import "context"

type contextKey struct{}

// With makes consumers that run under the returned context handle every message, without claims.
func With(ctx context.Context) context.Context { return context.WithValue(ctx, contextKey{}, true) }

// In reports whether ctx comes from With.
func In(ctx context.Context) bool { return ctx.Value(contextKey{}) != nil }
