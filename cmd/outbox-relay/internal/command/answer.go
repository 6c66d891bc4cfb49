package command

import (
	"errors"
	"io"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// errUnhealthy ends a command that has already printed the problems to stdout.
var errUnhealthy = errors.New("not well")

// answer prints a value as JSON, or the text, and returns errUnhealthy unless all is well.
func answer(out io.Writer, asJSON bool, value any, text string, well bool) error {
	var err error
	if asJSON {
		err = terminal.PrintJSON(out, value)
	} else {
		err = terminal.Write(out, text)
	}
	if err == nil && !well {
		return errUnhealthy
	}
	return err
}

// say prints a value as JSON, or else a text.
func say(out io.Writer, asJSON bool, value any, format string, args ...any) error {
	if asJSON {
		return terminal.PrintJSON(out, value)
	}
	return terminal.Say(out, format, args...)
}

// list prints objects as JSON, one in a line, or as a table, or that there are none.
func list[T any](out io.Writer, asJSON bool, all []T, none, header string, row func(T) string) error {
	switch {
	case asJSON:
		return terminal.PrintObjects(out, all)
	case len(all) == 0:
		return terminal.Say(out, "%s\n", none)
	}
	text := header + "\n"
	for _, one := range all {
		text += row(one) + "\n"
	}
	return terminal.Write(out, terminal.Table(text))
}

// Widths of columns, in characters.
const (
	keyWidth   = 32
	errorWidth = 72
	// kafkaErrorWidth is larger: the text holds the commands that end a hanging transaction.
	kafkaErrorWidth = 1000
)

func keyText(key human.Key) string {
	if key == nil {
		return "-"
	}
	if len(key) == 0 {
		return `""`
	}
	return terminal.Clip(key.String(), keyWidth)
}

func fullKey(key human.Key) string {
	switch {
	case key == nil:
		return "none: nothing waits behind it"
	case len(key) == 0:
		return `""`
	}
	return key.String()
}
