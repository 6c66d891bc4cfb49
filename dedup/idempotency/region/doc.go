// Package region gives each idempotency key a home: the one region whose database decides about it.
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
// Two databases that both accept a key execute it twice: a claim is an insert, and a primary key reaches as far as its
// primary. So either one primary serves all regions, or each key has one home and is claimed nowhere else. Asynchronous
// replication between two primaries is no third way: both say yes before either has heard of the other.
//
// # Tables
//
// A key is hashed to one of 1024 slots, and a table says in which region each slot is at home. The hash is fixed for ever,
// tables change. A key that carries its time, a UUIDv7 as idempotency.NewKey makes them, belongs to the table of that
// time, whenever it is looked up: it never changes its home between its first request and its last, whatever the clocks of
// this process say. A key without a time stays with the first table that is listed.
//
// # Changing tables, and the one clock that counts
//
// While a table is not in all regions yet, a key from behind its From has two homes. No such key comes before that time, but
// from a client whose clock is ahead. That is why Config.AheadMax refuses keys from far ahead, by the clock of the process: this
// is the one place of effectonce where safety depends on a clock, and only while a table is being deployed.
//
// To move slots, add a table whose From lies ahead by more than these together: what a deployment to all regions takes,
// AheadMax, and how far the clock of any of the processes may be fast. With the default of 24 hours, two days are enough for
// clocks that are right to the hour. The oldest table can be dropped once the keys of its time are forgotten: the From of the next
// one, plus the window of the operations (idempotency.Config.Window), plus AheadMax. Not all of them are forgotten then: keys that
// are not finished, or in doubt, never are (outbox-relay keys list, in each region: decide about them before), and a client whose
// clock is far behind makes such keys today. So Middleware refuses keys from before the From of the first table that is left
// (400): it executes them nowhere, where another home would execute them again. Keep the table if such clients are to be served;
// a From of zero in the next one would let their keys move. Dropping the first one moves keys without a time at once: where there
// are such, keep their requests away for a window before, or keep the table.
package region
