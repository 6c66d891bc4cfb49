package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/internal/dead"
	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/internal/parked"
)

func newDead(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dead",
		Short: "Look at rows that Kafka did not take, retry or discard them",
		Long: `Rows that Kafka did not take wait in outbox_dead. The first of a key holds the key: later ones wait
behind it, in order, and everything else flows. What becomes of it is the operator's decision:

  outbox-relay dead list                     # what waits, and why
  outbox-relay dead show ID                  # everything about one, and what to do
  outbox-relay dead retry --id ID --wait     # the running relay publishes it, and what is behind it
  outbox-relay dead discard --id ID --why …  # it is never published; what is behind it goes on`,
	}
	cmd.AddCommand(newDeadList(s), newDeadShow(s), newDeadRetry(s), newDeadDiscard(s))
	return cmd
}

// deadFilter are the flags that choose rows. They come from the command line alone: what a deployment put
// into the environment must not decide what is discarded.
type deadFilter struct {
	dead.Filter
	id    bool
	limit int
}

func (f *deadFilter) add(cmd *cobra.Command, limit int) {
	flags := cmd.Flags()
	addText(flags, "id", 255, "the row's id or seq, as the relay's log shows them", func(text string) error {
		f.id = true
		return f.SetID(text)
	})
	addText(flags, "key", 1<<20, "the row's key, as text or as base64:...", func(text string) (err error) {
		f.Key, err = parked.ParseKey(text)
		return err
	})
	addText(flags, "topic", 249, "topic", into(&f.Topic))
	oneOfThese := func(name, usage string, known []string, target **string) {
		addOption(flags, name, "string", "", usage+" ("+strings.Join(known, ", ")+")", func(text string) error {
			if !slices.Contains(known, text) {
				return errors.New("want one of " + strings.Join(known, ", "))
			}
			return into(target)(text)
		})
	}
	oneOfThese("reason", "why it is dead", dead.Reasons(), &f.Reason)
	oneOfThese("state", "what it waits for", dead.States(), &f.State)
	addAge(flags, &f.OlderThan, "older-than", "dead for longer than this")
	addAge(flags, &f.YoungerThan, "younger-than", "dead for less than this")
	addInt(flags, &f.limit, flagLimit, limit, 1, operator.TargetsMax, "how many rows at most")
	commandLineOnly(flags, "id", "key", "topic", "reason", "state", "older-than", "younger-than", flagLimit)
}

// settle adds what only the command knows: --relay narrows, too, wherever it was set.
func (f *deadFilter) settle(s *settings, cmd *cobra.Command) {
	if cmd.Flags().Changed("relay") {
		f.Relay = &s.relay
	}
	// Rows that wait behind others are of interest only to whoever asks for them.
	f.Behind = f.id || f.Reason != nil && *f.Reason == "behind" || f.State != nil && *f.State == "behind"
}

// given tells whether rows were chosen. The name of a relay chooses none: a deployment may have set it.
func (f *deadFilter) given() bool {
	return f.id || f.Key != nil || f.Topic != nil || f.Reason != nil || f.State != nil || f.OlderThan != nil || f.YoungerThan != nil
}

// nothing is the error of a filter that fits nothing.
func (f *deadFilter) nothing() error {
	if f.given() || f.Relay != nil {
		return errors.New("no dead row fits: \"outbox-relay dead list\" shows what there is")
	}
	return errors.New("no row is dead")
}
