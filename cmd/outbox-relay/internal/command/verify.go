package command

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
)

func newVerify(s *cli.Settings) *cobra.Command {
	var opts trace.VerifyOptions
	var topic *string
	var group *string
	var timeout time.Duration
	cmd := cli.AsksKafka(cli.Needs(&cobra.Command{
		Use:   "verify",
		Short: "Compare the outbox with the topics, and the topics with a group's claims",
		Long: `Compare the rows in the outbox with the topics. It reports published rows without a record, duplicate records, and
records behind a later row of their key. With --group also records before the group's position that it has not claimed:
omit it for consumers that deduplicate by position, and give --since for groups that began at the end of their topics.

It may run while rows are published and consumed. It waits for open Kafka transactions; one that hangs is an error that
names it. Rows whose records Kafka deleted by age are counted, not judged. A killed relay usually leaves duplicates,
which consumers drop: see --allow-duplicates.

Give the relay's --topic-prefix. Memory is bounded; about 60 bytes per row and record go to the directory of
temporary files (TMPDIR). Nothing is changed. Exit status 1 if anything is wrong.`,
		Example: `  outbox-relay verify --since 24h
  outbox-relay verify --topic orders --group billing --allow-duplicates --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Schema, opts.Relay = s.Schema, s.Relay
			if topic != nil {
				opts.Topics = []string{*topic}
			}
			if group != nil {
				opts.Group = *group
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			screen := terminal.NewScreen(cmd.ErrOrStderr())
			if screen.Overwrites() {
				opts.Progress = func(phase string, done int64) { screen.Step("%s: %d", phase, done) }
			}
			return s.WithTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				return withKafka(s, s.Logger(cmd.ErrOrStderr()), func(kafka *trace.Kafka) error {
					report, err := trace.Verify(ctx, conn, kafka, opts)
					screen.End()
					if err != nil {
						return err
					}
					return answer(cmd.OutOrStdout(), s.JSON, report, verifyText(report), report.Well)
				})
			})
		},
	}, cli.FlagDatabaseURL, cli.FlagBrokers))
	flags := cmd.Flags()
	cli.AddDuration(flags, &opts.Since, "since", 0, 0, 10*366*24*time.Hour, "only rows and records younger than this; 0s: all")
	cli.AddText(flags, "topic", 249, "only this topic", cli.Into(&topic))
	addTopicPrefix(flags, &opts.TopicPrefix)
	cli.AddText(flags, "group", 255, "also check the claims of this consumer group", cli.Into(&group))
	cli.AddBool(flags, &opts.DuplicatesAllowed, "allow-duplicates", "report duplicate records, but accept them")
	cli.AddInt(flags, &opts.Examples, "examples", 10, 0, 10_000, "list at most this many of each finding")
	cli.AddDuration(flags, &timeout, "timeout", 24*time.Hour, time.Second, 30*24*time.Hour, "time limit of the command")
	cli.CommandLineOnly(flags, "since", "topic", "group", "allow-duplicates")
	s.AddJSON(cmd)
	return cmd
}

func verifyText(r *trace.Report) string {
	var text strings.Builder
	terminal.Add(&text, "relay %s: %s, %d of them published; %s in %s\n", terminal.Plain(r.Relay), human.Count(r.Rows, "row"), r.Published, human.Count(r.Records, "record"), human.Count(len(r.Topics), "topic"))
	if r.Group != "" {
		terminal.Add(&text, "group %s: %s checked\n", terminal.Plain(r.Group), human.Count(r.Claimed, "claim"))
	}
	for _, note := range []struct {
		count int64
		text  string
	}{
		{r.Foreign, "records are not the relay's: they carry no message-id"},
		{r.Expired, "published rows are not judged: Kafka has deleted the records of their time"},
		{r.Moved, "keys have records in several partitions, as after partitions were added: their order is judged per partition"},
	} {
		if note.count > 0 {
			terminal.Add(&text, "%d %s\n", note.count, note.text)
		}
	}
	for _, f := range []struct {
		trace.Finding
		text string
	}{
		{r.Missing, "published rows are not in their topic: lost, or in a compacted topic deleted since a later record has their key"},
		{r.Duplicates, "records are duplicates"},
		{r.OutOfOrder, "records come behind a later row of their key: the writer did not hold the key's lock when it inserted, or others write to the topic"},
		{r.Unclaimed, "records before the group's position are not claimed"},
	} {
		if f.Count == 0 {
			continue
		}
		terminal.Add(&text, "%d %s\n", f.Count, f.text)
		for _, example := range f.Examples {
			terminal.Add(&text, "  %s\n", example)
		}
		if more := f.Count - int64(len(f.Examples)); more > 0 {
			terminal.Add(&text, "  and %d more\n", more)
		}
	}
	for _, note := range r.Notes {
		terminal.Add(&text, "note: %s\n", note)
	}
	for _, what := range r.Unchecked {
		terminal.Add(&text, "not checked: %s\n", what)
	}
	if r.Well {
		text.WriteString("well: nothing that was compared is missing or out of order; for what waits, see \"outbox-relay status\"\n")
	} else {
		text.WriteString("not well\n")
	}
	return text.String()
}
