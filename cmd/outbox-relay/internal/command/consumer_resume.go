package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
)

// resumeAt is the command that sets where a partition continues.
type resumeAt struct {
	consumerChange

	s              *cli.Settings
	partition      int32
	at             int64
	given          bool
	cancel, dryRun bool
}

func newConsumerResumeAt(s *cli.Settings) *cobra.Command {
	r := &resumeAt{s: s, partition: -1}
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "resume-at",
		Short: "Make a partition continue at another offset",
		Long: `Request that the holder of a partition, or its next holder, continues at another offset: at the start of the topic
(earliest), at its end (latest), or at a given offset. For halted partitions; "outbox-relay positions" says why one
halted. The holder does it once, within seconds.

A later offset SKIPS messages: they have no effect. An earlier offset REPEATS messages: those with a claim are
dropped, those whose claim was forgotten are parked, and a consumer that deduplicates by position handles all of them
again. The command prints the offsets affected. With --brokers it refuses an offset that the partition does not have.`,
		Example: `  outbox-relay consumer resume-at --group billing --topic orders --partition 3 --at latest --dry-run
  outbox-relay consumer resume-at --group billing --topic orders --partition 3 --at 4711 --why "INC-12"`,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.run(cmd.Context(), cmd.OutOrStdout()) },
	}, cli.FlagDatabaseURL))
	s.Check(cmd, r.Validate)
	r.add(s, cmd, "not recorded: a dry run")
	cmd.Flags().Lookup("why").Usage = "reason; required"
	flags := cmd.Flags()
	cli.AddOption(flags, "partition", "int", "", "number of the partition; required", func(text string) error {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 0 {
			return errors.New("want a number, from 0 on")
		}
		r.partition = int32(n)
		return nil
	})
	cli.AddText(flags, "at", 32, "where it continues: earliest, latest or an offset", func(text string) (err error) {
		r.at, err = consumers.ParseAt(text)
		r.given = true
		return err
	})
	cli.AddBool(flags, &r.cancel, "cancel", "cancel a request that is not done yet")
	cli.AddBool(flags, &r.dryRun, "dry-run", "only show what would be skipped or repeated")
	cli.CommandLineOnly(flags, "partition", "at", "cancel", "dry-run")
	return cmd
}

// Validate returns all problems of the flags.
func (r *resumeAt) Validate() error {
	var problems []error
	if r.partition < 0 {
		problems = append(problems, errors.New("--partition is missing"))
	}
	if r.given == r.cancel {
		problems = append(problems, errors.New("give --at (earliest, latest or an offset), or else --cancel"))
	}
	if r.cancel && r.dryRun {
		problems = append(problems, errors.New("--dry-run is for --at"))
	}
	if r.Why == "" && !r.dryRun {
		problems = append(problems, errors.New("--why is missing: say why it is done"))
	}
	return errors.Join(problems...)
}

func (r *resumeAt) run(ctx context.Context, out io.Writer) error {
	p := consumers.Partition{Group: r.group, Topic: r.topic, Partition: r.partition}
	extent, err := r.extent(ctx, p)
	if err != nil {
		return err
	}
	return r.s.OnSchema(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if r.cancel {
			canceled, err := consumers.Cancel(ctx, pool, r.s.Schema, r.By, p)
			if err != nil {
				return err
			}
			text := "the request is canceled"
			if !canceled {
				text = "there is no request to cancel"
			}
			return say(out, r.s.JSON, map[string]any{"group": p.Group, "topic": p.Topic, "partition": p.Partition, "canceled": canceled}, "%s: %s\n", p.String(), text)
		}
		done, err := consumers.ResumeAt(ctx, pool, r.s.Schema, r.By, p, r.at, extent, r.dryRun)
		if err != nil {
			return err
		}
		return answer(out, r.s.JSON, done, resumptionText(done), true)
	})
}

// extent asks the brokers, if they are given. It is also nil for a partition that does not exist:
// the request may be for a topic that is created again.
func (r *resumeAt) extent(ctx context.Context, p consumers.Partition) (*consumers.Extent, error) {
	if len(r.s.Brokers) == 0 || r.cancel {
		return nil, nil //nolint:nilnil // not known is no error
	}
	client, err := r.s.KafkaClient(cli.ReadMax)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, cli.ReadMax)
	defer cancel()
	found, err := topicscan.Extents(ctx, client, time.Time{}, p.Topic)
	if err != nil {
		return nil, fmt.Errorf("%w (without --brokers the offset is not compared with the topic)", err)
	}
	span, exists := found[p.Topic][p.Partition]
	if !exists {
		return nil, nil //nolint:nilnil // as above
	}
	return &consumers.Extent{Start: span.Start, End: span.End}, nil
}

func resumptionText(r *consumers.Resumption) string {
	verb, holder := "resumes", "the next consumer that holds it"
	if r.DryRun {
		verb = "would resume"
	}
	if r.Holder != "" {
		holder = terminal.Plain(r.Holder) + ", or the next holder,"
	}
	text := terminal.Fill("%s %s at %s: %s does it\n", r.String(), verb, consumers.AtText(r.ResumeAt), holder)
	if r.Before != nil {
		text += terminal.Fill("this replaces an earlier request: %s\n", consumers.AtText(*r.Before))
	}
	if r.Trouble != "" {
		text += terminal.Fill("the partition is halted: %s\n", terminal.Line(r.Trouble))
	}
	return text + "Warning: " + r.Effect + "\n"
}
