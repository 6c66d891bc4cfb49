package main

import "github.com/spf13/cobra"

func newParked(s *settings) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "parked",
		Short: "Look at messages that could not be handled, retry or discard them",
		Long: `Messages that a consumer could not handle wait in parked_messages. The first of a key holds the key:
later ones wait behind it, in order. What becomes of it is the operator's decision:

  outbox-relay parked list                     # what waits, and why
  outbox-relay parked show ID                  # everything about one, and what to do
  outbox-relay parked retry --id ID --wait     # the running consumers handle it, and what is behind it
  outbox-relay parked discard --id ID --why …  # it is never handled; what is behind it goes on`,
	}
	cmd.AddCommand(
		newList(s, newParkedMessages(s), &cobra.Command{
			Use:   "list",
			Short: "List parked messages, the newest first",
			Long: `List parked messages, the newest first, with what waits behind each and the totals by reason. What is
behind another message is listed with --reason behind, or by its --id. With --json there is one object
a line and nothing else. Exit status 1 if no message fits.`,
		}),
		newParkedShow(s, &cobra.Command{
			Use:   "show ID",
			Short: "Show everything about a parked message, and what to do",
			Long: `Show everything about a parked message: headers and payload, the error in full, what waits behind it,
what operators did with it, and what to do. ID is the message's ID, as the log shows it or as the
message carried it, or topic/partition/offset. Several are shown if several consumers parked it.

The payload is shown as text, or as base64 if it is none, up to 4 KiB unless --full.`,
		}),
		newRetry(s, newParkedMessages(s), &cobra.Command{
			Use:   "retry",
			Short: "Hand parked messages back to the running consumers",
			Long: `Hand parked messages back to the running consumers: the one that holds the partition handles the message
within about a second, and then what waits behind it, in order. One that fails again is parked again.
Only the first message of a key can be retried; the others follow it.

With --wait it reports how many were handled; exit status 1 if one failed again, or is not done within
--wait-max. Every retry is written down: see "outbox-relay actions list".`,
		}),
		newDiscard(s, newParkedMessages(s), &cobra.Command{
			Use:   "discard",
			Short: "Give parked messages up: they are never handled",
			Long: `Give parked messages up: they are never handled, and their rows are deleted. What waits behind one is
handed back to the consumers, in order; with --all-of-key it is given up as well.
Only the first message of a key can be discarded alone.

Every discard is written down, with --why: see "outbox-relay actions list". The payload is not kept there:
look at it with "outbox-relay parked show" before.`,
		}),
	)
	return cmd
}
