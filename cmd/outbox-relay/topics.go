package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/internal/relays"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/relay"
)

func newTopics(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "topics",
		Short: "Pause and resume topics",
		Long: `Pause and resume topics. The rows of a paused topic wait in outbox_dead, with what comes behind them in their
keys; all other topics go on. When it is resumed they are published in their order.

  outbox-relay topics pause orders --why "consumer has a bug, see INC-12"
  outbox-relay topics resume orders
  outbox-relay topics list`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newTopicsChange(s, "pause", "Let the rows of topics wait", "paused", relay.Pause),
		newTopicsChange(s, "resume", "Publish the rows of paused topics", "resumed", relay.Resume),
		newTopicsList(s),
	)
	return cmd
}

type changeTopics func(ctx context.Context, pool *pgxpool.Pool, schema, name, who, why string, topics ...string) ([]string, error)

func newTopicsChange(s *settings, verb, short, done string, change changeTopics) *cobra.Command {
	by := operator.By{Why: "by hand"}
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   verb + " TOPIC...",
		Short: short,
		Long:  short + ". The relay takes note within three seconds; who and why are kept: see \"outbox-relay actions list\".",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, topics []string) error {
			if by.Who == "" {
				by.Who = whoami()
			}
			return s.onSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				if err := s.knowsRelay(ctx, pool); err != nil {
					return err
				}
				changed, err := change(ctx, pool, s.schema, s.relay, by.Who, by.Why, topics...)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), map[string]any{done: append([]string{}, changed...)})
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d of %d topics %s\n", len(changed), len(topics), done)
				return err
			})
		},
	}, flagDatabaseURL)
	addText(cmd.Flags(), "why", 2048, "why it is done", func(text string) error { by.Why = text; return nil })
	addText(cmd.Flags(), "by", 255, "who does it; default: the user and the machine", func(text string) error { by.Who = text; return nil })
	addJSON(cmd, &asJSON)
	commandLineOnly(cmd.Flags(), "why")
	return cmd
}

// knowsRelay refuses a name that no relay has, though others are there: nobody would take note of the change. Before the
// first relay runs any name may be meant.
func (s *settings) knowsRelay(ctx context.Context, pool *pgxpool.Pool) error {
	all, err := relays.List(ctx, pool, s.schema)
	if err != nil {
		return err
	}
	var names []string
	for _, r := range all {
		if r.Relay == s.relay {
			return nil
		}
		names = append(names, plain(r.Relay))
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("relay %s: %w; there is %s: give it with --relay", plain(s.relay), relay.ErrUnknownRelay, strings.Join(names, ", "))
}

func newTopicsList(s *settings) *cobra.Command {
	var asJSON bool
	cmd := needs(&cobra.Command{
		Use:   "list",
		Short: "Show which topics are paused, since when and why",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.onSchema(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool) error {
				paused, err := relay.PausedTopics(ctx, pool, s.schema, s.relay)
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), map[string]any{"paused": append([]relay.PausedTopic{}, paused...)})
				}
				return printPaused(cmd.OutOrStdout(), paused)
			})
		},
	}, flagDatabaseURL)
	addJSON(cmd, &asJSON)
	return cmd
}

func printPaused(out io.Writer, paused []relay.PausedTopic) error {
	if len(paused) == 0 {
		_, err := io.WriteString(out, "no topic is paused\n")
		return err
	}
	for _, p := range paused {
		if _, err := fmt.Fprintf(out, "%s  since %s  by %s: %s\n", plain(p.Topic), p.PausedAt.UTC().Format(time.RFC3339), plain(p.Who), plain(p.Why)); err != nil {
			return err
		}
	}
	return nil
}

// onSchema runs f with a pool of the primary whose schema fits.
func (s *settings) onSchema(ctx context.Context, f func(ctx context.Context, pool *pgxpool.Pool) error) error {
	ctx, cancel := context.WithTimeout(ctx, changeMax)
	defer cancel()
	pool, err := s.connectPrimary(ctx, 1)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Check(ctx, pool, migrations.Options{Schema: s.schema}); err != nil {
		return err
	}
	return f(ctx, pool)
}

const changeMax = 30 * time.Second
