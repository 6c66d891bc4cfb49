package main

import (
	"context"
	"fmt"
	"io"
	"net"
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

// DialThisMachine is how brokers are dialled without TLS and without --insecure.
func DialThisMachine(ctx context.Context, base *net.Dialer, broker string) (net.Conn, error) {
	return dialThisMachine(base)(ctx, "tcp", broker)
}

// FormatSettings formats settings that hold a database URL, in every usual way.
func FormatSettings(databaseURL string) string {
	s := secret{func() string { return databaseURL }}
	return fmt.Sprintf("%v %+v %#v %s %q", s, settings{databaseURL: s}, s, s, s) + s.LogValue().String()
}
