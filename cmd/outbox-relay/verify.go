package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/verify"
)

func newVerify(s *settings) *cobra.Command {
	var opts verify.Options
	var topic *string
	var group *string
	var timeout time.Duration
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "verify",
		Short: "Compare the outbox with the topics, and the topics with a group's claims",
		Long: `Compare the rows that are still in the outbox with the topics: published rows that are not there, records
that are there twice, records behind a later row of their key. With --group also records before the
group's position that it has not claimed: leave it out for consumers that deduplicate by position, and
give --since for groups that began at the end of their topics.

It may run while rows are published and consumed: progress is read first, then the topics up to the end
that they have at that later moment; Kafka transactions that are open there are waited for, and one that
hangs is an error that names it. Rows of topics that Kafka has deleted by age are counted, not
judged. Records beyond the first of their ID are no fault of consumers, who drop them, and the usual
trace of a relay that was killed: --allow-duplicates.

--topic-prefix and --routes have to be those of the relay.

Memory is bounded; about 60 bytes for each row and record are kept in the directory for temporary files
(TMPDIR). Nothing is changed. Exit status 1 if anything is wrong.`,
		Example: `  outbox-relay verify --since 24h
  outbox-relay verify --topic orders --group billing --allow-duplicates --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.Schema, opts.Relay = s.schema, s.relay
			if topic != nil {
				opts.Topics = []string{*topic}
			}
			if group != nil {
				opts.Group = *group
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return s.verify(ctx, opts, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr(), s.logger(cmd.ErrOrStderr()))
		},
	}, flagDatabaseURL, flagBrokers)
	flags := cmd.Flags()
	addDuration(flags, &opts.Since, "since", 0, 0, 10*366*24*time.Hour, "only rows and records that are younger; 0s: all")
	addText(flags, "topic", 249, "only this topic", into(&topic))
	addRoutes(flags, &opts.Routes)
	addText(flags, "group", 255, "also look for the claims of this consumer group", into(&group))
	addBool(flags, &opts.DuplicatesAllowed, "allow-duplicates", "records that are there twice are reported, and are well")
	addInt(flags, &opts.Examples, "examples", 10, 0, 10_000, "how many of each finding are listed")
	addDuration(flags, &timeout, "timeout", 24*time.Hour, time.Second, 30*24*time.Hour, "how long all of it may take")
	commandLineOnly(flags, "since", "topic", "group", "allow-duplicates")
	addJSON(cmd, &asJSON)
	return cmd
}

func (s *settings) verify(ctx context.Context, opts verify.Options, asJSON bool, out, progress io.Writer, logger *slog.Logger) error {
	return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
		kafka, err := s.openKafka(logger)
		if err != nil {
			return err
		}
		defer kafka.Client.Close()
		screen := newScreen(progress)
		if screen.terminal {
			opts.Progress = func(phase string, done int64) { screen.step("%s: %d", phase, done) }
		}
		report, err := verify.Run(ctx, conn, kafka, opts)
		screen.end()
		if err != nil {
			return err
		}
		if asJSON {
			err = printJSON(out, report)
		} else {
			_, err = io.WriteString(out, verifyText(report))
		}
		if err == nil && !report.Well {
			return errNotWell
		}
		return err
	})
}

func verifyText(r *verify.Report) string {
	var text strings.Builder
	fmt.Fprintf(&text, "relay %s: %d rows, %d of them published; %d records in %d topics\n", plain(r.Relay), r.Rows, r.Published, r.Records, len(r.Topics))
	if r.Group != "" {
		fmt.Fprintf(&text, "group %s: %d claims looked for\n", plain(r.Group), r.Claimed)
	}
	for _, note := range []struct {
		count int64
		text  string
	}{
		{r.Foreign, "records are not the relay's: they carry no message-id"},
		{r.Dropped, "published rows are dropped by a rule of --routes"},
		{r.Expired, "published rows are not judged: Kafka has deleted the records of their time"},
		{r.Moved, "keys have records in several partitions, as after partitions were added: their order is judged within each"},
	} {
		if note.count > 0 {
			fmt.Fprintf(&text, "%d %s\n", note.count, note.text)
		}
	}
	for _, f := range []struct {
		verify.Finding
		text string
	}{
		{r.Missing, "published rows are not in their topic"},
		{r.Duplicates, "records are there again"},
		{r.OutOfOrder, "records come behind a later row of their key: the writer did not hold the key's lock when it inserted, or the topic was written by others"},
		{r.Unclaimed, "records before the group's position are not claimed"},
	} {
		if f.Count == 0 {
			continue
		}
		fmt.Fprintf(&text, "%d %s\n", f.Count, f.text)
		for _, example := range f.Examples {
			fmt.Fprintf(&text, "  %s\n", printable(example))
		}
		if more := f.Count - int64(len(f.Examples)); more > 0 {
			fmt.Fprintf(&text, "  and %d more\n", more)
		}
	}
	if r.Well {
		text.WriteString("well\n")
	} else {
		text.WriteString("not well\n")
	}
	return text.String()
}
