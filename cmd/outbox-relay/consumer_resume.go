package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/checker"
	"github.com/effectonce/effectonce/internal/consumers"
)

// resumeAt is the command that says where a partition continues.
type resumeAt struct {
	consumerOrder

	s                *settings
	partition        int32
	at               int64
	given            bool
	takeBack, dryRun bool
}

func newConsumerResumeAt(s *settings) *cobra.Command {
	r := &resumeAt{s: s, partition: -1}
	cmd := needs(&cobra.Command{
		Use:   "resume-at",
		Short: "Let a partition continue at another offset",
		Long: `Order the consumer that holds a partition, or the next one, to continue at another offset: at the start of
what Kafka has (earliest), at its end (latest), or at an offset. It is meant for a partition that halted; see
"outbox-relay positions" for why. The holder carries the order out within seconds, and then the order is gone.

What is in front of the position is SKIPPED by an order behind it: these messages have no effect. An order in front
of the position REPEATS messages: those with a claim are dropped as duplicates, those whose claim was forgotten are
parked, and a consumer that deduplicates by position handles all of them a second time. The command says which
offsets; with --dry-run it only says so. With --brokers an offset that the partition does not have is refused.

--cancel takes an order back that was not carried out yet.`,
		Example: `  outbox-relay consumer resume-at --group billing --topic orders --partition 3 --at latest --dry-run
  outbox-relay consumer resume-at --group billing --topic orders --partition 3 --at 4711 --why "INC-12"`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return r.run(cmd.Context(), cmd.OutOrStdout()) },
	}, flagDatabaseURL)
	r.add(s, cmd, "why it is done; required", false)
	flags := cmd.Flags()
	addOption(flags, "partition", "int", "", "number of the partition; required", func(text string) error {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil || n < 0 {
			return errors.New("want a number, from 0 on")
		}
		r.partition = int32(n)
		return nil
	})
	addText(flags, "at", 32, "where it continues: earliest, latest or an offset", func(text string) (err error) {
		r.at, err = consumers.ParseAt(text)
		r.given = true
		return err
	})
	addBool(flags, &r.takeBack, "cancel", "take back an order that was not carried out yet")
	addBool(flags, &r.dryRun, "dry-run", "only say what would be skipped or repeated")
	commandLineOnly(flags, "partition", "at", "cancel", "dry-run")
	order := s.checks[cmd]
	s.checks[cmd] = func() error { return errors.Join(order(), r.check()) }
	return cmd
}

func (r *resumeAt) check() error {
	var problems []error
	if r.partition < 0 {
		problems = append(problems, errors.New("--partition is missing"))
	}
	if r.given == r.takeBack {
		problems = append(problems, errors.New("give --at (earliest, latest or an offset), or else --cancel"))
	}
	if r.takeBack && r.dryRun {
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
	return r.s.onSchema(ctx, func(ctx context.Context, pool *pgxpool.Pool) error {
		if r.takeBack {
			taken, err := consumers.TakeBack(ctx, pool, r.s.schema, r.by(), p)
			if err != nil {
				return err
			}
			return r.printTaken(out, p, taken)
		}
		done, err := consumers.ResumeAt(ctx, pool, r.s.schema, r.by(), p, r.at, extent, r.dryRun)
		switch {
		case err != nil:
			return err
		case r.asJSON:
			return printJSON(out, done)
		}
		return printResumption(out, done)
	})
}

// extent asks the brokers, if they are given. Where the partition does not exist it is nil, too: an order may be meant for a
// topic that comes back.
func (r *resumeAt) extent(ctx context.Context, p consumers.Partition) (*consumers.Extent, error) {
	if len(r.s.brokers) == 0 || r.takeBack {
		return nil, nil //nolint:nilnil // not known is no error
	}
	client, err := r.s.askKafka(statusMax)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, statusMax)
	defer cancel()
	found, err := checker.Extents(ctx, client, time.Time{}, p.Topic)
	if err != nil {
		return nil, fmt.Errorf("%w (without --brokers the offset is not compared with the topic)", err)
	}
	span, exists := found[p.Topic][p.Partition]
	if !exists {
		return nil, nil //nolint:nilnil // as above
	}
	return &consumers.Extent{Start: span.Start, End: span.End}, nil
}

func (r *resumeAt) printTaken(out io.Writer, p consumers.Partition, taken bool) error {
	text := "%s: the order is taken back\n"
	switch {
	case r.asJSON:
		return printJSON(out, map[string]any{"group": p.Group, "topic": p.Topic, "partition": p.Partition, "taken_back": taken})
	case !taken:
		text = "%s: there is no order that was not carried out yet\n"
	}
	_, err := fmt.Fprintf(out, text, printable(p.String()))
	return err
}

func printResumption(out io.Writer, r *consumers.Resumption) error {
	verb, holder := "resumes", "the next consumer that holds it"
	if r.DryRun {
		verb = "would resume"
	}
	if r.Holder != "" {
		holder = plain(r.Holder) + ", or the next holder,"
	}
	text := fmt.Sprintf("%s %s at %s: %s carries it out\n", printable(r.String()), verb, consumers.AtText(r.ResumeAt), holder)
	if r.Before != nil {
		text += fmt.Sprintf("an earlier order is replaced: %s\n", consumers.AtText(*r.Before))
	}
	if r.Trouble != "" {
		text += fmt.Sprintf("the partition does not move: %s\n", clip(r.Trouble, errorWidth))
	}
	_, err := io.WriteString(out, text+"MIND: "+r.Effect+"\n")
	return err
}
