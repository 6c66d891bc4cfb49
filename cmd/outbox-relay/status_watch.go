package main

import (
	"context"
	"errors"
	"io"
	"time"
)

// clearScreen moves a terminal to its start and empties it.
const clearScreen = "\x1b[H\x1b[2J"

// watchStatus shows the status again and again until ctx ends, which is how it is meant to end.
func (s *settings) watchStatus(ctx context.Context, opts statusOptions, out io.Writer) error {
	again := time.NewTicker(opts.watch)
	defer again.Stop()
	for {
		if newScreen(out).terminal {
			if _, err := io.WriteString(out, clearScreen); err != nil {
				return err
			}
		}
		if err := s.status(ctx, opts, out); err != nil && !errors.Is(err, errNotWell) {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return nil
		}
	}
}
