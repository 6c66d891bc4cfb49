package idempotencytest_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/idempotencytest"
	"github.com/effectonce/effectonce/internal/effects"
)

func newMiddleware(pool *pgxpool.Pool, cfg idempotency.Config) (*httpkey.Middleware, error) {
	cfg.Operation = "order"
	return httpkey.New(pool, func(*http.Request) (string, error) { return "tenant", nil }, httpkey.Config{Operation: cfg})
}

func posted(build func(pool *pgxpool.Pool) (http.Handler, error)) idempotencytest.Start {
	return idempotencytest.Handler(build, http.MethodPost, "/orders", http.Header{"Idempotency-Key": {"k"}}, []byte("o"))
}

// Property: a handler of httpkey whose body is too large to be kept, and which answers 410 from
// then on, is right.
func TestVerifyPassesBodiesThatAreNotKept(t *testing.T) {
	t.Parallel()
	idempotencytest.Verify(t, posted(func(pool *pgxpool.Pool) (http.Handler, error) {
		m, err := newMiddleware(pool, idempotency.Config{ResponseBytesMax: 10})
		if err != nil {
			return nil, err
		}
		return m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := order(r.Context(), httpkey.Tx(r), "o"); err != nil {
				httpkey.Fail(r, err)
				return
			}
			w.Header().Set("Location", "/orders/o")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, strings.Repeat("o", 100))
		})), nil
	}), idempotencytest.Options{Setup: orders})
}

// Property: a flow of httpkey with a call that may be made at most once, which answers that a
// person has to decide, is in doubt, and right.
func TestVerifyPassesHandlersInDoubt(t *testing.T) {
	t.Parallel()
	var b bank
	charge := func(*idempotency.Step[string]) error { return b.charge(uuid.NewString()) }
	idempotencytest.Verify(t, posted(func(pool *pgxpool.Pool) (http.Handler, error) {
		m, err := newMiddleware(pool, idempotency.Config{})
		if err != nil {
			return nil, err
		}
		flow, err := payment(charge, true, idempotency.FlowConfig[string]{})(pool)
		if err != nil {
			return nil, err
		}
		return httpkey.FlowHandler(m, flow, nil)
	}), idempotencytest.Options{Setup: orders, Prepare: b.reset, Effects: b.effects})
}

// Property: a header that httpkey would replay, and that a later answer has otherwise, is found;
// others may differ.
func TestVerifyComparesHeaders(t *testing.T) {
	t.Parallel()
	start := func(name string) idempotencytest.Start {
		return func(pool *pgxpool.Pool) (idempotencytest.Request, error) {
			op, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
			return func(ctx context.Context) (idempotency.Response, error) {
				response, err := op.Once(ctx, key(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					response, err := work(ctx, tx)
					response.Header = map[string][]string{"content-type": {"text/plain"}}
					return response, err
				})
				if response.Header != nil {
					response.Header[name] = []string{uuid.NewString()}
				}
				return response, err
			}, err
		}
	}
	said := idempotencytest.Problems(t, start("location"), idempotencytest.Options{Setup: orders})
	require.NotEmpty(t, said)
	require.Contains(t, said[0], "answered differently: first Location")
	require.Empty(t, idempotencytest.Problems(t, start("X-Request-Id"), idempotencytest.Options{Setup: orders}))
}

// Property: where the outcome is in doubt a second effect is found however much was lost besides,
// and also with another text; what is lost, or has another text in the place of the clean run's, or
// is the first of its kind, is none.
func TestDoubtIsNoSecondEffect(t *testing.T) {
	t.Parallel()
	many := map[string]int{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "z": 1}
	for name, test := range map[string]struct {
		clean, other map[string]int
		says         []string
	}{
		"behind much that is lost":     {many, map[string]int{"z": 2}, []string{"doubled: charges has 2 times z"}},
		"behind much that differs":     {many, map[string]int{"a1": 1, "a2": 1, "a3": 1, "a4": 1, "a5": 1, "z": 2}, []string{"doubled: charges has 2 times z"}},
		"with another text":            {map[string]int{"5 at 12:00": 1}, map[string]int{"5 at 12:00": 1, "5 at 12:01": 1}, []string{"different: charges has 5 at 12:01"}},
		"nothing happened":             {many, nil, nil},
		"in the place of another text": {map[string]int{"5 at 12:00": 1}, map[string]int{"5 at 12:01": 1}, nil},
		"the first of its kind":        {nil, map[string]int{"to be looked into": 1}, nil},
	} {
		said := idempotencytest.Doubt(effects.Effects{"charges": test.clean}, effects.Effects{"charges": test.other})
		if test.says == nil {
			require.Empty(t, said, name)
		}
		for _, text := range test.says {
			require.Contains(t, said, text, name)
		}
		require.NotContains(t, said, "lost:", name)
	}
}
