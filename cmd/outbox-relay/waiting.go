package main

import (
	"context"
	"io"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
)

// waiting is a table of rows that wait for an operator, such as dead rows, and the flags that
// choose some of them. Each command has its own. P identifies a row, R is a listed row.
type waiting[P, R any] interface {
	words() words
	chooser
	reader[P, R]
	printer[R]
	actor[P, R]
}

type chooser interface {
	add(flags *pflag.FlagSet)
	name(id string) error // chooses a row by an ID as people have it
	// resolve runs before rows are read. It completes the choice from the database and the other
	// flags.
	resolve(ctx context.Context, conn *pgx.Conn, flags *pflag.FlagSet) error
	choice() choice  // what the flags choose
	nothing() string // the text if no row matches
}

// choice says how the flags choose rows.
type choice int

const (
	chooseAll  choice = iota // no filter is given
	chooseSome               // a filter
	chooseOne                // by ID, so that no match is an error
)

type reader[P, R any] interface {
	list(ctx context.Context, conn *pgx.Conn, limit int) ([]R, error)                     // the chosen rows, the newest first
	these(ctx context.Context, conn *pgx.Conn, places []P, limit int) ([]R, error)        // the rows at places, as list does
	targets(ctx context.Context, conn *pgx.Conn, limit int) ([]P, error)                  // the chosen rows, the oldest first
	totals(ctx context.Context, conn *pgx.Conn) (string, error)                           // the text below a list
	show(ctx context.Context, conn *pgx.Conn, place P, payloadMax int64) (*detail, error) // or queue.ErrNotFound
}

type printer[R any] interface {
	print(out io.Writer, rows []R) error
}

type actor[P, R any] interface {
	named() bool // whether rows behind others may be chosen too
	queued(row R) queued[P]
	// act retries or discards rows. report includes the result.
	act(ctx context.Context, conn *pgx.Conn, o *order, places []P) (outcome, error)
	look(ctx context.Context, conn *pgx.Conn) (queue.Report, error)
	report(common actReport) any // for --json
}

// words are a table's texts.
type words struct {
	command, row string // "dead", "row": the command is also what the rows are
	filters      string // flags that choose rows
	why          string // help of --reason
	wait         string // what --wait waits for
	lost         string // the fate of a discarded row
	// The results of rows that were handed back.
	finished, failed, unfinished string
}

func (w words) rows() string { return w.row + "s" }

// queued is a row's place in its queue.
type queued[P any] struct {
	place P
	id    uuid.UUID
	at    string     // its place, for people
	head  *uuid.UUID // the row that it waits behind
}

// filter is what the flags of every table set.
type filter struct {
	key                    *human.Key
	topic, reason          **string
	olderThan, youngerThan **time.Duration
}

// add adds flags. They only come from the command line: a deployment's environment must not decide
// what is discarded.
func (f filter) add(flags *pflag.FlagSet, w words, reasons []string) {
	cli.AddText(flags, "key", 1<<20, "key, as text or as base64:...", func(text string) (err error) {
		*f.key, err = human.ParseKey(text)
		return err
	})
	cli.AddText(flags, "topic", 249, "topic", cli.Into(f.topic))
	cli.AddOneOf(flags, f.reason, "reason", w.why, reasons)
	cli.AddAge(flags, f.olderThan, "older-than", w.command+" for longer")
	cli.AddAge(flags, f.youngerThan, "younger-than", w.command+" for less")
	cli.CommandLineOnly(flags, "id", "key", "topic", "reason", "older-than", "younger-than")
}

const (
	flagAll   = "all"
	flagLimit = "limit"
)

func addLimit(flags *pflag.FlagSet, limit *int, standard int, w words) {
	cli.AddInt(flags, limit, flagLimit, standard, 1, queue.TargetsMax, "at most this many "+w.rows())
	cli.CommandLineOnly(flags, flagLimit)
}
