package main

import (
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

func newDead(s *cli.Settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dead",
		Short: "Show, retry or discard rows that Kafka did not accept",
		Long: `Rows that Kafka did not accept wait in outbox_dead. The first dead row of a key holds the key: later rows of the key
wait behind it, in order. An operator decides:

  outbox-relay dead list                     # what waits, and why
  outbox-relay dead show ID                  # all about one row, and what to do
  outbox-relay dead retry --id ID --wait     # publish it, and the rows behind it
  outbox-relay dead discard --id ID --why …  # never publish it; the rows behind it continue`,
	}
	cmd.AddCommand(
		newList(s, newDeadRows(s), &cobra.Command{
			Use:   "list",
			Short: "List dead rows, the newest first",
			Long: `List dead rows, the newest first, with the number of rows behind each, and totals by reason. --state behind, or --id,
lists rows behind others. Without --relay it lists rows of all relays.`,
		}),
		newShow(s, newDeadRows(s), &cobra.Command{
			Use:   "show ID",
			Short: "Show all about a dead row, and what to do",
			Long: `Show a dead row: headers, payload (text or base64, up to 4 KiB without --full), error, rows behind it, operators'
actions, and what to do. ID is the row's id or seq, as in the relay's log. If several relays have it, all are shown.`,
		}),
		newRetry(s, newDeadRows(s), &cobra.Command{
			Use:   "retry",
			Short: "Hand dead rows back to the running relay",
			Long: `Hand dead rows back to the running relay. It publishes them within about a second, then the rows behind them, in
order. A row that Kafka refuses again is held again. Only the first row of a key can be retried; the others follow.
Rows of a missing topic need no retry: they follow once it exists.

With --wait, exit status 1 if a row is held again, or not done within --wait-max. Retries are recorded.

  outbox-relay dead retry --id 0199a0c4-… --wait
  outbox-relay dead retry --reason too_large --topic orders --why "limit raised to 4 MiB" --wait`,
		}),
		newDiscard(s, newDeadRows(s), &cobra.Command{
			Use:   "discard",
			Short: "Discard dead rows: they are never published",
			Long: `Discard dead rows: they are never published. The rows behind them go to the relay, in order, or are discarded too with
--all-of-key. Only the first row of a key can be discarded alone, and none that was handed back: the relay may be
publishing it. Discards are recorded without the payload: see "dead show" first.

  outbox-relay dead discard --id 0199a0c4-… --why "test order"
  outbox-relay dead discard --topic oders --all-of-key --yes --why "misspelt topic"`,
		}),
	)
	return cmd
}
