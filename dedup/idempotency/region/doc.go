// Package region assigns each idempotency key a home: the one region whose database decides about
// it.
//
//	homes, err := region.New(
//		region.Table{Version: 1, Slots: region.Spread("eu", "us")},
//		region.Table{Version: 2, From: moving, Slots: region.Spread("eu", "us", "ap")},
//	)
//	...
//	route, err := homes.Middleware(region.Config{Here: "eu", Key: keyOf, Forward: map[string]*url.URL{"us": us}})
//	mux.Handle("POST /orders", authenticate(route(once.Handler(orders))))
//
//	// keyOf is the key that once, an httpkey.Middleware, claims.
//	func keyOf(r *http.Request) (idempotency.Key, bool) {
//		scope, err := tenant(r)
//		value, keyErr := httpkey.ParseKey(r.Header)
//		return idempotency.Key{Scope: scope, Operation: "shop-api", Value: value}, err == nil && keyErr == nil
//	}
//
// Two databases that both accept a key execute it twice: a claim is an insert, and a primary key is
// unique only in its own database. So either one primary serves all regions, or each key has one
// home and is claimed nowhere else. Asynchronous replication between two primaries is no third
// option: both accept the key before either has received the other's row.
//
// # Tables
//
// A key is hashed to one of 1024 slots, and a table assigns each slot to a region. The hash is
// fixed forever; tables change. A key that carries its time, a UUIDv7 such as idempotency.NewKey
// makes, belongs to the table of that time, whenever it is looked up: its home is the same at its
// first request and at its last, independent of this process's clock. A key without a time stays
// with the first listed table.
//
// # Changing tables, and the one clock that counts
//
// While a new table is not yet deployed in all regions, a key with a time after its From has two
// homes. Only a client whose clock is ahead sends such a key before that time. That is why
// Config.AheadMax refuses keys from too far ahead, by the clock of the process: this is the only
// place in effectonce where safety depends on a clock, and only while a table is being deployed.
//
// To move slots, add a table whose From is ahead by more than the sum of these: the duration of a
// deployment to all regions, AheadMax, and the largest error by which any process's clock may be
// fast. With the default of 24 hours, two days are enough if clocks are correct to the hour.
//
// The oldest table can be dropped once the keys of its time are forgotten: at the From of the next
// one, plus the window of the operations (idempotency.Config.Window), plus AheadMax. Not all of its
// keys are forgotten then. Unfinished and indeterminate keys never are: list them with outbox-relay
// keys list, in each region, and decide about them before. And a client whose clock is far behind
// still makes such keys. So Middleware refuses keys from before the From of the first remaining
// table (400): it does not execute them anywhere, since another home might have executed them. Keep
// the table if such clients must be served; a From of zero in the next one would let their keys
// move. Dropping the first table moves keys without a time at once: if there are any, stop their
// requests for one window before, or keep the table.
package region
