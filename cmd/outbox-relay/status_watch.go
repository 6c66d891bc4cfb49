package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// watchStatus repeats the status until ctx ends, and then returns nil.
func watchStatus(ctx context.Context, s *cli.Settings, opts statusOptions, out io.Writer) error {
	again := time.NewTicker(opts.watch)
	defer again.Stop()
	for {
		terminal.NewScreen(out).Clear()
		if err := showStatus(ctx, s, opts, out); err != nil && !errors.Is(err, errUnhealthy) {
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
