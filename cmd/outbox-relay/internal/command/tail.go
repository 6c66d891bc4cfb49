package command

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
)

type tailer struct {
	*cli.Settings
	trace.Tail
	every         time.Duration
	limit         int // 0: none
	fromBeginning bool
	toEnd         bool
	payload       bool
	shown         int
	out           io.Writer
}

func newTail(s *cli.Settings) *cobra.Command {
	t := &tailer{Settings: s}
	cmd := cli.Needs(&cobra.Command{
		Use:   "tail",
		Short: "Follow the outbox",
		Long: `Show rows of the outbox as they commit, each once: time of the insert, seq, topic, key, ID, size of the payload. It
ends with SIGINT, --limit or --to-end. Rows of a long transaction appear when it ends. With --payload, payloads are
shown up to 4 KiB, as text or base64.`,
		Example: `  outbox-relay tail --topic orders
  outbox-relay tail --from-beginning --to-end --json
  outbox-relay tail --from-beginning --key order-7 --payload --json --limit 10`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t.Tail.Schema, t.out = s.Schema, cmd.OutOrStdout()
			if t.payload {
				t.PayloadMax = payloadShown
			}
			return s.WithTables(cmd.Context(), false, func(ctx context.Context, conn *pgx.Conn) error {
				if err := t.follow(ctx, conn); err != nil && !errors.Is(err, errLimit) && cmd.Context().Err() == nil {
					return err
				}
				return nil // the limit and an interrupt are normal ends
			})
		},
	}, cli.FlagDatabaseURL)
	flags := cmd.Flags()
	cli.AddText(flags, "topic", 249, "only this topic", cli.Into(&t.Topic))
	cli.AddText(flags, "key", 1<<20, "only this key, as text or as base64:...", func(text string) (err error) {
		t.Key, err = human.ParseKey(text)
		return err
	})
	cli.AddBool(flags, &t.fromBeginning, "from-beginning", "show existing rows first")
	cli.AddBool(flags, &t.toEnd, "to-end", "end once all committed rows are shown")
	cli.AddInt(flags, &t.limit, flagLimit, 0, 0, 1_000_000_000, "end after this many rows; 0: never")
	cli.AddDuration(flags, &t.every, "every", 250*time.Millisecond, 10*time.Millisecond, time.Minute, "pause between two reads")
	cli.AddBool(flags, &t.payload, "payload", "show payloads")
	cli.CommandLineOnly(flags, "topic", "key", "from-beginning", "to-end", flagLimit, "payload")
	s.AddJSONLines(cmd)
	return cmd
}

var errLimit = errors.New("enough rows")

func (t *tailer) follow(ctx context.Context, conn *pgx.Conn) error {
	if err := t.Start(ctx, conn, t.fromBeginning); err != nil {
		return err
	}
	look := time.NewTicker(t.every)
	defer look.Stop()
	for {
		behind, err := t.Next(ctx, conn, t.show)
		if err != nil {
			return err
		}
		if behind {
			continue
		}
		if t.toEnd {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tailLine is what "tail --json" prints of a row.
type tailLine struct {
	trace.TailRow
	*payload // with --payload
}

func (t *tailer) show(r trace.TailRow) (err error) {
	line := tailLine{TailRow: r}
	if t.payload {
		line.payload = new(newPayload(r.Payload, r.PayloadBytes))
	}
	if t.JSON {
		err = terminal.PrintJSON(t.out, line)
	} else {
		_, err = io.WriteString(t.out, line.text())
	}
	if t.shown++; err == nil && t.limit > 0 && t.shown >= t.limit {
		return errLimit
	}
	return err
}

func (l *tailLine) text() string {
	size := "tombstone"
	if l.PayloadBytes != nil {
		size = human.Count(*l.PayloadBytes, "byte")
	}
	text := terminal.Fill("%s  %d  %s  %s  %s  %s\n", l.CreatedAt.UTC().Format("2006-01-02T15:04:05.000Z"), l.Seq, l.Topic, keyText(l.Key), l.ID, size)
	switch {
	case l.payload == nil:
	case l.payload.Payload != nil:
		text += "  " + terminal.Printable(*l.payload.Payload) + "\n"
	case l.PayloadBase64 != nil:
		text += "  base64:" + *l.PayloadBase64 + "\n"
	}
	return text
}
