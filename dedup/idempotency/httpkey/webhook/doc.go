// Package webhook receives webhooks of Stripe, GitHub, and all senders that follow Standard
// Webhooks, and applies the effects of each event once, however often it is delivered.
//
//	payments, err := webhook.New(pool, webhook.Config{
//		Sender: "stripe", Name: "payments",
//		Scheme: webhook.Stripe(os.Getenv("STRIPE_WEBHOOK_SECRET")), // and the next one, while it is rolled
//	}, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
//		if event.Type != "invoice.paid" {
//			return nil
//		}
//		return credit(ctx, tx, event.Body)
//	})
//	...
//	go payments.Run(ctx) // forgets old events
//	http.Handle("/webhooks/stripe", payments)
//	log.Fatal(http.ListenAndServe(":8080", nil)) // behind TLS
//
// # How a delivery is handled
//
// The body is read, within its limit of size and 10 seconds, and the signature verified, before a
// database connection is acquired. Then the event's ID is claimed in the transaction of the handler
// (idempotency.Operation.Once, with the sender's name as the scope): effect, claim and outcome are
// committed together, or none of them is. The signed timestamp is compared with the database's
// clock in that transaction, and only for an event that is not stored, since all others have no
// effect. A handler that takes longer than 30 seconds is rolled back. The clock of this process decides only how long it waits.
//
//	200              handled or refused (Refuse), now or before; or stored by a person (outbox-relay keys finish), with its status
//	400, 401, 405    malformed or out of tolerance; no signature matches; not POST
//	408, 413         the body was too slow, or too large
//	409              another delivery of the event is being handled; with Retry-After
//	429              100 deliveries of the event wait; with Retry-After
//	503              the handler failed, or the database; with Retry-After
//
// # How senders react
//
// Stripe treats anything but 2xx as a failure, retries for three days at growing intervals, and
// disables an endpoint that keeps failing. It signs each attempt anew, so the
// tolerance does not reject its retries.
//
// GitHub does not redeliver automatically, whatever the status, and stops waiting after 10 seconds.
// A person, or a program through its API, redelivers a failed delivery within three days, under the
// same ID. See [GitHub] for what it does not
// sign.
//
// Standard Webhooks recommends about ten attempts over three days, each signed anew. 2xx ends them;
// 410 removes the endpoint; 429, 502 and 504 slow the sender down; anything else is a failure.
// Senders differ: check yours, and keep Idempotency.Window longer than the time in which they
// redeliver, also manually.
//
// Events arrive in any order. If the order matters, compare a version that the body carries: see
// dedup.Claims.Fence.
package webhook
