package main

import (
	"context"
	"io"
)

// Execute runs a command line in this process, with an environment of its own.
func Execute(ctx context.Context, args []string, environment map[string]string, stdout, stderr io.Writer) int {
	lookup := func(name string) (string, bool) {
		value, found := environment[name]
		return value, found
	}
	return execute(ctx, args, lookup, stdout, stderr)
}

// Program is main without the exit.
func Program() int { return program() }
