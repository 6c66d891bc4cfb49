package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/parked"
)

func newActions(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "actions",
		Short: "Look at what operators did",
	}
	cmd.AddCommand(newActionsList(s))
	return cmd
}

func newActionsList(s *settings) *cobra.Command {
	var filter parked.ActionFilter
	var limit int
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "list",
		Short: "List what operators did, the newest first",
		Long: `List every retry, discard and reset: who did it, when, why and to what, the newest first. With --json there
is one object a line. Exit status 1 if there is none.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), statusMax)
			defer cancel()
			return s.withTables(ctx, false, func(ctx context.Context, conn *pgx.Conn) error {
				actions, err := parked.Actions(ctx, conn, s.schema, filter, limit)
				if err != nil {
					return err
				}
				if len(actions) == 0 {
					return errors.New("no operator did anything that fits")
				}
				return printActions(cmd.OutOrStdout(), actions, asJSON)
			})
		},
	}, flagDatabaseURL)
	addAge(cmd.Flags(), &filter.YoungerThan, "younger-than", "done in this time")
	addInt(cmd.Flags(), &limit, flagLimit, parkedListMax, 1, 100_000, "how many at most")
	addJSON(cmd, &asJSON)
	return cmd
}

func printActions(out io.Writer, actions []parked.Action, asJSON bool) error {
	var text strings.Builder
	text.WriteString("when\twho\twhat\tto what\twhy\n")
	for _, a := range actions {
		if asJSON {
			if err := printJSON(out, a); err != nil {
				return err
			}
			continue
		}
		fmt.Fprintf(&text, "%s\t%s\t%s\t%s\t%s\n", a.When.UTC().Format(time.RFC3339), clip(a.Who, keyWidth), printable(a.What), a.Object(), clip(a.Why, errorWidth))
	}
	if asJSON {
		return nil
	}
	return printTable(out, text.String())
}
