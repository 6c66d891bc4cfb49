// Package nodedup removes the claim from a consumer. It is internal: the demo uses it to show what
// happens without the claim, and the benchmark to measure what the claim costs. Code outside of
// this module cannot do the same.
package nodedup

import "context"

type contextKey struct{}

// With returns a context. Consumers that run under it handle every message, without claims.
func With(ctx context.Context) context.Context { return context.WithValue(ctx, contextKey{}, true) }

// In reports whether ctx comes from With.
func In(ctx context.Context) bool { return ctx.Value(contextKey{}) != nil }
