package keyclient_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
	"github.com/effectonce/effectonce/internal/crashpoint"
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

func effects(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effects`)
}

func keys(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`)
}

// answer is what a client sees.
type answer struct {
	status int
	header http.Header
	body   string
}

func (a answer) replayed() bool { return a.header.Get("Idempotent-Replayed") == "true" }

func newMiddleware(pool *pgxpool.Pool) (*httpkey.Middleware, error) {
	tenant := func(*http.Request) (string, error) { return "acme", nil }
	return httpkey.New(pool, tenant, httpkey.Config{Operation: idempotency.Config{Operation: "api"}})
}

// service is a server behind the middleware that can be stopped and started again at its address.
// Its answers are as long as its requests, and name the row of the effect.
type service struct {
	t       *testing.T
	pool    *pgxpool.Pool
	address string
	cuts    cuts

	mu       sync.Mutex
	listener net.Listener
	server   *http.Server
	once     *httpkey.Middleware
	at       func(point string)  // called at the points of an execution
	work     func(name string)   // called in front of the effect
	seen     map[string][]string // keys of all tries
}

func newService(t *testing.T, pool *pgxpool.Pool, cuts ...cut) *service {
	t.Helper()
	s := &service{t: t, pool: pool, at: func(string) {}, work: func(string) {}, seen: map[string][]string{}}
	s.cuts.left = cuts
	var err error
	s.listener, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.address = s.listener.Addr().String()
	require.NoError(t, s.start())
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		assert.NoError(t, s.server.Close())
	})
	return s
}

func (s *service) start() (err error) {
	if s.once, err = newMiddleware(s.pool); err != nil {
		return err
	}
	s.server = &http.Server{ErrorLog: nothing(), Handler: http.HandlerFunc(s.serve), ReadHeaderTimeout: time.Minute}
	go func(server *http.Server, listener net.Listener) { _ = server.Serve(&cutting{listener, &s.cuts}) }(s.server, s.listener)
	return nil
}

// restart ends all connections, and makes everything anew that a process holds in its memory.
func (s *service) restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.server.Close()
	_ = s.listener.Close() // Serve may not have begun
	if assert.Eventually(s.t, s.listens, 2*time.Minute, time.Millisecond) {
		assert.NoError(s.t, s.start())
	}
}

// listens takes the address back, unless some connection uses it as its own end just now.
func (s *service) listens() bool {
	var err error
	s.listener, err = (&net.ListenConfig{}).Listen(s.t.Context(), "tcp", s.address)
	return err == nil
}

// keys are those of all tries of a request.
func (s *service) keys(name string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen[name])
}

// with changes what the service does.
func (s *service) with(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *service) serve(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Path[1:]
	s.mu.Lock()
	once, at, work := s.once, s.at, s.work
	s.seen[name] = append(s.seen[name], r.Header.Get("Idempotency-Key"))
	s.mu.Unlock()
	r = r.WithContext(crashpoint.With(r.Context(), at))
	once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		work(name)
		var id int
		if err := httpkey.Tx(r).QueryRow(r.Context(), `INSERT INTO effects (name) VALUES ($1) RETURNING id`, name).Scan(&id); err != nil {
			httpkey.Fail(r, err)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, padded(fmt.Sprintf("effect %d", id)))
	})).ServeHTTP(w, r)
}

// padded is long enough to be cut in the middle.
func padded(text string) string { return fmt.Sprintf("%-20000s", text) }

// insist retries until it has the whole answer, as a program does, under the same key: after an
// answer that breaks off, and after the last attempt, also if its answer was to wait.
func (s *service) insist(client *http.Client, name string) (answer, error) {
	return s.again(client, name, "")
}

func (s *service) again(client *http.Client, name, key string) (answer, error) {
	for tries := 0; ; tries++ {
		ctx := s.t.Context()
		if key != "" {
			ctx = keyclient.WithKey(ctx, key)
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.address+"/"+name, strings.NewReader(padded(name)))
		if err != nil {
			return answer{}, err
		}
		response, err := client.Do(request)
		var unanswered *keyclient.UnansweredError
		if err == nil {
			var body []byte
			body, err = io.ReadAll(response.Body)
			err = errors.Join(err, response.Body.Close())
			inProgress := response.StatusCode == http.StatusConflict && response.Header.Get("Retry-After") != ""
			if err == nil && (!inProgress || tries == 20) {
				return answer{status: response.StatusCode, header: response.Header, body: string(body)}, nil
			}
			key = keyclient.SentKey(response, "")
		} else if errors.As(err, &unanswered) {
			key = unanswered.Key
		}
		if tries == 20 {
			return answer{}, err
		}
	}
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
			require.Equal(t, 1, keys(t, s.pool))
		})
	}
}

// Property: the same of a server that ends in the middle of an execution, and is started again.
// Rows H1, H4 of guarantees.md.
func TestServerRestartedBetweenTries(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.KeyClaimed, crashpoint.KeyWorked, crashpoint.KeyCommitting, crashpoint.KeyCommitted} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s := newService(t, newPool(t))
			var ended atomic.Bool
			s.with(func() {
				s.at = func(at string) {
					if at == point && ended.CompareAndSwap(false, true) {
						s.restart()
						panic(http.ErrAbortHandler)
					}
				}
			})
			a, err := s.insist(newClient(t, quick(keyclient.TransportConfig{})), "charge")
			require.NoError(t, err)
			require.True(t, ended.Load())
			require.Equal(t, point == crashpoint.KeyCommitted, a.replayed())
			s.requireOnce("charge", a)
		})
	}
}

// Property: a client whose first attempt is given up while it still runs gets 409, waits, and gets
// its answer. Row H7 of guarantees.md.
func TestFirstTryStillRuns(t *testing.T) {
	t.Parallel()
	s := newService(t, newPool(t))
	release := make(chan struct{})
	s.with(func() { s.work = func(string) { <-release } })
	let := sync.OnceFunc(func() { close(release) })
	defer let()
	var statuses []int
	a, err := s.insist(newClient(t, quick(keyclient.TransportConfig{AttemptMax: 5 * time.Second, Retrying: func(_ *http.Request, r keyclient.Retry) {
		if statuses = append(statuses, r.Status); r.Status == http.StatusConflict {
			let()
		}
	}})), "charge")
	require.NoError(t, err)
	require.Zero(t, statuses[0], "the first try is given up")
	require.Contains(t, statuses, http.StatusConflict)
	require.True(t, a.replayed())
	s.requireOnce("charge", a)
}

// Property: a service that cannot reach its database answers 503, and a later attempt with the same
// key is executed. Row H18 of guarantees.md.
func TestUnavailableFirst(t *testing.T) {
	t.Parallel()
	s := newService(t, newPool(t))
	nowhere, err := newMiddleware(pgtest.NoPool(t))
	require.NoError(t, err)
	s.with(func() { s.once = nowhere })
	var statuses []int
	a, err := s.insist(newClient(t, quick(keyclient.TransportConfig{Retrying: func(_ *http.Request, r keyclient.Retry) {
		statuses = append(statuses, r.Status)
		s.restart()
	}})), "charge")
	require.NoError(t, err)
	require.Equal(t, []int{http.StatusServiceUnavailable}, statuses)
	require.False(t, a.replayed())
	s.requireOnce("charge", a)
}

// Property: the same of many requests at once, over connections that are used again and cut at
// random places, and servers that end at random points.
func TestRandomCutsAndRestarts(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	cuts := make([]cut, 60)
	for n := range cuts {
		at := []cut{{-1, -1}, {random.IntN(80_000), -1}, {-1, random.IntN(80_000)}}
		cuts[n] = at[random.IntN(3)]
	}
	s := newService(t, newPool(t), cuts...)
	restarts := 5
	s.with(func() {
		s.at = func(string) {
			s.mu.Lock()
			restart := restarts > 0 && random.IntN(20) == 0
			if restart {
				restarts--
			}
			s.mu.Unlock()
			if restart {
				s.restart()
				panic(http.ErrAbortHandler)
			}
		}
	})
	client := newClient(t, quick(keyclient.TransportConfig{AttemptsMax: 10}))
	var group sync.WaitGroup
	answers := make([]answer, 40)
	for worker := range 4 {
		group.Go(func() {
			for n := worker; n < len(answers); n += 4 {
				var err error
				answers[n], err = s.insist(client, fmt.Sprint("charge-", n))
				assert.NoError(t, err)
			}
		})
	}
	group.Wait()
	for n, a := range answers {
		s.requireOnce(fmt.Sprint("charge-", n), a)
	}
	require.Equal(t, len(answers), effects(t, s.pool))
	require.Equal(t, len(answers), keys(t, s.pool))
}

// Property: a client that is killed at each point of the execution of its request, and restarted,
// uses the key that its table has; so does a client that requests the answer after that, over
// connections that break, too. Rows H1, H5 of guarantees.md.
func TestKilledClientOfTheMiddleware(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.KeyClaimed, crashpoint.KeyWorked, crashpoint.KeyCommitting, crashpoint.KeyCommitted} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			s := newService(t, pool, cut{-1, -1}, cut{100, -1}, cut{-1, 0})
			killed, gone := make(chan *os.Process, 1), make(chan struct{})
			var ended atomic.Bool
			s.with(func() {
				s.at = func(at string) {
					if at == point && ended.CompareAndSwap(false, true) {
						assert.NoError(t, (<-killed).Kill())
						<-gone
					}
				}
			})
			spec := payer{Database: pool.Config().ConnString(), Server: "http://" + s.address + "/charge", Name: padded("charge order 4127")[:200]}
			first := spec.start(t)
			killed <- first.Process
			err := first.Wait()
			close(gone)
			require.ErrorContains(t, err, "signal: killed")
			require.NoError(t, spec.start(t).Wait())

			pending := newPending(t, pool, keyclient.PendingConfig{})
			left, err := pending.List(t.Context(), "", 10)
			require.NoError(t, err)
			require.Len(t, left, 1)
			client := newClient(t, quick(keyclient.TransportConfig{Pending: pending}))
			request, err := http.NewRequestWithContext(keyclient.WithRequestName(t.Context(), left[0].Request), http.MethodPost, spec.Server, strings.NewReader(spec.Name))
			require.NoError(t, err)
			response, err := client.Do(request)
			require.NoError(t, err)
			body, err := io.ReadAll(response.Body)
			require.NoError(t, errors.Join(err, response.Body.Close()))
			a := answer{status: response.StatusCode, header: response.Header, body: string(body)}
			require.True(t, a.replayed())
			s.requireOnce("charge", a)
			require.Equal(t, left[0].Key, s.keys("charge")[0])
			s.cuts.requireUsed(t)
			require.NoError(t, pending.Forget(t.Context(), left[0].Request, keyclient.SentKey(response, "")))
			require.Empty(t, isPending(t, pending))
		})
	}
}

// Property: if a client's request ends at any point of the execution, also during COMMIT and after
// it, its work is done once: the next attempt gets the stored answer. Rows H4, H19 of
// guarantees.md.
func TestClientLeavesAtEachPoint(t *testing.T) {
	t.Parallel()
	for _, point := range []string{crashpoint.KeyWorked, crashpoint.KeyCommitting, crashpoint.KeyCommitted} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s := newService(t, newPool(t))
			ctx, leave := context.WithCancel(keyclient.WithKey(t.Context(), "k"))
			defer leave()
			left, seen := make(chan struct{}), make(chan struct{})
			s.with(func() {
				s.at = func(at string) {
					if at == point {
						leave()
						<-left
						close(seen)
					}
				}
			})
			client := newClient(t, quick(keyclient.TransportConfig{AttemptsMax: 1}))
			_, _, err := do(ctx, t, client, http.MethodPost, "http://"+s.address+"/charge", padded("charge"))
			require.ErrorIs(t, err, context.Canceled)
			close(left)
			<-seen
			s.with(func() { s.at = func(string) {} })
			var a answer
			require.Eventually(t, func() bool { // it may still be in progress
				a, err = s.again(client, "charge", "k")
				return err == nil && a.status != http.StatusConflict
			}, 2*time.Minute, time.Millisecond)
			require.True(t, a.replayed())
			s.requireOnce("charge", a)
		})
	}
}
