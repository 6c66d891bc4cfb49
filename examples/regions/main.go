// Regions: each idempotency key has one home, the region whose database claims it.
//
//	go run ./examples/regions
//
// Two databases that both accept a key execute its request twice, whatever replicates between them.
// So one primary serves all regions, or each key is claimed in one region only, as here. A load
// balancer that hashes the header Idempotency-Key, and never falls back to another region, does the
// same without code.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// home returns the region of a tenant's key. It depends on nothing else, and the list must not
// change: a key whose home moves is executed again there. To change it, refuse all requests for
// longer than the window of the operations.
func home(regions []string, scope, key string) string {
	sum := sha256.Sum256([]byte(scope + "\x00" + key))
	return regions[binary.BigEndian.Uint64(sum[:])%uint64(len(regions))]
}

// route passes on requests whose keys are at home here. The others get 421 with the home's name:
// nothing was done, and the client sends them there, under the same key. next is the Handler of an
// httpkey.Middleware whose database is this region's. A request without a valid key passes, too;
// next refuses it.
func route(here string, regions []string, tenant httpkey.Scope, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scope, scopeErr := tenant(r)
		key, keyErr := httpkey.ParseKey(r.Header) // not the header itself: a key may have quotes
		if scopeErr == nil && keyErr == nil {
			if at := home(regions, scope, key); at != here {
				w.Header().Set("Home", at)
				http.Error(w, "this key is at home in region "+at+": send the request there", http.StatusMisdirectedRequest)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "regions:", err)
		os.Exit(1)
	}
}

// run sends each of some requests to both regions: one of the two executes it.
func run(ctx context.Context, out io.Writer) error {
	regions := []string{"eu", "us"}
	tenant := func(*http.Request) (string, error) { return "shop", nil } // the authenticated caller
	for n := range 4 {
		for _, here := range regions {
			orders := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusCreated) })
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/orders", strings.NewReader("one book"))
			r.Header.Set("Idempotency-Key", fmt.Sprintf("order-%d", n))
			w := httptest.NewRecorder()
			route(here, regions, tenant, orders).ServeHTTP(w, r)
			if _, err := fmt.Fprintf(out, "order-%d in %s: %d %s\n", n, here, w.Code, w.Header().Get("Home")); err != nil {
				return err
			}
		}
	}
	return nil
}
