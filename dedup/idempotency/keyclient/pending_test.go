package keyclient_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// bank is a service that pays once for each key, and is cut off as the test says.
type bank struct {
	*httptest.Server
	pool     *pgxpool.Pool
	listener *resetting

	mu     sync.Mutex
	seen   []string
	around func(n int, act func()) // the n-th request
}

func newBank(t *testing.T, pool *pgxpool.Pool) *bank {
	t.Helper()
	_, err := pool.Exec(t.Context(), `CREATE TABLE payments (name text NOT NULL)`)
	require.NoError(t, err)
	operation, err := idempotency.New(pool, idempotency.Config{Operation: "pay"})
	require.NoError(t, err)
	b := &bank{pool: pool, around: func(_ int, act func()) { act() }}
	b.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		b.mu.Lock()
		n := len(b.seen)
		b.seen = append(b.seen, r.Header.Get("Idempotency-Key"))
		around := b.around
		b.mu.Unlock()
		around(n, func() { b.pay(w, r, operation, body) })
	}))
	b.listener = &resetting{Listener: b.Listener}
	b.Listener = b.listener
	b.Config.ErrorLog = nothing()
	b.Start()
	t.Cleanup(b.Close)
	return b
}

func (b *bank) disturb(around func(n int, act func())) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.around = around
}

// pay continues without its client, as a payment does.
func (b *bank) pay(w http.ResponseWriter, r *http.Request, operation *idempotency.Operation, body []byte) {
	key := idempotency.Key{Scope: "shop", Value: r.Header.Get("Idempotency-Key"), Fingerprint: idempotency.NewFingerprint(body)}
	response, err := operation.Once(context.WithoutCancel(r.Context()), key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		_, err := tx.Exec(ctx, `INSERT INTO payments (name) VALUES ($1)`, string(body))
		return idempotency.Response{Status: http.StatusCreated, Body: []byte("paid")}, err
	})
	switch {
	case errors.Is(err, idempotency.ErrInProgress):
		w.Header().Set("Retry-After", "0")
		w.WriteHeader(http.StatusConflict)
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	default:
		w.WriteHeader(response.Status)
		_, _ = w.Write(response.Body)
	}
}

func (b *bank) keys() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.seen)
}

func (b *bank) payments(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM payments`).Scan(&n))
	return n
}

func newPending(t *testing.T, pool *pgxpool.Pool, cfg keyclient.PendingConfig) *keyclient.Pending {
	t.Helper()
	cfg.Client = "shop"
	pending, err := keyclient.NewPending(pool, cfg)
	require.NoError(t, err)
	return pending
}

func isPending(t *testing.T, pending *keyclient.Pending) []string {
	t.Helper()
	list, err := pending.List(t.Context(), "", 100)
	require.NoError(t, err)
	names := []string{}
	for _, r := range list {
		names = append(names, r.Request)
	}
	return names
}

// Property: connections that are reset before the server read the request, and after it acted, cost
// attempts, but cause no second effect, and the client gets the answer. Row H5 of guarantees.md.
func TestCutConnectionsCostNoSecondEffect(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	b := newBank(t, pool)
	b.listener.left.Store(2)
	b.disturb(func(n int, act func()) {
		act()
		if n < 2 {
			panic(http.ErrAbortHandler) // the answer is lost
		}
	})
	var retries []error
	client := newClient(t, quick(keyclient.TransportConfig{Retrying: func(_ *http.Request, r keyclient.Retry) { retries = append(retries, r.Err) }}))
	status, body, err := do(t.Context(), t, client, http.MethodPost, b.URL, "charge")
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, status)
	require.Equal(t, "paid", body)
	require.Len(t, retries, 4, "%v", retries)
	require.Len(t, b.keys(), 3)
	require.Equal(t, 1, b.payments(t))
}

// Property: a key is committed before it is sent, with synchronous_commit whatever the role's
// default is, and stays until the transaction that stores the answer forgets it.
func TestKeyIsPendingUntilTheAnswerIsWrittenDown(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `
		CREATE TABLE commits (how text NOT NULL);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.commits VALUES (current_setting(''synchronous_commit'')); RETURN NEW; END';
		CREATE TRIGGER note AFTER INSERT ON effectonce.pending_requests FOR EACH ROW EXECUTE FUNCTION note()`)
	require.NoError(t, err)
	b := newBank(t, pool)
	lazy := pool.Config()
	lazy.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	lazyPool := pgtest.PoolOf(t, lazy)
	pending := newPending(t, lazyPool, keyclient.PendingConfig{})
	var sent []string
	b.disturb(func(_ int, act func()) {
		sent = append(sent, isPending(t, pending)...)
		act()
	})
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending}))
	request, err := http.NewRequestWithContext(keyclient.WithRequestName(t.Context(), "charge order 4127"), http.MethodPost, b.URL, http.NoBody)
	require.NoError(t, err)
	response, err := client.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, []string{"charge order 4127"}, sent)
	require.Equal(t, sent, isPending(t, pending))
	var how string
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT how FROM commits`).Scan(&how))
	require.Equal(t, "on", how)

	forget := func(err error) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			return errors.Join(pending.ForgetTx(t.Context(), tx, "charge order 4127", keyclient.SentKey(response, "")), err)
		}
	}
	require.Error(t, pgx.BeginFunc(t.Context(), pool, forget(errors.New("not written down"))))
	require.Len(t, isPending(t, pending), 1)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, forget(nil)))
	require.Empty(t, isPending(t, pending))
}

// Property: a request that got no final answer, or not all of it, stays pending, and a new
// Transport on the same database uses its key; with ForgetAnswered, the answer settles it.
func TestOnlyTheWholeAnswerForgets(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]func(w http.ResponseWriter){
		"an answer that breaks off": func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "paid")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		},
		"no final answer": func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) },
		"no answer":       func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			pending := newPending(t, pool, keyclient.PendingConfig{})
			s := newRemote(t, func(n int, w http.ResponseWriter, _ *http.Request) {
				if n == 0 {
					broken(w)
				}
			})
			s.Config.ErrorLog = nothing()
			cfg := quick(keyclient.TransportConfig{Pending: pending, ForgetAnswered: true, AttemptsMax: 1})
			ctx := keyclient.WithRequestName(t.Context(), "charge")
			status, _, err := do(ctx, t, newClient(t, cfg), http.MethodPost, s.URL, "x")
			require.True(t, err != nil || status == http.StatusServiceUnavailable)
			require.Equal(t, []string{"charge"}, isPending(t, pending))

			_, _, err = do(ctx, t, newClient(t, cfg), http.MethodPost, s.URL, "x")
			require.NoError(t, err)
			require.Empty(t, isPending(t, pending))
			require.Equal(t, s.all()[0].key, s.all()[1].key)
			_, _, err = do(ctx, t, newClient(t, cfg), http.MethodPost, s.URL, "x")
			require.NoError(t, err)
			require.NotEqual(t, s.all()[0].key, s.all()[2].key)
		})
	}
}

// Property: concurrent requests with one name use one key: the insert decides; the same name of two
// clients is two requests.
func TestOneNameIsOneKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	b := newBank(t, pool)
	client := newClient(t, quick(keyclient.TransportConfig{Pending: newPending(t, pool, keyclient.PendingConfig{}), AttemptsMax: 100}))
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			status, _, err := do(keyclient.WithRequestName(t.Context(), "charge"), t, client, http.MethodPost, b.URL, "charge")
			assert.NoError(t, err) //nolint:testifylint // require must not be called here
			assert.Equal(t, http.StatusCreated, status)
		})
	}
	wg.Wait()
	require.Equal(t, 1, b.payments(t))
	keys := b.keys()
	slices.Sort(keys)
	require.Len(t, slices.Compact(keys), 1)

	other, err := keyclient.NewPending(pool, keyclient.PendingConfig{Client: "another shop"})
	require.NoError(t, err)
	key, err := other.Begin(t.Context(), "charge", "fresh")
	require.NoError(t, err)
	require.Equal(t, "fresh", key)
}

// Property: a request is not retried when servers may have forgotten its key: nothing is sent, and
// it is listed as too old.
func TestPendingRequestGetsTooOld(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{AgeMax: time.Hour})
	s := newRemote(t, failing(0, 0))
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending}))
	ctx := keyclient.WithRequestName(t.Context(), "charge")
	for _, test := range []struct {
		age     string
		refused bool
	}{{"59 minutes", false}, {"61 minutes", true}} {
		_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.pending_requests (client, request, key, created_at)
			VALUES ('shop', 'charge', 'old', clock_timestamp() - $1::text::interval) ON CONFLICT (client, request) DO UPDATE SET created_at = excluded.created_at`, test.age)
		require.NoError(t, err)
		_, _, err = do(ctx, t, client, http.MethodPost, s.URL, "x")
		require.Equal(t, test.refused, errors.Is(err, keyclient.ErrPendingTooOld), "%v", err)
		list, err := pending.List(t.Context(), "", 1)
		require.NoError(t, err)
		require.Equal(t, test.refused, list[0].TooOld)
	}
	require.Len(t, s.all(), 1)
	require.NoError(t, pending.Forget(t.Context(), "charge", "another"))
	require.Len(t, isPending(t, pending), 1)
	require.NoError(t, pending.Forget(t.Context(), "charge", "old"))
	require.Empty(t, isPending(t, pending))
}

// Property: nothing is sent when the key cannot be made durable, or the caller gave another key
// than the pending one.
func TestNothingIsSentWithoutADurableKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	s := newRemote(t, failing(0, 0))
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending}))
	_, err := pending.Begin(t.Context(), "charge", "first")
	require.NoError(t, err)
	_, _, err = do(keyclient.WithKey(keyclient.WithRequestName(t.Context(), "charge"), "second"), t, client, http.MethodPost, s.URL, "x")
	require.ErrorIs(t, err, keyclient.ErrKey)
	_, _, err = do(keyclient.WithRequestName(t.Context(), "a\nb"), t, client, http.MethodPost, s.URL, "x")
	require.ErrorIs(t, err, keyclient.ErrKey)

	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/nothing?sslmode=disable&connect_timeout=1")
	require.NoError(t, err)
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no network") }
	nowhere := pgtest.PoolOf(t, config)
	client = newClient(t, quick(keyclient.TransportConfig{Pending: newPending(t, nowhere, keyclient.PendingConfig{})}))
	_, _, err = do(keyclient.WithRequestName(t.Context(), "other"), t, client, http.MethodPost, s.URL, "x")
	require.ErrorIs(t, err, keyclient.ErrKey)
	require.Empty(t, s.all())
}

// Property: settings of a Pending are checked all at once; what is listed comes in pages.
func TestPendingSettingsAndPages(t *testing.T) {
	t.Parallel()
	_, err := keyclient.NewPending(nil, keyclient.PendingConfig{Schema: "no-schema!", AgeMax: time.Second})
	for _, want := range []string{"pool is nil", "Client of 0 bytes: want 1 to 255", "AgeMax 1s: want 1m0s"} {
		require.ErrorContains(t, err, want)
	}
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	for _, name := range []string{"c", "a", "b"} {
		_, err := pending.Begin(t.Context(), name, "key-"+name)
		require.NoError(t, err)
	}
	page, err := pending.List(t.Context(), "a", 1)
	require.NoError(t, err)
	require.Len(t, page, 1)
	require.Equal(t, "b", page[0].Request)
	require.Equal(t, "key-b", page[0].Key)
}

// Property: with ForgetAnswered, an answer settles a pending request only if a new key could not
// execute it again: not if it is unknown whether it was executed, if it is still executing (202,
// unless that is the stored answer), if it was executed with an answer that is lost, or if the key
// has another request. After a redirect that is followed, the final answer counts.
func TestWhatSettlesARequest(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		status, err := strconv.Atoi(r.URL.Path[1:])
		assert.NoError(t, err) //nolint:testifylint // require must not be called here
		if status == http.StatusPermanentRedirect {
			w.Header().Set("Location", "/"+r.URL.RawQuery)
		}
		if status == http.StatusInternalServerError || r.URL.RawQuery == "replayed" {
			w.Header().Set("Idempotent-Replayed", "true")
		}
		w.WriteHeader(status)
	})
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending, ForgetAnswered: true, AttemptsMax: 1}))
	kept := []string{"202", "308?202", "308?409", "401", "403", "407", "408", "409", "410", "421", "422", "423", "425", "429", "500", "501", "503"}
	for _, path := range append([]string{"200", "201", "202?replayed", "204", "308?200", "400", "402", "404", "413"}, kept...) {
		_, _, err := do(keyclient.WithRequestName(t.Context(), path), t, client, http.MethodPost, s.URL+"/"+path, "x")
		require.NoError(t, err)
	}
	require.ElementsMatch(t, kept, isPending(t, pending))
}

// Property: after a redirect to a GET the key is that of the redirected request: in the answer, so
// that it can be forgotten, and in the error, if the GET gets no answer; a retry under it has no
// second effect. The GET does not carry the key.
func TestKeyBehindARedirect(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	var gone atomic.Bool
	s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPost:
			http.Redirect(w, r, "/moved", http.StatusSeeOther)
		case r.URL.Path == "/moved":
			http.Redirect(w, r, "/result", http.StatusFound)
		case gone.Load():
			panic(http.ErrAbortHandler)
		}
	})
	s.Config.ErrorLog = nothing()
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending, AttemptsMax: 2}))
	gone.Store(true)
	ctx := keyclient.WithRequestName(t.Context(), "charge")
	_, _, err := do(ctx, t, client, http.MethodPost, s.URL+"/charge", "x")
	var unanswered *keyclient.UnansweredError
	require.ErrorAs(t, err, &unanswered)
	require.Equal(t, s.all()[0].key, unanswered.Key)

	gone.Store(false)
	request, err := http.NewRequestWithContext(keyclient.WithKey(ctx, unanswered.Key), http.MethodPost, s.URL+"/charge", strings.NewReader("x"))
	require.NoError(t, err)
	response, err := client.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, "/result", response.Request.URL.Path)
	require.Equal(t, unanswered.Key, keyclient.SentKey(response, ""))
	for _, a := range s.all() {
		require.Equal(t, a.method == http.MethodPost, a.key == unanswered.Key)
		require.Equal(t, a.method == http.MethodGet, a.key == "")
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return pending.ForgetTx(t.Context(), tx, "charge", keyclient.SentKey(response, ""))
	}))
	require.Empty(t, isPending(t, pending))

	_, _, err = do(t.Context(), t, client, http.MethodGet, s.URL+"/moved", "")
	require.NoError(t, err)
	gone.Store(true)
	_, _, err = do(t.Context(), t, client, http.MethodGet, s.URL+"/moved", "")
	require.Error(t, err)
	require.NotErrorAs(t, err, &unanswered, "a request that never had a key")
}

// Property: if an earlier attempt may have been executed, a refusal settles a pending request only
// if it is the stored answer: a route that was removed in between says nothing about that attempt,
// nor about the one that is in progress (409). An attempt that was not executed for now (429)
// leaves no doubt.
func TestRefusalAfterADoubtfulAttempt(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	first := map[string]func(w http.ResponseWriter){
		"no answer": func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
		"503":       func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) },
		"409": func(w http.ResponseWriter) {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusConflict)
		},
		"429":     func(w http.ResponseWriter) { w.WriteHeader(http.StatusTooManyRequests) },
		"pending": nil, "a key": nil, "nothing": nil,
	}
	var mu sync.Mutex
	tries := map[string]int{}
	s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		tries[r.URL.Path]++
		try := tries[r.URL.Path]
		mu.Unlock()
		query := r.URL.Query()
		if earlier := first[query.Get("first")]; earlier != nil && try == 1 {
			earlier(w)
			return
		}
		w.Header().Set("Idempotent-Replayed", query.Get("replayed"))
		status, err := strconv.Atoi(query.Get("then"))
		assert.NoError(t, err) //nolint:testifylint // require must not be called here
		w.WriteHeader(status)
	})
	s.Config.ErrorLog = nothing()
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending, ForgetAnswered: true, AttemptsMax: 2}))
	kept := []string{}
	for earlier := range first {
		for _, then := range []struct {
			status   string
			replayed bool
			settles  bool
		}{{"404", false, earlier == "429" || earlier == "nothing"}, {"404", true, true}, {"201", false, true}} {
			name := earlier + ", then " + then.status + " " + strconv.FormatBool(then.replayed)
			if !then.settles {
				kept = append(kept, name)
			}
			ctx := keyclient.WithRequestName(t.Context(), name)
			switch earlier {
			case "pending":
				_, err := pending.Begin(t.Context(), name, name[:7])
				require.NoError(t, err)
			case "a key":
				ctx = keyclient.WithKey(ctx, "chosen")
			}
			query := url.Values{"first": {earlier}, "then": {then.status}, "replayed": {strconv.FormatBool(then.replayed)}}
			_, _, err := do(ctx, t, client, http.MethodPost, s.URL+"/"+url.PathEscape(name)+"?"+query.Encode(), "x")
			require.NoError(t, err)
		}
	}
	require.ElementsMatch(t, kept, isPending(t, pending))
}

// Property: a replica that listed a request before another one stored its answer and forgot it,
// sends it under the name and the key that it listed: it gets the stored answer, and there is one
// effect. The request that became pending again by that is listed, under the same key, until it is
// forgotten; a request under the name with the listed key while a new request has the name is not
// sent.
func TestListedBeforeAnotherReplicaForgot(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := newService(t, pool)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	key, err := pending.Begin(t.Context(), "charge order 4127", "key-1") // of a process that died
	require.NoError(t, err)
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending}))
	var listed [2]keyclient.PendingRequest
	for replica := range listed {
		list, err := pending.List(t.Context(), "", 10)
		require.NoError(t, err)
		require.Len(t, list, 1)
		listed[replica] = list[0]
	}
	ask := func(r keyclient.PendingRequest) answer {
		ctx := keyclient.WithKey(keyclient.WithRequestName(t.Context(), r.Request), r.Key)
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.address+"/charge", strings.NewReader("4127"))
		require.NoError(t, err)
		response, err := client.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, key, keyclient.SentKey(response, ""))
		return answer{status: response.StatusCode, header: response.Header}
	}
	forget := func() {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			return pending.ForgetTx(t.Context(), tx, "charge order 4127", key)
		}))
		require.Empty(t, isPending(t, pending))
	}
	require.False(t, ask(listed[0]).replayed())
	forget()
	require.True(t, ask(listed[1]).replayed())
	require.Equal(t, 1, effects(t, pool))
	again, err := pending.List(t.Context(), "", 10)
	require.NoError(t, err)
	require.Len(t, again, 1, "if this replica dies now, the next one is told")
	require.Equal(t, key, again[0].Key)
	forget()

	_, err = pending.Begin(t.Context(), "charge order 4127", "key-2")
	require.NoError(t, err)
	_, _, err = do(keyclient.WithKey(keyclient.WithRequestName(t.Context(), "charge order 4127"), key), t, client, http.MethodPost, "http://"+s.address+"/charge", "4127")
	require.ErrorIs(t, err, keyclient.ErrKey)
	require.Equal(t, 1, effects(t, pool))
}
