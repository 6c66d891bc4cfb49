// Package idempotency executes a request once for each idempotency key, however often it comes: a payment, an order, a
// command of a program that retries. It knows no HTTP; package httpkey builds on it, and package keyclient asks others under keys.
//
//	orders, err := idempotency.New(pool, idempotency.Config{Operation: "create-order"})
//	...
//	key := orders.Key(tenant, r.Header.Get("Idempotency-Key"), idempotency.NewFingerprint(body))
//	response, err := orders.Once(ctx, key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
//		_, err := tx.Exec(ctx, `INSERT INTO orders …`)
//		return idempotency.Response{Status: 201, Body: body}, err
//	})
//
// # Four answers
//
// A claim is an insert: the primary key decides who executes, never a look before it. A key that exists gives, in this
// order: a mismatch (ErrMismatch: the same key for another request), the response that is stored (Response.Replayed), or
// that somebody is at it (ErrInProgress). Otherwise the work is executed.
//
// # Work in one transaction, or in phases
//
// Once is for work that stays in the database: key, effects and response are committed together, or none of them.
//
// A [Flow] is for work that asks other systems. Its phases are committed one by one, each with a recovery point; no
// transaction is open while a foreign call runs, and each call is given Step.ChildID as its own idempotency key, so that
// a system which honours it acts once although it may be asked again. A flow that was cut off goes on at the first phase
// that is not done. A system that honours no key is called in a phase that is AtMostOnce: where its answer is lost, the
// key becomes indeterminate, and a person or FlowConfig.Reconcile decides.
//
// # What is stored
//
// Outcomes: what the work returned, and what it called Final. A failure that trying again could mend stores nothing, and
// frees the key at once, unless Config.Strict or AttemptsMax turn it into the outcome. Finished keys are forgotten after
// Config.Window: a request that comes again later is executed again. Unfinished ones are never forgotten by themselves.
//
// # Which verdict belongs where
//
// A handler of httpkey gives an error to httpkey.Fail; all others return it. What it makes of the key:
//
//	               Handler    Once       Call       AtMostOnce  its Write  Write      webhook    Reconcile
//	Commit         stored     -          -          -           -          -          -          -
//	Refuse         refused    -          -          -           -          -          -          -
//	Forget         free       -          -          -           -          -          -          -
//	no error       stored     stored     stored     stored      stored     stored     stored     -
//	Final          refused    refused    refused    refused     refused    refused    refused    undecided
//	NotDone        free       free       resumed    resumed     undecided  resumed    free       undecided
//	NotSent        free       free       resumed    resumed     undecided  resumed    free       undecided
//	Indeterminate  undecided  undecided  undecided  undecided   undecided  undecided  undecided  undecided
//	other error    free       free       resumed    undecided   undecided  resumed    free       undecided
//
// Commit, Refuse and Forget are the httpkey.Outcome of a status. Call and Write are those of a Phase, AtMostOnce is the Call of one
// that is so, and its Write comes after that Call. The words of the table:
//
//   - stored: effects and response are committed, and every copy gets the response;
//   - refused: the response is stored without effects, and every copy gets it;
//   - free: nothing is stored, and the next request executes;
//   - resumed: the recovery points stay, and the next request, or the completer, continues with this phase;
//   - undecided: a person decides, or FlowConfig.Reconcile by its Decision. An error of Reconcile decides nothing; it is asked again.
//
// What is declined, invalid or not found is Final (webhook.Refuse for a webhook). What may succeed next time is an error. What
// another system may or may not have done is Indeterminate. NotDone and NotSent matter in a Call: any other error of one that is
// AtMostOnce leaves the key undecided. Config.Strict and Config.AttemptsMax of Once turn free into refused.
//
// Times are the database's. A worker that lost its lock cannot store anything: the lock's token, which grows with every
// takeover by a flow, is in each of its writes.
package idempotency
