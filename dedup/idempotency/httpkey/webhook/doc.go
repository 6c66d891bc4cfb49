// Package webhook receives webhooks of Stripe, GitHub, and all that follow Standard Webhooks, and has the effects of
// each event once, however often it is delivered.
//
//	package main
//
//	import (
//		"context"
//		"encoding/json"
//		"log"
//		"net/http"
//		"os"
//
//		"github.com/jackc/pgx/v5"
//		"github.com/jackc/pgx/v5/pgxpool"
//
//		"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
//	)
//
//	func main() {
//		ctx := context.Background()
//		pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL")) // the schema: outbox-relay migrate
//		if err != nil {
//			log.Fatal(err)
//		}
//		payments, err := webhook.New(pool, webhook.Config{
//			Sender: "stripe",
//			Scheme: webhook.Stripe(os.Getenv("STRIPE_WEBHOOK_SECRET")), // and the next one, while it is rolled
//		}, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
//			if event.Type != "invoice.paid" {
//				return nil
//			}
//			var paid struct{ Data struct{ Object struct{ Customer string; AmountPaid int64 `json:"amount_paid"` } } }
//			if err := json.Unmarshal(event.Body, &paid); err != nil {
//				return webhook.Refuse(err)
//			}
//			_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance + $1 WHERE customer = $2`,
//				paid.Data.Object.AmountPaid, paid.Data.Object.Customer)
//			return err
//		})
//		if err != nil {
//			log.Fatal(err)
//		}
//		go payments.Run(ctx) // forgets old events
//		http.Handle("/webhooks/stripe", payments)
//		log.Fatal(http.ListenAndServe(":8080", nil)) // behind TLS
//	}
//
// # What happens to a delivery
//
// The body is read, within its limits of size and time, and the signature verified, before a database connection is
// taken. Then the event's ID is claimed in the transaction of the handler (idempotency.Operation.Once, under the
// sender's name): effect, claim and outcome are committed together, or none of them. The signed timestamp is compared
// with the database's clock in that transaction; only for an event that is not remembered, since all others have no
// effect. No clock of this process decides anything but how long it waits.
//
//	200              handled, now or before, or what a person stored (outbox-relay keys finish), with its status
//	RefusedStatus    refused (Refuse, or Idempotency.AttemptsMax), now or before
//	400, 401, 405    malformed or out of tolerance; no signature fits; not POST
//	408, 413         the body was too slow, or too large
//	409              another delivery of the event is at work; with Retry-After
//	422              the ID came with another body before (CompareBody)
//	429              too many deliveries of the event wait, or too many IDs are kept (Idempotency.KeyWaitersMax,
//	                 ScopeWaitersMax, ScopeKeysMax); with Retry-After
//	503              the handler failed, or the database; with Retry-After
//
// # What senders make of it
//
// Stripe takes anything but 2xx for a failure, tries again for three days, further and further apart, and disables an
// endpoint that keeps failing: refuse with 2xx. It signs each attempt anew, so that the tolerance does not stand against
// its retries.
//
// GitHub does not deliver again by itself, whatever the status, and gives up waiting after 10 seconds: a person, or a
// program through its API, redelivers what failed within three days, under the same ID. Refuse with 4xx, if that is to be
// seen in its list. See [GitHub] for what it does not sign.
//
// Standard Webhooks recommends some ten attempts over three days, each signed anew. 2xx ends them; 410 removes the endpoint; 429,
// 502 and 504 slow the sender down; anything else fails. Senders differ: look at yours, and keep
// Idempotency.Window longer than the time in which they deliver again, also by hand.
//
// Events come in any order. Where that matters, compare a version that the body carries: see dedup.Fence.
package webhook
