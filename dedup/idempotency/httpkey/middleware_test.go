package httpkey_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// Property: of a hundred concurrent requests with one key one is executed, whatever the version of
// HTTP; the others get its answer, or that it is in progress and when to retry. Row H7 of
// guarantees.md.
func TestHundredAtOnceAreExecutedOnce(t *testing.T) {
	t.Parallel()
	for name, http2 := range map[string]bool{"HTTP1": false, "HTTP2": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			var runs atomic.Int64
			s := start(t, newMiddleware(t, pool, operation(idempotency.Config{WaitMax: 20 * time.Millisecond})).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				runs.Add(1)
				insert(http.StatusCreated).ServeHTTP(w, r)
			})), http2)
			var fresh, replayed, busy atomic.Int64
			var group sync.WaitGroup
			for range 100 {
				group.Go(func() {
					a, err := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
					if err != nil {
						t.Error(err)
						return
					}
					switch {
					case a.status == http.StatusConflict:
						busy.Add(1)
						assert.Regexp(t, `^[1-9][0-9]*$`, a.header.Get("Retry-After"))
						assert.Equal(t, httpkey.ProblemKeyInProgress, a.problem.Type)
					case a.replayed():
						replayed.Add(1)
						assert.Equal(t, "made a", a.body)
					default:
						fresh.Add(1)
						assert.Equal(t, http.StatusCreated, a.status)
						assert.Equal(t, "made a", a.body)
					}
				})
			}
			group.Wait()
			require.EqualValues(t, 1, fresh.Load())
			require.EqualValues(t, 1, runs.Load())
			require.EqualValues(t, 99, replayed.Load()+busy.Load())
			require.Equal(t, 1, effects(t, pool))
		})
	}
}

// Property: each status does with the handler's writes, its messages and its response what the
// table says, at the first and at the second request. Row H18 of guarantees.md.
func TestStatusDecidesWhatIsKept(t *testing.T) {
	t.Parallel()
	table := map[int]httpkey.Outcome{}
	for _, status := range []int{200, 201, 202, 204, 299, 301, 303, 304, 399} {
		table[status] = httpkey.Commit
	}
	for _, status := range []int{400, 402, 404, 405, 406, 410, 412, 413, 415, 422, 428, 451, 499} {
		table[status] = httpkey.Refuse
	}
	for _, status := range []int{401, 403, 408, 409, 423, 425, 429, 500, 501, 502, 503, 504, 599} {
		table[status] = httpkey.Forget
	}
	pool := newPool(t)
	var runs atomic.Int64
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		runs.Add(1)
		status, err := strconv.Atoi(r.Header.Get("X-Status"))
		err = errors.Join(err, outbox.Publish(r.Context(), httpkey.Tx(r), outbox.Message{ID: httpkey.Key(r).ChildID("event"), Topic: "orders", Payload: []byte("p")}))
		if err != nil {
			httpkey.Fail(r, err)
			return
		}
		insert(status).ServeHTTP(w, r)
	})))
	s.Client().CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	for status, outcome := range table {
		require.Equal(t, outcome, httpkey.DefaultOutcome(status), status)
		name, before := strconv.Itoa(status), runs.Load()
		once := s.post(t, name, name, "X-Status", name)
		again := s.post(t, name, name, "X-Status", name)
		require.Equal(t, status, once.status)
		require.Equal(t, status, again.status)
		require.Equal(t, once.body, again.body)
		require.False(t, once.replayed())
		require.Equal(t, outcome != httpkey.Forget, again.replayed(), status)
		wantRuns, wantEffects, wantKeys := 1, 0, 1
		switch outcome {
		case httpkey.Commit:
			wantEffects = 1
		case httpkey.Forget:
			wantRuns, wantKeys = 2, 0
		case httpkey.Refuse:
		}
		require.EqualValues(t, wantRuns, runs.Load()-before, status)
		require.Equal(t, wantEffects, pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE name = $1`, name), status)
		require.Equal(t, wantKeys, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1`, name), status)
	}
	require.Equal(t, effects(t, pool), pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox`))
}

// Property: Config.Outcome decides otherwise.
func TestOutcomeCanBeChosen(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	cfg := httpkey.Config{Outcome: func(status int) httpkey.Outcome {
		if status == http.StatusNotFound {
			return httpkey.Commit
		}
		return httpkey.Forget
	}}
	m := newMiddleware(t, pool, cfg)
	require.Equal(t, 404, serve(t, m.Handler(insert(404))).post(t, "a", "a").status)
	require.Equal(t, 1, effects(t, pool))
	require.Equal(t, 201, serve(t, m.Handler(insert(201))).post(t, "b", "b").status)
	require.Equal(t, 1, effects(t, pool))
	require.Equal(t, 1, keys(t, pool))
}

// Property: with Strict the first answer is the outcome, also a failure, as the handler wrote it.
func TestStrictKeepsFailures(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, operation(idempotency.Config{Strict: true})).Handler(insert(500)))
	once, again := s.post(t, "a", "a"), s.post(t, "a", "a")
	require.Equal(t, 500, once.status)
	require.False(t, once.replayed())
	require.Equal(t, 500, again.status)
	require.True(t, again.replayed())
	require.Equal(t, "made a", again.body)
	require.Zero(t, effects(t, pool))
}

// Property: a panic rolls back, stores nothing and ends the connection as without this package; the
// next request is executed.
func TestPanicRollsBackAndGoesOn(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]any{"abort": http.ErrAbortHandler, "text": "trouble"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			var runs atomic.Int64
			seen := make(chan any, 2)
			inner := newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				insert(201).ServeHTTP(w, r)
				if runs.Add(1) == 1 {
					panic(value)
				}
			}))
			s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer func() {
					if p := recover(); p != nil {
						seen <- p
						panic(http.ErrAbortHandler)
					}
				}()
				inner.ServeHTTP(w, r)
			}))
			_, err := s.ask(t.Context(), http.MethodPost, "/orders", "k", "a")
			require.Error(t, err)
			require.Equal(t, value, <-seen)
			require.Zero(t, effects(t, pool))
			require.Zero(t, keys(t, pool))
			require.False(t, s.post(t, "k", "a").replayed())
			require.Equal(t, 1, effects(t, pool))
		})
	}
}

// Property: a failure after a success rolls back, stores nothing and is 500, whether the handler
// wrote it, or a layer inside of the middleware that recovers its panic, as chi's Recoverer does.
// The next request is executed.
func TestFailureBehindASuccessRollsBack(t *testing.T) {
	t.Parallel()
	recoverer := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer func() {
				if recover() != nil {
					w.WriteHeader(http.StatusInternalServerError)
				}
			}()
			next.ServeHTTP(w, r)
		})
	}
	for name, late := range map[string]func(w http.ResponseWriter){
		"recovered panic": func(http.ResponseWriter) { panic("trouble") },
		"error":           func(w http.ResponseWriter) { http.Error(w, "canary", http.StatusInternalServerError) },
		"refusal":         func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) },
	} {
		for answer, status := range map[string]int{"status": http.StatusCreated, "redirect": http.StatusSeeOther, "body alone": 0} {
			t.Run(name+" behind "+answer, func(t *testing.T) {
				t.Parallel()
				pool := newPool(t)
				var runs atomic.Int64
				s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(recoverer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if !assert.NoError(t, effect(r, "a")) {
						return
					}
					if status != 0 {
						w.WriteHeader(status)
					}
					_, _ = io.WriteString(w, "made")
					if runs.Add(1) == 1 {
						late(w)
					}
				}))))
				a := s.post(t, "k", "a")
				requireProblem(t, a, 500, httpkey.ProblemInternal)
				require.NotContains(t, a.body, "canary")
				require.Zero(t, effects(t, pool)+keys(t, pool))
				require.Less(t, s.post(t, "k", "a").status, 400)
				require.Equal(t, 1, effects(t, pool))
			})
		}
	}
}

// Property: Fail rolls back; a serialization failure runs the handler again with the same request,
// a Final is stored, and everything else is 500 without a word of the error.
func TestFailGivesTheRequestUp(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var runs atomic.Int64
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		run := runs.Add(1)
		kind := r.Header.Get("X-Kind")
		r.Header.Set("X-Kind", "changed") // must not be seen by the next run
		insert(201).ServeHTTP(w, r)
		switch kind {
		case "conflict":
			if run < 3 {
				httpkey.Fail(r, fmt.Errorf("insert: %w", &pgconn.PgError{Code: "40001"}))
			}
		case "final":
			httpkey.Fail(r, idempotency.Final(idempotency.Response{Status: 402, Header: http.Header{"Set-Cookie": {"canary"}}, Body: []byte("declined")}, errors.New("declined")))
		default:
			httpkey.Fail(r, errors.New("canary"))
		}
	})))
	a := s.post(t, "a", "a", "X-Kind", "conflict")
	require.Equal(t, 201, a.status)
	require.Equal(t, "made a", a.body)
	require.EqualValues(t, 3, runs.Load())
	require.Equal(t, 1, effects(t, pool))

	for range 2 {
		a = s.post(t, "b", "b", "X-Kind", "final")
		require.Equal(t, 402, a.status)
		require.Equal(t, "declined", a.body)
	}
	require.True(t, a.replayed())
	require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE headers::text LIKE '%canary%'`))

	a = s.post(t, "c", "c", "X-Kind", "other")
	requireProblem(t, a, 500, httpkey.ProblemInternal)
	require.NotContains(t, a.body, "canary")
	require.Equal(t, 1, effects(t, pool))
}

// Property: a conflict that stays is 503, with the key free.
func TestLastingConflictIsUnavailable(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		httpkey.Fail(r, &pgconn.PgError{Code: "40P01"})
	})))
	a := s.post(t, "a", "a")
	requireProblem(t, a, 503, httpkey.ProblemUnavailable)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.Zero(t, keys(t, pool))
}

// Property: an error of SQL that a handler swallows is no success.
func TestSwallowedErrorIsNoSuccess(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		insert(201).ServeHTTP(w, r)
		_, _ = httpkey.Tx(r).Exec(r.Context(), `SELECT 1/0`)
	})))
	requireProblem(t, s.post(t, "a", "a"), 500, httpkey.ProblemInternal)
	require.Zero(t, effects(t, pool))
	require.Zero(t, keys(t, pool))
}

// Property: when the database does not answer COMMIT the client gets the advice to retry with the
// same key, and the retry resolves the outcome.
func TestUnansweredCommit(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var runs atomic.Int64
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		insert(201).ServeHTTP(w, r)
		if runs.Add(1) == 1 {
			var ended bool
			assert.NoError(t, pool.QueryRow(r.Context(), `SELECT pg_terminate_backend($1, 10000)`, httpkey.Tx(r).Conn().PgConn().PID()).Scan(&ended))
			assert.True(t, ended)
		}
	})))
	a := s.post(t, "a", "a")
	requireProblem(t, a, 503, httpkey.ProblemUnanswered)
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.Equal(t, 201, s.post(t, "a", "a").status)
	require.Equal(t, 1, effects(t, pool))
}

// Property: without a key, an Optional route is executed each time, in a transaction; with one,
// once.
func TestOptionalKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{Optional: true}).Handler(insert(201)))
	for range 2 {
		require.Equal(t, 201, s.post(t, "", "a").status)
		require.Equal(t, 201, s.post(t, "k", "a").status)
	}
	require.Equal(t, 3, effects(t, pool))
	requireProblem(t, s.post(t, "not visible", "a"), 400, httpkey.ProblemKeyMalformed)
}

// Property: a middleware inside of another one, for all routes and for one of them, is one
// transaction.
func TestMiddlewareInsideAnother(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	m := newMiddleware(t, pool, httpkey.Config{})
	s := serve(t, m.Handler(m.Handler(insert(201))))
	require.Equal(t, 201, s.post(t, "k", "a").status)
	require.True(t, s.post(t, "k", "a").replayed())
	require.Equal(t, 1, effects(t, pool))
}

// Property: methods that change nothing pass, whether or not they have a key, and those that are
// idempotent by themselves without one, all without SQL; which ones is configurable.
func TestMethodsThatPassThrough(t *testing.T) {
	t.Parallel()
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "passed") })
	passes := func(cfg httpkey.Config, with string) (methods []string) {
		s := serve(t, newMiddleware(t, pgtest.NoPool(t), cfg).Handler(next))
		for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "POST", "PATCH"} {
			a, err := s.ask(t.Context(), method, "/", with, "")
			require.NoError(t, err)
			if a.status == http.StatusOK {
				methods = append(methods, method)
			}
		}
		return methods
	}
	require.Equal(t, []string{"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"}, passes(httpkey.Config{}, ""))
	require.Equal(t, []string{"GET", "HEAD", "OPTIONS", "TRACE"}, passes(httpkey.Config{}, "k"))
	changed := httpkey.Config{PassThrough: []string{"PUT"}, PassWithoutKey: []string{"POST", "PUT"}}
	require.Equal(t, []string{"PUT", "POST"}, passes(changed, ""))
	require.Equal(t, []string{"PUT"}, passes(changed, "k"))
	require.Equal(t, []string{"GET", "HEAD", "OPTIONS", "TRACE"}, passes(httpkey.Config{PassWithoutKey: []string{}}, ""))
	for _, own := range [][]string{{"GET"}, {}} {
		require.Equal(t, own, append([]string{}, passes(httpkey.Config{PassThrough: own}, "")...), "a list of its own does not get longer")
	}
}

// Property: a key that a client sends counts, whatever the method: the same request is replayed,
// another one refused, and one with two keys, too. Row H6 of guarantees.md.
func TestSuppliedKeyCounts(t *testing.T) {
	t.Parallel()
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(insert(http.StatusOK)))
			ask := func(key, body string, header ...string) answer {
				a, err := s.ask(t.Context(), method, "/orders/7", key, body, header...)
				require.NoError(t, err)
				return a
			}
			require.Equal(t, "made a", ask("k", "a").body)
			require.True(t, ask("k", "a").replayed())
			requireProblem(t, ask("k", "b"), 422, httpkey.ProblemKeyReused)
			requireProblem(t, ask("k", "b", "Idempotency-Key", "j"), 400, httpkey.ProblemKeyMalformed)
			require.Equal(t, 1, effects(t, pool))
		})
	}
}

// Property: one handler serves a PUT with a key, in the request's transaction, and one without.
func TestHandlerAsksForItsTransaction(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, newMiddleware(t, pool, httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tx, there := httpkey.TxOf(r)
		assert.Equal(t, r.Header.Get("Idempotency-Key") != "", there)
		if there {
			assert.Equal(t, httpkey.Tx(r), tx)
		}
		w.WriteHeader(http.StatusNoContent)
	})))
	for _, key := range []string{"", "k"} {
		a, err := s.ask(t.Context(), http.MethodPut, "/orders/7", key, "a")
		require.NoError(t, err)
		require.Equal(t, http.StatusNoContent, a.status)
	}
}
