package main

import (
	"github.com/spf13/cobra"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

func newParked(s *cli.Settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "parked",
		Short: "Show, retry or discard messages that could not be handled",
		Long: `Messages that a consumer could not handle wait in parked_messages. The first parked message of a key holds the key:
later messages of the key wait behind it, in order. An operator decides:

  outbox-relay parked list                     # what waits, and why
  outbox-relay parked show ID                  # all about one message, and what to do
  outbox-relay parked retry --id ID --wait     # handle it, and the messages behind it
  outbox-relay parked discard --id ID --why …  # never handle it; the messages behind it continue`,
	}
	cmd.AddCommand(
		newList(s, newParkedMessages(s), &cobra.Command{
			Use:   "list",
			Short: "List parked messages, the newest first",
			Long: `List parked messages, the newest first, with the number of messages behind each, and totals by reason. --reason behind,
or --id, lists messages behind others.`,
		}),
		newParkedShow(s, &cobra.Command{
			Use:   "show ID",
			Short: "Show all about a parked message, and what to do",
			Long: `Show a parked message: headers, payload (text or base64, up to 4 KiB without --full), error, messages behind it,
operators' actions, and what to do. ID is the message's ID, as in the log or as the message carried it, or
topic/partition/offset. If several consumers parked it, all are shown.`,
		}),
		newRetry(s, newParkedMessages(s), &cobra.Command{
			Use:   "retry",
			Short: "Hand parked messages back to the running consumers",
			Long: `Hand parked messages back to the running consumers. The partition's holder handles them within about a second, then the
messages behind them, in order. A message that fails again is parked again. Only the first message of a key can be
retried; the others follow.

With --wait, exit status 1 if a message fails again, or is not done within --wait-max. Retries are recorded.`,
		}),
		newDiscard(s, newParkedMessages(s), &cobra.Command{
			Use:   "discard",
			Short: "Discard parked messages: they are never handled",
			Long: `Discard parked messages: they are never handled, and their rows are deleted. The messages behind them go to the
consumers, in order, or are discarded too with --all-of-key. Only the first message of a key can be discarded alone.
Discards are recorded without the payload: see "parked show" first.`,
		}),
	)
	return cmd
}
