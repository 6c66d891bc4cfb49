package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/internal/parked"
	"github.com/effectonce/effectonce/migrations"
)

func newParked(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "parked",
		Short: "Look at messages that could not be handled, retry or discard them",
		Long: `Messages that a consumer could not handle wait in parked_messages. The first of a key holds the key:
later ones wait behind it, in order. What becomes of it is the operator's decision:

  outbox-relay parked list                     # what waits, and why
  outbox-relay parked show ID                  # everything about one, and what to do
  outbox-relay parked retry --id ID --wait     # the running consumers handle it, and what is behind it
  outbox-relay parked discard --id ID --why …  # it is never handled; what is behind it goes on`,
	}
	cmd.AddCommand(newParkedList(s), newParkedShow(s), newParkedRetry(s), newParkedDiscard(s))
	return cmd
}

// parkedFilter are the flags that choose messages. They come from the command line alone: what a
// deployment put into the environment must not decide what is discarded.
type parkedFilter struct {
	parked.Filter
	id    string
	limit int
}

const (
	flagAll   = "all"
	flagLimit = "limit"
)

func (f *parkedFilter) add(cmd *cobra.Command, limit int) {
	flags := cmd.Flags()
	addText(flags, "id", 1024, "the message's ID, or topic/partition/offset", func(text string) error { f.id = text; return nil })
	addText(flags, "key", 1<<20, "the message's key, as text or as base64:...", func(text string) (err error) {
		f.Key, err = parked.ParseKey(text)
		return err
	})
	addText(flags, "topic", 249, "topic", into(&f.Topic))
	addText(flags, "consumer", 600, "name of the consumer, such as billing/orders", into(&f.Consumer))
	addText(flags, "group", 255, "consumer group", into(&f.Group))
	reasons := parked.Reasons()
	addOption(flags, "reason", "string", "", "why it was parked ("+strings.Join(reasons, ", ")+")", func(text string) error {
		if !slices.Contains(reasons, text) {
			return errors.New("want one of " + strings.Join(reasons, ", "))
		}
		return into(&f.Reason)(text)
	})
	addAge(flags, &f.OlderThan, "older-than", "parked for longer than this")
	addAge(flags, &f.YoungerThan, "younger-than", "parked for less than this")
	addInt(flags, &f.limit, flagLimit, limit, 1, operator.TargetsMax, "how many messages at most")
	commandLineOnly(flags, "id", "key", "topic", "consumer", "group", "reason", "older-than", "younger-than", flagLimit)
}

// given tells whether the filter narrows anything.
func (f *parkedFilter) given() bool {
	return f.id != "" || f.Key != nil || f.Topic != nil || f.Consumer != nil || f.Group != nil || f.Reason != nil || f.OlderThan != nil || f.YoungerThan != nil
}

// nothing is the error of a filter that fits nothing.
func (f *parkedFilter) nothing() error {
	if f.given() {
		return errors.New("no parked message fits: \"outbox-relay parked list\" shows what there is")
	}
	return errors.New("nothing is parked")
}

// find resolves --id, which also finds what is behind another message.
func (f *parkedFilter) find(ctx context.Context, conn *pgx.Conn, schema string) error {
	if f.id == "" {
		// Messages that wait behind others are of interest only to whoever asks for them.
		f.Behind = f.Behind || f.Reason != nil && *f.Reason == "behind"
		return nil
	}
	seqs, err := parked.Find(ctx, conn, schema, f.id)
	if errors.Is(err, parked.ErrNotFound) {
		return f.nothing()
	}
	f.Seqs, f.Behind = seqs, true
	return err
}

// into makes a flag set a text.
func into(target **string) func(string) error {
	return func(text string) error { *target = &text; return nil }
}

// addText adds a flag of a text that PostgreSQL can store.
func addText(flags *pflag.FlagSet, name string, bytesMax int, usage string, set func(string) error) {
	addOption(flags, name, "string", "", usage, func(text string) error {
		if len(text) > bytesMax || !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return fmt.Errorf("want at most %d bytes of UTF-8", bytesMax)
		}
		return set(text)
	})
}

// ageMax is far above what anything is kept.
const ageMax = 10 * 365 * 24 * time.Hour

// addAge adds a flag of a duration that filters only if it is given.
func addAge(flags *pflag.FlagSet, target **time.Duration, name, usage string) {
	addOption(flags, name, "duration", "", usage, func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 || d > ageMax {
			return errors.New("want a duration such as 90s, 15m or 48h")
		}
		*target = &d
		return nil
	})
}

// withTables connects and checks the tables. A writing command needs a primary.
func (s *settings) withTables(ctx context.Context, writes bool, work func(context.Context, *pgx.Conn) error) error {
	connect := s.connect
	if writes {
		connect = s.connectWriting
	}
	conn, err := connect(ctx)
	if err != nil {
		return err
	}
	defer hangUp(ctx, conn)
	if err := migrations.Check(ctx, conn, migrations.Options{Schema: s.schema}); err != nil {
		return err
	}
	return work(ctx, conn)
}
