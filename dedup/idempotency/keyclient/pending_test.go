package keyclient_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
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

	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
	"github.com/effectonce/effectonce/internal/pgtest"
)

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

// Property: a key is committed before it is sent, with synchronous_commit whatever the role's
// default is, and stays until the transaction that stores the answer forgets it.
func TestKeyIsPendingUntilTheAnswerIsWrittenDown(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, `
		CREATE TABLE commits (how text NOT NULL);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.commits VALUES (current_setting(''synchronous_commit'')); RETURN NEW; END';
		CREATE TRIGGER note AFTER INSERT ON effectonce.pending_requests FOR EACH ROW EXECUTE FUNCTION note()`)
	lazy := pool.Config()
	lazy.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pending := newPending(t, pgtest.PoolOf(t, lazy), keyclient.PendingConfig{})
	var sent []string
	s := newRemote(t, func(int, http.ResponseWriter, *http.Request) { sent = append(sent, isPending(t, pending)...) })
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending}))
	_, _, err := do(keyclient.WithRequestName(t.Context(), "charge"), t, client, http.MethodPost, s.URL, "x")
	require.NoError(t, err)
	require.Equal(t, []string{"charge"}, sent)
	require.Equal(t, sent, isPending(t, pending))
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM commits WHERE how = 'on'`))

	forget := func(err error) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			return errors.Join(pending.ForgetTx(t.Context(), tx, "charge", s.all()[0].key), err)
		}
	}
	require.Error(t, pgx.BeginFunc(t.Context(), pool, forget(errors.New("not written down"))))
	require.Len(t, isPending(t, pending), 1)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, forget(nil)))
	require.Empty(t, isPending(t, pending))
}

// Property: concurrent requests with one name use one key: the insert decides; the same name of two
// clients is two requests.
func TestOneNameIsOneKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := newRemote(t, failing(0, 0))
	client := newClient(t, quick(keyclient.TransportConfig{Pending: newPending(t, pool, keyclient.PendingConfig{})}))
	var group sync.WaitGroup
	for range 20 {
		group.Go(func() {
			_, _, err := do(keyclient.WithRequestName(t.Context(), "charge"), t, client, http.MethodPost, s.URL, "charge")
			assert.NoError(t, err)
		})
	}
	group.Wait()
	require.Len(t, s.all(), 20)
	for _, a := range s.all() {
		require.Equal(t, s.all()[0].key, a.key)
	}
	other, err := keyclient.NewPending(pool, keyclient.PendingConfig{Client: "another shop"})
	require.NoError(t, err)
	key, err := other.Begin(t.Context(), "charge", "fresh")
	require.NoError(t, err)
	require.Equal(t, "fresh", key)
}

// Property: a request whose answer breaks off stays pending, and a new Transport on the same database
// uses its key; with ForgetAnswered, the whole answer settles it.
func TestOnlyTheWholeAnswerForgets(t *testing.T) {
	t.Parallel()
	pending := newPending(t, pgtest.Pool(t), keyclient.PendingConfig{})
	s := newRemote(t, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n == 0 {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "paid")
			panic(http.ErrAbortHandler)
		}
	})
	s.Config.ErrorLog = nothing()
	for n, left := range [][]string{{"charge"}, {}, {}} {
		client := newClient(t, quick(keyclient.TransportConfig{Pending: pending, ForgetAnswered: true, AttemptsMax: 1}))
		_, _, err := do(keyclient.WithRequestName(t.Context(), "charge"), t, client, http.MethodPost, s.URL, "x")
		require.Equal(t, n == 0, err != nil)
		require.Equal(t, left, isPending(t, pending))
	}
	require.Equal(t, s.all()[0].key, s.all()[1].key)
	require.NotEqual(t, s.all()[0].key, s.all()[2].key)
}

// Property: nothing is sent when the key cannot be made durable, or the caller gave another key
// than the pending one.
func TestNothingIsSentWithoutADurableKey(t *testing.T) {
	t.Parallel()
	pending := newPending(t, pgtest.Pool(t), keyclient.PendingConfig{})
	_, err := pending.Begin(t.Context(), "charge", "first")
	require.NoError(t, err)
	s := newRemote(t, failing(0, 0))
	for name, on := range map[string]*keyclient.Pending{"charge": pending, "a\nb": pending, "other": newPending(t, pgtest.NoPool(t), keyclient.PendingConfig{})} {
		client := newClient(t, quick(keyclient.TransportConfig{Pending: on}))
		_, _, err = do(keyclient.WithKey(keyclient.WithRequestName(t.Context(), name), "second"), t, client, http.MethodPost, s.URL, "x")
		require.ErrorIs(t, err, keyclient.ErrKey)
	}
	require.Empty(t, s.all())
}

// Property: the key is kept in a redirect that asks for the same request elsewhere, and not sent with
// a GET. After that GET the key is still known: in the answer, so that it can be forgotten, and in the
// error, if the GET gets no answer.
func TestKeyBehindARedirect(t *testing.T) {
	t.Parallel()
	pending := newPending(t, pgtest.Pool(t), keyclient.PendingConfig{})
	var gone atomic.Bool
	gone.Store(true)
	s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/charge":
			http.Redirect(w, r, "/here", http.StatusTemporaryRedirect)
		case "/here":
			http.Redirect(w, r, "/result", http.StatusSeeOther)
		default:
			if gone.Load() {
				panic(http.ErrAbortHandler)
			}
		}
	})
	s.Config.ErrorLog = nothing()
	client := newClient(t, quick(keyclient.TransportConfig{Pending: pending, AttemptsMax: 2}))
	ctx := keyclient.WithRequestName(t.Context(), "charge")
	_, _, err := do(ctx, t, client, http.MethodPost, s.URL+"/charge", "x")
	var unanswered *keyclient.UnansweredError
	require.ErrorAs(t, err, &unanswered)
	_, _, err = do(t.Context(), t, client, http.MethodGet, s.URL+"/result", "")
	require.Error(t, err)
	require.NotErrorAs(t, err, new(*keyclient.UnansweredError), "a request that never had a key")

	gone.Store(false)
	request, err := http.NewRequestWithContext(keyclient.WithKey(ctx, unanswered.Key), http.MethodPost, s.URL+"/charge", strings.NewReader("x"))
	require.NoError(t, err)
	response, err := client.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, unanswered.Key, keyclient.SentKey(response, ""))
	for _, a := range s.all() {
		require.Equal(t, map[string]string{http.MethodPost: unanswered.Key}[a.method], a.key, a.path)
	}
}

// Property: if an earlier attempt may have been executed, a refusal settles a pending request only
// if it is the stored answer: a route that was removed in between says nothing about that attempt,
// nor about the one that is in progress (409). An attempt that was not executed for now (429)
// leaves no doubt.
func TestRefusalAfterADoubtfulAttempt(t *testing.T) {
	t.Parallel()
	pending := newPending(t, pgtest.Pool(t), keyclient.PendingConfig{})
	kept := []string{}
	for earlier, settles := range map[int]bool{0: false, 409: false, 429: true, 503: false, -1: true, -2: false, -3: false} { // no answer, statuses, none, pending, a key of the caller's
		for _, then := range []struct {
			status   int
			replayed string
			settles  bool
		}{{404, "", settles}, {404, "true", true}, {201, "", true}} {
			s := newRemote(t, func(n int, w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "0")
				switch {
				case n > 0 || earlier < 0:
					w.Header().Set("Idempotent-Replayed", then.replayed)
					w.WriteHeader(then.status)
				case earlier == 0:
					panic(http.ErrAbortHandler)
				default:
					w.WriteHeader(earlier)
				}
			})
			s.Config.ErrorLog = nothing()
			name := fmt.Sprint(earlier, then)
			ctx := keyclient.WithRequestName(t.Context(), name)
			switch earlier {
			case -2:
				_, err := pending.Begin(t.Context(), name, "begun")
				require.NoError(t, err)
			case -3:
				ctx = keyclient.WithKey(ctx, "chosen")
			}
			if !then.settles {
				kept = append(kept, name)
			}
			client := newClient(t, quick(keyclient.TransportConfig{Pending: pending, ForgetAnswered: true, AttemptsMax: 2}))
			_, _, err := do(ctx, t, client, http.MethodPost, s.URL, "x")
			require.NoError(t, err)
		}
	}
	require.ElementsMatch(t, kept, isPending(t, pending))
}
