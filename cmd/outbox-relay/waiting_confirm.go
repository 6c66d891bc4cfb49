package main

import (
	"bufio"
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// confirm asks before more than one row is discarded, which cannot be undone. Without a terminal,
// --yes is required. The rows discarded are those counted here, even if others match the filter
// later.
func (w *work[P, R]) confirm(ctx context.Context, conn *pgx.Conn, places []P, std streams) error {
	if !w.discard || w.yes || len(places) == 1 && !w.wholeKeys {
		return nil
	}
	words, what := w.words(), w.what(len(places))
	refused := usageError{fmt.Errorf("%s would be discarded, and are %s: --dry-run shows them, --yes confirms", what, words.lost)}
	if !terminal.IsTerminal(std.in) || w.order.json {
		return refused
	}
	rows, err := w.these(ctx, conn, places, parkedListMax)
	if err != nil {
		return err
	}
	if err := w.waiting.print(std.progress, rows); err != nil {
		return err
	}
	if len(places) > len(rows) {
		_ = terminal.Say(std.progress, "… and %d more\n", len(places)-len(rows))
	}
	_ = terminal.Say(std.progress, "discard %s? They are %s. Type yes: ", strings.TrimSuffix(what, ","), words.lost)
	answer := make(chan string, 1)
	go func() { // if nothing is typed it ends with the program
		line, _ := bufio.NewReader(std.in).ReadString('\n')
		answer <- strings.TrimSpace(line)
	}()
	select {
	case typed := <-answer:
		if typed != "yes" {
			return refused
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// what counts the rows to act on, as the subject of a sentence.
func (w *work[P, R]) what(n int) string {
	what := human.Count(n, w.words().row)
	if w.wholeKeys {
		what += ", and all " + w.words().rows() + " behind them,"
	}
	return what
}
