package httpkey_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// Property: of the errors about a transaction's state, those that are gone with time are 503 with
// Retry-After: the server has become a standby, or ended the transaction because it was idle, or
// took, too long. The others are the handler's own: 500.
func TestWhichTransactionStatesPass(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		httpkey.Fail(r, fmt.Errorf("insert: %w", &pgconn.PgError{Code: r.Header.Get("X-Code")}))
	})))
	for code, passes := range map[string]bool{"25006": true, "25P03": true, "25P04": true, "25001": false, "25P02": false, "25000": false, "22012": false} {
		a := s.post(t, code, "a", "X-Code", code)
		if passes {
			requireProblem(t, a, 503, httpkey.ProblemUnavailable)
			require.Equal(t, "1", a.header.Get("Retry-After"))
		} else {
			requireProblem(t, a, 500, httpkey.ProblemInternal)
		}
	}

	readOnly := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, err := httpkey.Tx(r).Exec(r.Context(), `SET TRANSACTION READ ONLY`)
		httpkey.Fail(r, errors.Join(err, effect(r, "a")))
	})))
	requireProblem(t, readOnly.post(t, "k", "a"), 503, httpkey.ProblemUnavailable)
}

// Property: a failure is logged even if the client has disconnected; a client that disconnected
// before its work began is not.
func TestFailureWithoutClientIsLogged(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, early := range map[string]bool{"in the work": false, "before the work": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			handler := newMiddleware(t, pool, operation(idempotency.Config{Logger: textLogger(&log)})).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				leave()
				httpkey.Fail(r, errors.New("out of paper"))
			}))
			if early {
				leave()
			}
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/orders", http.NoBody)
			r.Header.Set("Idempotency-Key", "3f0d3f2e-6f0e-4f7f-9a52-2f1f4f0f9a11")
			handler.ServeHTTP(httptest.NewRecorder(), r)
			require.Equal(t, !early, strings.Contains(log.String(), "out of paper"), log.String())
			if early {
				require.NotContains(t, log.String(), "level=ERROR")
			}
		})
	}
}
