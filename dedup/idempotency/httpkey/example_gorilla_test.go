package httpkey_test

import (
	"net/http"

	"github.com/gorilla/mux"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// gorillaRoutes uses gorilla/mux, whose middlewares run after the route is found.
func gorillaRoutes(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) http.Handler {
	router := mux.NewRouter()
	router.Use(authenticate, once.Handler)
	router.HandleFunc("/orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) {
		ship(w, r, mux.Vars(r)["order"])
	}).Methods(http.MethodPost)
	router.PathPrefix("/shops/{shop}").Subrouter().HandleFunc("/orders/{order}/shipments", func(w http.ResponseWriter, r *http.Request) {
		ship(w, r, mux.Vars(r)["shop"]+"-"+mux.Vars(r)["order"])
	}).Methods(http.MethodPost)
	return router
}

func ExampleMiddleware_Handler_gorilla() {
	run := func(authenticate func(http.Handler) http.Handler, once *httpkey.Middleware) error {
		return http.ListenAndServe(":8080", gorillaRoutes(authenticate, once))
	}
	_ = run
}
