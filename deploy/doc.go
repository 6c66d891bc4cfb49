// Package deploy contains no code except tests: it holds the files that run outbox-relay, and the
// tests check these files against the program.
package deploy
