package main

import (
	"context"
	"errors"
	"io"
	"time"
)

// clearScreen moves a terminal's cursor to the start and clears the screen.
const clearScreen = "\x1b[H\x1b[2J"

// watchStatus repeats the status until ctx ends, and then returns nil.
func (s *settings) watchStatus(ctx context.Context, opts statusOptions, out io.Writer) error {
	again := time.NewTicker(opts.watch)
	defer again.Stop()
	for {
		if shown := newScreen(out).terminal; shown != nil {
			shown.control(clearScreen)
		}
		if err := s.status(ctx, opts, out); err != nil && !errors.Is(err, errUnhealthy) {
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
