package main

import "github.com/spf13/cobra"

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
	cmd.AddCommand(
		newList(s, newDeadRows(s), &cobra.Command{
			Use:   "list",
			Short: "List dead rows, the newest first",
			Long: `List rows that Kafka did not take, the newest first, with what waits behind each and the totals by
reason. What is behind another row is listed with --state behind, or by its --id. With --relay only the
rows of that relay, else of all. With --json there is one object a line and nothing else. Exit status 1
if no row fits.`,
		}),
		newShow(s, newDeadRows(s), &cobra.Command{
			Use:   "show ID",
			Short: "Show everything about a dead row, and what to do",
			Long: `Show everything about a row that Kafka did not take: headers and payload, the error in full, what waits
behind it, what operators did with it, and what to do. ID is the row's id or its seq, as the relay's log
shows them. Several are shown if the row is dead for several relays: --relay chooses one.

The payload is shown as text, or as base64 if it is none, up to 4 KiB unless --full.`,
		}),
		newRetry(s, newDeadRows(s), &cobra.Command{
			Use:   "retry",
			Short: "Hand dead rows back to the running relay",
			Long: `Hand dead rows back to the running relay: it publishes them within about a second, and then what waits
behind them, in order. One that Kafka still does not take is held again, with the new error.
Only the first row of a key can be retried; the others follow it. Rows of a topic that did not exist need
no retry: they follow by themselves once it does.

With --wait it reports how many were published; exit status 1 if one is held again, or is not done within
--wait-max. Every retry is written down: see "outbox-relay actions list".

  outbox-relay dead retry --id 0199a0c4-… --wait
  outbox-relay dead retry --reason too_large --topic orders --why "limit raised to 4 MiB" --wait`,
		}),
		newDiscard(s, newDeadRows(s), &cobra.Command{
			Use:   "discard",
			Short: "Give dead rows up: they are never published",
			Long: `Give dead rows up: they are never published. What waits behind one is handed back to the relay, in order;
with --all-of-key it is given up as well. Only the first row of a key can be discarded alone. One that was
handed back already cannot be discarded: the relay may be publishing it.

Every discard is written down, with --why: see "outbox-relay actions list". The payload is not kept there:
look at it with "outbox-relay dead show" before.

  outbox-relay dead discard --id 0199a0c4-… --why "test order"
  outbox-relay dead discard --topic oders --all-of-key --why "the name was a typing mistake"`,
		}),
	)
	return cmd
}
