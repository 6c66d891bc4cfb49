package main

import (
	"encoding/json"
	"io"
	"log/slog"
	"strconv"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

// printJSON writes one object on one line.
func printJSON(w io.Writer, v any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(v)
}

// printObjects writes one object a line.
func printObjects[T any](w io.Writer, all []T) error {
	for _, one := range all {
		if err := printJSON(w, one); err != nil {
			return err
		}
	}
	return nil
}

// logger returns a logger with the format and level of the flags.
func (s *settings) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: s.logLevel}
	if s.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// plain quotes a name that could garble a terminal or a table.
func plain(name string) string {
	if plainName.MatchString(name) {
		return name
	}
	return strconv.Quote(name)
}

// seconds formats an age.
func seconds(n float64) string {
	return human.Seconds(n)
}
