package keyclient_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// cut is after how many bytes of requests, or of answers, a connection is reset; -1: never.
type cut struct{ read, written int }

// cuts are of the connections to come. They have a lock of their own: a server that is closed waits
// for its Accept.
type cuts struct {
	mu   sync.Mutex
	left []cut
}

func (c *cuts) next() cut {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.left) == 0 {
		return cut{-1, -1}
	}
	defer func() { c.left = c.left[1:] }()
	return c.left[0]
}

func (c *cuts) requireUsed(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Empty(t, c.left)
}

// cutting resets its connections as its cuts say.
type cutting struct {
	net.Listener
	cuts *cuts
}

func (l *cutting) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &cutConn{Conn: conn, left: l.cuts.next()}, nil
}

// cutConn is read and written by one goroutine each.
type cutConn struct {
	net.Conn
	left cut
}

func (c *cutConn) Read(p []byte) (int, error) {
	if c.left.read < 0 || len(p) == 0 {
		return c.Conn.Read(p)
	}
	if c.left.read == 0 {
		_ = reset(c.Conn)
		return 0, net.ErrClosed
	}
	n, err := c.Conn.Read(p[:min(len(p), c.left.read)])
	c.left.read -= n
	return n, err
}

func (c *cutConn) Write(p []byte) (int, error) {
	if c.left.written < 0 {
		return c.Conn.Write(p)
	}
	n, err := c.Conn.Write(p[:min(len(p), c.left.written)])
	c.left.written -= n
	if err == nil && n < len(p) {
		_ = reset(c.Conn)
		err = net.ErrClosed
	}
	return n, err
}

// newPool is a database with a table for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, `CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL)`)
}

// answer is what a client sees.
type answer struct {
	status int
	header http.Header
	body   string
	key    string
}

func (a answer) replayed() bool { return a.header.Get("Idempotent-Replayed") == "true" }

// service is a server behind the middleware. Its answers are as long as its requests, and name the
// row of the effect.
type service struct {
	*httptest.Server
	t    *testing.T
	pool *pgxpool.Pool
	cuts cuts

	mu   sync.Mutex
	seen map[string][]string // keys of all tries
}

func newService(t *testing.T, pool *pgxpool.Pool, cuts ...cut) *service {
	t.Helper()
	s := &service{t: t, pool: pool, seen: map[string][]string{}}
	s.cuts.left = cuts
	tenant := func(*http.Request) (string, error) { return "acme", nil }
	once, err := httpkey.New(pool, tenant, httpkey.Config{Operation: idempotency.Config{Operation: "api"}})
	require.NoError(t, err)
	handler := once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var id int
		if err := httpkey.Tx(r).QueryRow(r.Context(), `INSERT INTO effects (name) VALUES ($1) RETURNING id`, r.URL.Path[1:]).Scan(&id); err != nil {
			httpkey.Fail(r, err)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, padded(fmt.Sprintf("effect %d", id)))
	}))
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.seen[r.URL.Path[1:]] = append(s.seen[r.URL.Path[1:]], r.Header.Get("Idempotency-Key"))
		s.mu.Unlock()
		handler.ServeHTTP(w, r)
	}))
	s.Listener = &cutting{s.Listener, &s.cuts}
	s.Config.ErrorLog = nothing()
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// keys are those of all tries of a request.
func (s *service) keys(name string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen[name])
}

// padded is long enough to be cut in the middle.
func padded(text string) string { return fmt.Sprintf("%-20000s", text) }

// insist retries until it has the whole answer, as a program does, under the same key: after an
// answer that breaks off, and after the last attempt.
func (s *service) insist(client *http.Client, name string) (a answer, err error) {
	ctx := s.t.Context()
	for range 20 {
		if a, err = s.ask(ctx, client, name); err == nil {
			return a, nil
		}
		if a.key != "" {
			ctx = keyclient.WithKey(s.t.Context(), a.key) //nolint:fatcontext // it replaces the last one
		}
	}
	return a, err
}

// ask returns the key also with an error.
func (s *service) ask(ctx context.Context, client *http.Client, name string) (a answer, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/"+name, strings.NewReader(padded(name)))
	if err != nil {
		return a, err
	}
	response, err := client.Do(request)
	var unanswered *keyclient.UnansweredError
	if errors.As(err, &unanswered) {
		a.key = unanswered.Key
	}
	if err != nil {
		return a, err
	}
	body, err := io.ReadAll(response.Body)
	a = answer{response.StatusCode, response.Header, string(body), response.Request.Header.Get("Idempotency-Key")}
	return a, errors.Join(err, response.Body.Close())
}

// requireOnce checks that a request has one effect, whose execution the answer is of, and one key
// over all tries.
func (s *service) requireOnce(name string, a answer) {
	s.t.Helper()
	require.Equal(s.t, http.StatusCreated, a.status, a.body)
	var id, n int
	require.NoError(s.t, s.pool.QueryRow(s.t.Context(), `SELECT min(id), count(*) FROM effects WHERE name = $1`, name).Scan(&id, &n))
	require.Equal(s.t, 1, n)
	require.Equal(s.t, padded(fmt.Sprintf("effect %d", id)), a.body)
	sent := slices.Compact(s.keys(name))
	require.Len(s.t, sent, 1, "one key over all tries")
	require.Equal(s.t, 1, pgtest.Count(s.t, s.pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE key = $1 AND state = 'finished'`, sent[0]))
}

// Property: wherever connections are cut, a request has one effect, the client gets the answer of
// that execution, and all its tries have one key; where the effect was committed before the cut,
// the answer is the stored one. Rows H4, H5 of guarantees.md.
func TestConnectionsCutAnywhere(t *testing.T) {
	t.Parallel()
	early := []cut{{0, -1}, {100, -1}, {10_000, -1}} // before a request, in its head, in its body
	late := []cut{{-1, 0}, {-1, 20}, {-1, 10_000}}   // after COMMIT before the answer, in its head, in its body
	for name, test := range map[string]struct {
		cuts     []cut
		replayed bool
	}{
		"nowhere": {nil, false}, "before the request": {early[:1], false}, "in its head": {early[1:2], false}, "in its body": {early[2:], false},
		"before the answer": {late[:1], true}, "in the head of the answer": {late[1:2], true}, "in the body of the answer": {late[2:], true},
		"everywhere": {slices.Concat(early, late, early, late), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newService(t, newPool(t), test.cuts...)
			a, err := s.insist(newClient(t, quick(keyclient.TransportConfig{})), "charge")
			require.NoError(t, err)
			require.Equal(t, test.replayed, a.replayed())
			s.requireOnce("charge", a)
			s.cuts.requireUsed(t)
			require.Equal(t, 1, pgtest.Count(t, s.pool, `SELECT count(*) FROM effectonce.idempotency_keys`))
		})
	}
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

// Property: a request gets no key when servers may have forgotten it, and is listed as too old.
func TestPendingRequestGetsTooOld(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{AgeMax: time.Hour})
	for _, test := range []struct {
		age     string
		refused bool
	}{{"59 minutes", false}, {"61 minutes", true}} {
		_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.pending_requests (client, request, key, created_at)
			VALUES ('shop', 'charge', 'old', clock_timestamp() - $1::text::interval) ON CONFLICT (client, request) DO UPDATE SET created_at = excluded.created_at`, test.age)
		require.NoError(t, err)
		key, err := pending.Begin(t.Context(), "charge", "fresh")
		require.Equal(t, test.refused, key == "")
		require.Equal(t, test.refused, errors.Is(err, keyclient.ErrPendingTooOld), "%v", err)
		list, err := pending.List(t.Context(), "", 1)
		require.NoError(t, err)
		require.Equal(t, test.refused, list[0].TooOld)
	}
	forget := func(key string) error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return pending.Forget(t.Context(), tx, "charge", key) })
	}
	require.NoError(t, forget("another"))
	require.Len(t, isPending(t, pending), 1)
	require.NoError(t, forget("old"))
	require.Empty(t, isPending(t, pending))
}

// Property: settings of a Pending are checked all at once; what is listed comes in pages.
func TestPendingSettingsAndPages(t *testing.T) {
	t.Parallel()
	_, err := keyclient.NewPending(nil, keyclient.PendingConfig{Schema: "no-schema!", AgeMax: time.Second})
	for _, want := range []string{"pool is nil", "Client: invalid idempotency key: scope has 0 bytes: want 1 to 255", "AgeMax 1s: want 1m0s"} {
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

// Property: a key is committed before Begin returns, with synchronous_commit whatever the role's
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
	sent, err := pending.Begin(t.Context(), "charge", "k")
	require.NoError(t, err)
	require.Equal(t, "k", sent)
	require.Equal(t, []string{"charge"}, isPending(t, pending))
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM commits WHERE how = 'on'`))

	forget := func(err error) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			return errors.Join(pending.Forget(t.Context(), tx, "charge", sent), err)
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
	pending := newPending(t, pool, keyclient.PendingConfig{})
	var group sync.WaitGroup
	var mu sync.Mutex
	keys := map[string]int{}
	for range 20 {
		group.Go(func() {
			key, err := pending.Begin(t.Context(), "charge", idempotency.NewKey())
			assert.NoError(t, err) //nolint:testifylint // not in the goroutine of the test
			mu.Lock()
			defer mu.Unlock()
			keys[key]++
		})
	}
	group.Wait()
	require.Len(t, keys, 1)
	later, err := pending.Begin(t.Context(), "charge", "fresh")
	require.NoError(t, err)
	require.Contains(t, keys, later)
	other, err := keyclient.NewPending(pool, keyclient.PendingConfig{Client: "another shop"})
	require.NoError(t, err)
	key, err := other.Begin(t.Context(), "charge", "fresh")
	require.NoError(t, err)
	require.Equal(t, "fresh", key)
}

// Property: a name that cannot be stored, and a database that cannot be reached, give no key.
func TestNoKeyThatIsNotDurable(t *testing.T) {
	t.Parallel()
	pending := newPending(t, pgtest.Pool(t), keyclient.PendingConfig{})
	for name, on := range map[string]*keyclient.Pending{"a\nb": pending, "other": newPending(t, pgtest.NoPool(t), keyclient.PendingConfig{})} {
		key, err := on.Begin(t.Context(), name, "second")
		require.Error(t, err)
		require.Empty(t, key)
	}
}
