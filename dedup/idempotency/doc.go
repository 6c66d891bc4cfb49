// Package idempotency executes a request once for each idempotency key, however often the request
// arrives: a payment, an order, a command of a program that retries. Package httpkey is for HTTP
// servers, and package keyclient sends requests with keys to other systems.
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
// A claim is an insert: the primary key decides which request executes; there is no separate read
// before it. If the key exists, Once returns the first of these that applies: a mismatch
// (ErrMismatch: the same key for another request), the stored response (Response.Replayed), or
// ErrInProgress (another request is executing). Otherwise the work is executed.
//
// # Work in one transaction, or in phases
//
// Once is for work that stays in the database: key, effects and response are committed together, or
// none of them is.
//
// A [Flow] is for work that calls other systems. Its phases are committed one by one, each with a
// recovery point. No transaction is open during a foreign call. Each call gets Step.ChildID as its
// own idempotency key, so a system that honours the key acts once even if the call is repeated. A
// flow that was interrupted continues at the first phase that is not done. A system that honours no
// key is called in a phase that is AtMostOnce: if its response is lost, the key becomes
// indeterminate, and a person or FlowConfig.Reconcile decides.
//
// # What is stored
//
// An outcome is stored: what the work returned, or what it marked as Final. A failure that a retry
// could fix stores nothing and frees the key at once, unless Config.Strict turns it
// into the outcome. Finished keys are forgotten after Config.Window: a later request with the same
// key is executed again. Unfinished keys are forgotten automatically only if nothing of them happened.
//
// # Which verdict belongs where
//
// A handler of httpkey passes an error to httpkey.Fail; all other code returns it. The effect on
// the key:
//
//	               Handler    Once       Call       AtMostOnce  its Write  Write      webhook    Reconcile
//	Status 201     stored     -          -          -           -          -          -          -
//	Status 422     refused    -          -          -           -          -          -          -
//	Status 503     free       -          -          -           -          -          -          -
//	no error       stored     stored     stored     stored      stored     stored     stored     -
//	Final          refused    refused    refused    refused     refused    refused    refused    undecided
//	NotDone        free       free       resumed    resumed     undecided  resumed    free       undecided
//	Indeterminate  undecided  undecided  undecided  undecided   undecided  undecided  undecided  undecided
//	other error    free       free       resumed    undecided   undecided  resumed    free       undecided
//
// The statuses are examples of the three kinds that httpkey knows. Call and Write are those of a
// Phase. AtMostOnce is the Call of a phase with AtMostOnce, and "its Write" is the Write after that
// Call. The words of the table:
//
//   - stored: effects and response are committed, and every retry gets the response;
//   - refused: the response is stored without effects, and every retry gets it;
//   - free: nothing is stored, and the next request executes;
//   - resumed: the recovery points stay, and the next request, or the completer, continues with
//     this phase;
//   - undecided: a person decides, or FlowConfig.Reconcile by its Decision. An error of Reconcile
//     decides nothing; Reconcile is called again.
//
// A request that is declined, invalid or not found is Final (webhook.Refuse for a webhook). A
// failure that may succeed next time is an error. Work that another system may or may not have done
// is Indeterminate. NotDone matters in a Call: any other error of an AtMostOnce call leaves the key
// undecided, unless keyclient.Single proves that nothing was sent. Config.Strict turns free into refused.
//
// All times are the database's. A worker that lost its lock cannot store anything: each of its
// writes carries the lock's token, which grows with every takeover by a flow.
package idempotency
