package keyclient_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// quick are settings with pauses that no test notices, for servers that keep keys.
func quick(cfg keyclient.TransportConfig) keyclient.TransportConfig {
	if cfg.Honours == nil {
		cfg.Honours = []string{"*"}
	}
	cfg.BackoffMax = 2 * time.Millisecond
	return cfg
}

func newClient(t *testing.T, cfg keyclient.TransportConfig) *http.Client {
	t.Helper()
	base := &http.Transport{}
	t.Cleanup(base.CloseIdleConnections)
	return clientOf(t, base, cfg)
}

func clientOf(t *testing.T, base http.RoundTripper, cfg keyclient.TransportConfig) *http.Client {
	t.Helper()
	transport, err := keyclient.NewTransport(base, cfg)
	require.NoError(t, err)
	return &http.Client{Transport: transport}
}

// asked is what a server saw of a request.
type asked struct{ method, path, key, body string }

// remote is a service that answers the n-th request, counted from 0, with what the test says.
type remote struct {
	*httptest.Server
	mu    sync.Mutex
	asked []asked
}

func newRemote(t *testing.T, answer func(n int, w http.ResponseWriter, r *http.Request)) *remote {
	t.Helper()
	s := &remote{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		s.mu.Lock()
		n := len(s.asked)
		s.asked = append(s.asked, asked{r.Method, r.URL.Path, strings.Join(r.Header.Values("Idempotency-Key"), ","), string(body)})
		s.mu.Unlock()
		answer(n, w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *remote) all() []asked {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]asked(nil), s.asked...)
}

// failing answers with a status until the n-th request, and 200 from there on.
func failing(status, until int) func(int, http.ResponseWriter, *http.Request) {
	return func(n int, w http.ResponseWriter, _ *http.Request) {
		if n < until {
			w.WriteHeader(status)
		}
		_, _ = io.WriteString(w, "answer")
	}
}

// do sends a request and returns status and body.
func do(ctx context.Context, t *testing.T, client *http.Client, method, address, body string) (int, string, error) {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, method, address, strings.NewReader(body))
	require.NoError(t, err)
	return send(t, client, request)
}

func send(t *testing.T, client *http.Client, request *http.Request) (int, string, error) {
	t.Helper()
	response, err := client.Do(request)
	if err != nil {
		return 0, "", err
	}
	read, err := io.ReadAll(response.Body)
	return response.StatusCode, string(read), errors.Join(err, response.Body.Close())
}

// Property: a key that the caller chose is the one that is sent: from the header, else from the
// context, else derived for a step of the work under another key, and that one is the same at each
// attempt of the work. Row H5 of guarantees.md.
func TestKeyOfTheCallerIsKept(t *testing.T) {
	t.Parallel()
	s := newRemote(t, failing(http.StatusBadGateway, 1))
	client := newClient(t, quick(keyclient.TransportConfig{}))
	request, err := http.NewRequestWithContext(keyclient.WithKey(t.Context(), "of-context"), http.MethodPost, s.URL, http.NoBody)
	require.NoError(t, err)
	request.Header.Set("Idempotency-Key", "of-header")
	_, _, err = send(t, client, request)
	require.NoError(t, err)
	_, _, err = do(keyclient.WithKey(t.Context(), "of-context"), t, client, http.MethodDelete, s.URL, "")
	require.NoError(t, err)
	parent := idempotency.Key{Scope: "tenant", Operation: "order", Value: "4127"}
	for range 2 {
		_, _, err = do(keyclient.WithKey(t.Context(), parent.ChildID("charge").String()), t, client, http.MethodPost, s.URL, "")
		require.NoError(t, err)
	}
	var keys []string
	for _, a := range s.all() {
		keys = append(keys, a.key)
	}
	child := parent.ChildID("charge").String()
	require.Equal(t, []string{"of-header", "of-header", "of-context", child, child}, keys)
}

// Property: the Transport retries what its table says, and no more often than AttemptsMax; the last
// answer is returned unchanged.
func TestWhatIsTriedAgain(t *testing.T) {
	t.Parallel()
	const all = 3
	replayed, again := http.Header{"Idempotent-Replayed": {"true"}}, http.Header{"Retry-After": {"0"}}
	for _, test := range []struct {
		method   string
		statuses []int
		header   http.Header
		attempts int
	}{
		{"POST", []int{408, 425, 429, 500, 502, 503, 504}, nil, all},
		{"GET", []int{503}, nil, 1}, // these have no key
		{"PUT", []int{503}, nil, 1},
		{"DELETE", []int{503}, nil, 1},
		{"POST", []int{409}, again, all}, // in progress
		{"POST", []int{201, 400, 401, 409, 501}, nil, 1},
		{"POST", []int{422}, again, 1}, // a mismatch
		{"POST", []int{500}, replayed, 1},
		{"POST", []int{503}, http.Header{"Retry-After": {"3600"}}, 1}, // asks for too long, or for ever
		{"POST", []int{503}, http.Header{"Retry-After": {"4294967295"}}, 1},
	} {
		for _, status := range test.statuses {
			t.Run(fmt.Sprint(test.method, status, test.header), func(t *testing.T) {
				t.Parallel()
				s := newRemote(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
					maps.Copy(w.Header(), test.header)
					w.WriteHeader(status)
					_, _ = io.WriteString(w, "answer")
				})
				client := newClient(t, quick(keyclient.TransportConfig{AttemptsMax: all}))
				got, body, err := do(t.Context(), t, client, test.method, s.URL, "")
				require.NoError(t, err)
				require.Equal(t, status, got)
				require.Equal(t, "answer", body)
				require.Len(t, s.all(), test.attempts)
			})
		}
	}
}

// closing is a body without GetBody.
type closing struct {
	io.Reader
	closed atomic.Bool
}

func (c *closing) Close() error {
	c.closed.Store(true)
	return nil
}

// Property: a body that cannot be sent again (without GetBody) is sent once, with a key.
func TestBodiesThatCannotBeRepeated(t *testing.T) {
	t.Parallel()
	s := newRemote(t, failing(http.StatusServiceUnavailable, 2))
	body := &closing{Reader: strings.NewReader("x")}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, body)
	require.NoError(t, err)
	status, _, err := send(t, newClient(t, quick(keyclient.TransportConfig{})), request)
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, status)
	testwait.True(t, "the body is closed", body.closed.Load) // perhaps by another goroutine, behind the response
	require.Len(t, s.all(), 1)
	require.Equal(t, "x", s.all()[0].body)
	require.NotEmpty(t, s.all()[0].key)
}

func reset(conn net.Conn) error {
	return errors.Join(conn.(*net.TCPConn).SetLinger(0), conn.Close())
}

// Property: settings out of bounds are refused, all at once, with field, value and bound.
func TestTransportSettingsAreChecked(t *testing.T) {
	t.Parallel()
	_, err := keyclient.NewTransport(nil, keyclient.TransportConfig{
		AttemptsMax: 101, BackoffMax: 2 * time.Hour,
	})
	for _, want := range []string{
		"AttemptsMax 101: want 1 to 100",
		"BackoffMax 2h0m0s: want 1ms to 1h0m0s",
	} {
		require.ErrorContains(t, err, want)
	}
	_, err = keyclient.NewTransport(nil, keyclient.TransportConfig{})
	require.NoError(t, err)
}

// Property: each POST or PATCH gets a UUIDv7 of its own, and all its attempts carry it and the whole
// body; other requests get none; the caller's header stays as it was.
func TestOneKeyForAllAttempts(t *testing.T) {
	t.Parallel()
	s := newRemote(t, failing(http.StatusServiceUnavailable, 2))
	client := newClient(t, quick(keyclient.TransportConfig{}))
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/charges", strings.NewReader("4127"))
	require.NoError(t, err)
	_, body, err := send(t, client, request)
	require.NoError(t, err)
	require.Equal(t, "answer", body)
	require.Empty(t, request.Header)
	for _, method := range []string{http.MethodPatch, http.MethodPut, http.MethodGet} {
		_, _, err := do(t.Context(), t, client, method, s.URL, "")
		require.NoError(t, err)
	}
	all := s.all()
	first, err := uuid.Parse(all[0].key)
	require.NoError(t, err)
	require.EqualValues(t, 7, first.Version())
	for _, a := range all[:3] {
		assert.Equal(t, asked{http.MethodPost, "/charges", first.String(), "4127"}, a)
	}
	assert.NotEmpty(t, all[3].key, "PATCH")
	assert.NotEqual(t, all[0].key, all[3].key)
	assert.Empty(t, all[4].key+all[5].key)
	assert.Len(t, all, 6)
}

// Property: a key that cannot be used is refused before anything is sent, and the body is closed.
// Row H9 of guarantees.md.
func TestUnusableKeysAreNotSent(t *testing.T) {
	t.Parallel()
	s := newRemote(t, failing(0, 0))
	client := newClient(t, quick(keyclient.TransportConfig{}))
	for _, values := range [][]string{{"a", "b"}, {""}, {strings.Repeat("a", 256)}, {"a b"}, {"ä"}} {
		body := &closing{Reader: strings.NewReader("x")}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL, body)
		require.NoError(t, err)
		request.Header["Idempotency-Key"] = values
		_, _, err = send(t, client, request)
		require.ErrorIs(t, err, keyclient.ErrKey, values)
		require.True(t, body.closed.Load(), values)
	}
	require.Empty(t, s.all())
}

// Property: the key is kept in a redirect that asks for the same request elsewhere, and not sent with
// a GET.
func TestKeyBehindARedirect(t *testing.T) {
	t.Parallel()
	s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/charge":
			http.Redirect(w, r, "/here", http.StatusTemporaryRedirect)
		case "/here":
			http.Redirect(w, r, "/result", http.StatusSeeOther)
		}
	})
	for _, ctx := range []context.Context{t.Context(), keyclient.WithKey(t.Context(), "k")} {
		_, _, err := do(ctx, t, newClient(t, quick(keyclient.TransportConfig{})), http.MethodPost, s.URL+"/charge", "x")
		require.NoError(t, err)
	}
	all := s.all()
	require.Len(t, all, 6)
	require.NotEmpty(t, all[0].key)
	require.Equal(t, []string{all[0].key, "", "k", "k", ""}, []string{all[1].key, all[2].key, all[3].key, all[4].key, all[5].key})
}

func TestMain(m *testing.M) { pgtest.Main(m) }

func nothing() *log.Logger { return log.New(io.Discard, "", 0) }

// network is a client's base in a bubble of synctest, where real connections would stop the clock.
type network func(attempt int) (*http.Response, error)

func (n network) client(t *testing.T, attempts *[]time.Time, cfg keyclient.TransportConfig) *http.Client {
	t.Helper()
	return clientOf(t, roundTripper(func(*http.Request) (*http.Response, error) {
		*attempts = append(*attempts, time.Now())
		return n(len(*attempts))
	}), cfg)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func answerOf(status int, header http.Header) *http.Response {
	return &http.Response{StatusCode: status, Header: header, Body: http.NoBody}
}

// Property: the pause before attempt n+1 is anything up to 100 ms doubled n-1 times, at most
// BackoffMax: never more, and spread over the whole of it, so that clients that failed together do
// not come back together.
func TestPausesGrowAndAreSpread(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ceilings := []int{100, 200, 400, 800, 1000, 1000, 1000} // ms
		low, high := make([]bool, len(ceilings)), make([]bool, len(ceilings))
		for range 100 { // 2⁻¹⁰⁰ is the chance of a failure by chance
			var attempts []time.Time
			client := network(func(int) (*http.Response, error) { return nil, errors.New("reset") }).
				client(t, &attempts, keyclient.TransportConfig{Honours: []string{"*"}, AttemptsMax: len(ceilings) + 1, BackoffMax: time.Second})
			_, _, err := do(t.Context(), t, client, http.MethodPost, "http://bank.example", "")
			require.Error(t, err)
			require.Len(t, attempts, len(ceilings)+1)
			for i, ms := range ceilings {
				ceiling := time.Duration(ms) * time.Millisecond
				pause := attempts[i+1].Sub(attempts[i])
				require.LessOrEqual(t, pause, ceiling, "before attempt %d", i+2)
				low[i] = low[i] || pause < ceiling/2
				high[i] = high[i] || pause > ceiling/2
			}
		}
		assert.NotContains(t, low, false)
		assert.NotContains(t, high, false)
	})
}

// Property: the client waits for Retry-After in seconds; a date and an unreadable value are ignored.
func TestRetryAfterIsWaitedFor(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		header http.Header
		want   time.Duration
	}{
		"seconds":  {http.Header{"Retry-After": {"7"}}, 7 * time.Second},
		"date":     {http.Header{"Retry-After": {"Fri, 31 Dec 1999 00:00:00 GMT"}}, 0},
		"nonsense": {http.Header{"Retry-After": {"soon"}}, 0},
		"negative": {http.Header{"Retry-After": {"-5"}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var attempts []time.Time
				client := network(func(attempt int) (*http.Response, error) {
					if attempt == 1 {
						return answerOf(http.StatusTooManyRequests, test.header), nil
					}
					return answerOf(http.StatusOK, http.Header{}), nil
				}).client(t, &attempts, keyclient.TransportConfig{Honours: []string{"*"}})
				_, _, err := do(t.Context(), t, client, http.MethodPost, "http://bank.example", "")
				require.NoError(t, err)
				require.Len(t, attempts, 2)
				pause := attempts[1].Sub(attempts[0])
				require.GreaterOrEqual(t, pause, test.want)
				require.LessOrEqual(t, pause, test.want+100*time.Millisecond)
			})
		})
	}
}

// Property: a caller whose context ends during a pause gets its error at once, with the key.
func TestPauseEndsWithTheContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(keyclient.WithKey(t.Context(), "k"))
		var attempts []time.Time
		client := network(func(int) (*http.Response, error) {
			time.AfterFunc(time.Second, func() { cancel(gone) })
			return answerOf(http.StatusServiceUnavailable, http.Header{"Retry-After": {"50"}}), nil
		}).client(t, &attempts, keyclient.TransportConfig{Honours: []string{"*"}, BackoffMax: time.Minute})
		start := time.Now()
		_, _, err := do(ctx, t, client, http.MethodPost, "http://bank.example", "")
		var unanswered *keyclient.UnansweredError
		require.ErrorAs(t, err, &unanswered)
		require.ErrorIs(t, err, gone)
		require.Equal(t, "k", unanswered.Key)
		require.Equal(t, time.Second, time.Since(start))
	})
}
