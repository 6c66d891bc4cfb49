package command

import (
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

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
