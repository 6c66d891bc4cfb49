// Package keyclient sends HTTP requests under idempotency keys.
package keyclient
