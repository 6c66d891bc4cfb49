// Package deploy has no code: it holds what runs outbox-relay, and the tests that keep those files true to
// the program.
package deploy
