package httpkey_test

import (
	"context"
	"net/http"

	"github.com/go-chi/chi/v5"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// chiRoutes uses chi. The middleware is added to routes (With, Group), or in front of whole
// routers: with ownRoute after it then.
func chiRoutes(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) http.Handler {
	router := chi.NewRouter()
	router.With(authenticate, once.Handler).Post("/orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) {
		ship(w, r, chi.URLParam(r, "order"))
	})
	router.Group(func(all chi.Router) {
		all.Use(authenticate, once.Handler, ownRoute)
		all.Route("/shops/{shop}", func(shop chi.Router) {
			shop.Post("/orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) {
				ship(w, r, chi.URLParam(r, "shop")+"-"+chi.URLParam(r, "order"))
			})
		})
	})
	return router
}

// ownRoute gives each run of a handler a copy of chi's routing context as it was before the first
// run. The original is one value for the whole request, and a run through a mounted router changes
// it: the next run, after a serialization failure, would find no route, and its 404 would be
// stored.
func ownRoute(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if route := chi.RouteContext(r.Context()); route != nil {
			own := *route
			r = r.WithContext(context.WithValue(r.Context(), chi.RouteCtxKey, &own))
		}
		next.ServeHTTP(w, r)
	})
}

func ExampleMiddleware_Handler_chi() {
	run := func(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) error {
		return http.ListenAndServe(":8080", chiRoutes(authenticate, once))
	}
	_ = run
}
