// Package region gives each idempotency key a home: the one region whose database decides about it.
//
//	homes, err := region.New(
//		region.Table{Version: 1, Slots: region.Spread("eu", "us")},
//		region.Table{Version: 2, From: moving, Slots: region.Spread("eu", "us", "ap")},
//	)
//	...
//	route, err := homes.Middleware(region.Config{Here: "eu", Key: keyOf, Forward: map[string]*url.URL{"us": us}})
//	mux.Handle("POST /orders", route(orders))
//
// Two databases that both accept a key execute it twice: a claim is an insert, and a primary key reaches as far as its
// primary. So either one primary serves all regions, or each key has one home and is claimed nowhere else. Asynchronous
// replication between two primaries is no third way: both say yes before either has heard of the other.
//
// # Tables
//
// A key is hashed to one of 1024 slots, and a table says in which region each slot is at home. The hash is fixed for ever,
// tables change. A key that carries its time, a UUIDv7 as idempotency.NewKey makes them, belongs to the table of that
// time, whenever it is looked up: it never changes its home between its first request and its last, and no clock is
// asked. A key without a time stays with the first table that is listed.
//
// To move slots, add a table whose From lies further ahead than a deployment to all regions takes, plus Config.AheadMax.
// A table can be dropped once the keys of its time are forgotten: the From of the next one, plus the window of the
// operations (idempotency.Config.Window), plus AheadMax. Dropping the first one moves keys without a time at once: where there
// are such, keep their requests away for a window before, or keep the table.
package region
