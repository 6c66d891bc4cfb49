package httpkey

import (
	"net/http"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Fail answers for an error of the engine, among them those that need many clients at once.
func (m *Middleware) Fail(w http.ResponseWriter, r *http.Request, err error) {
	m.fail(w, r, idempotency.Key{}, err, false)
}
