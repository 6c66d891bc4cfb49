package keyclient_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
)

// unknown are quick settings for servers of which nothing is known.
func unknown(cfg keyclient.TransportConfig) keyclient.TransportConfig {
	cfg.Honours = []string{}
	return quick(cfg)
}

// Property: a server that ignores keys acts once, whatever it answers, even if it answers nothing,
// or closes a reused connection: with the default settings only a request that was certainly not
// executed is retried. The error says so, and has the key.
func TestServerThatIgnoresKeysActsOnce(t *testing.T) {
	t.Parallel()
	for status, attempts := range map[int]int{
		408: 1, 500: 1, 502: 1, 503: 1, 504: 1, // may be after it acted
		409: 3, 425: 3, 429: 3, // say that it did not
	} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			t.Parallel()
			s := newRemote(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(status)
			})
			got, _, err := do(t.Context(), t, newClient(t, unknown(keyclient.TransportConfig{AttemptsMax: 3})), http.MethodPost, s.URL, "x")
			require.NoError(t, err)
			require.Equal(t, status, got)
			require.Len(t, s.all(), attempts)
		})
	}
	for name, body := range map[string]string{"with a body": "x", "without": ""} {
		t.Run("closed connection "+name, func(t *testing.T) {
			t.Parallel()
			b, base := newRawBank(t, http1, false)
			transport, err := keyclient.NewTransport(base, unknown(keyclient.TransportConfig{}))
			require.NoError(t, err)
			client := &http.Client{Transport: transport}
			_, _, err = do(t.Context(), t, client, http.MethodGet, b.url, "")
			require.NoError(t, err)
			_, _, err = do(t.Context(), t, client, http.MethodPost, b.url, body)
			var unanswered *keyclient.UnansweredError
			require.ErrorAs(t, err, &unanswered)
			require.NotEmpty(t, unanswered.Key)
			require.False(t, unanswered.Honoured)
			require.ErrorContains(t, err, "TransportConfig.Honours")
			acted, _ := b.acts()
			require.Equal(t, 1, acted)
		})
	}
}

// Property: a request that was not sent is retried at any server: refused connections cause no
// second effect.
func TestRefusedConnectionsAreTriedAgain(t *testing.T) {
	t.Parallel()
	s := newRemote(t, failing(0, 0))
	dials := 0
	base := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		if dials++; dials < 3 {
			address = "127.0.0.1:1" // reserved, and closed
		}
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}
	defer base.CloseIdleConnections()
	transport, err := keyclient.NewTransport(base, unknown(keyclient.TransportConfig{}))
	require.NoError(t, err)
	status, _, err := do(t.Context(), t, &http.Client{Transport: transport}, http.MethodPost, s.URL, "x")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, 3, dials)
	require.Len(t, s.all(), 1)
}

// Property: an error says that nothing was sent only if no attempt was, as its text does; also if
// base marks what was not sent, at a trusted server.
func TestErrorOfAttemptsThatWereNotSent(t *testing.T) {
	t.Parallel()
	s := newRemote(t, failing(http.StatusTooManyRequests, 100))
	for _, honours := range [][]string{{}, {"*"}} {
		for sent, text := range map[int]string{0: "nothing was sent", 1: "the server may have acted"} {
			dials := 0
			var base http.RoundTripper = &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				if dials++; dials > sent {
					address = "127.0.0.1:1"
				}
				return (&net.Dialer{}).DialContext(ctx, network, address)
			}}
			if len(honours) > 0 {
				base = keyclient.Single(base)
			}
			transport, err := keyclient.NewTransport(base, quick(keyclient.TransportConfig{AttemptsMax: 3, Honours: honours}))
			require.NoError(t, err)
			_, _, err = do(t.Context(), t, &http.Client{Transport: transport}, http.MethodPost, s.URL, "x")
			var unanswered *keyclient.UnansweredError
			require.ErrorAs(t, err, &unanswered)
			require.Equal(t, 3, unanswered.Attempts)
			require.ErrorContains(t, err, text)
			require.ErrorContains(t, err, "refused")
			var marked interface{ NotSent() bool }
			require.Equal(t, sent == 0, errors.As(err, &marked))
		}
	}
}

// Property: a server gets retries if it is declared, by host, by host and port, or with all others;
// or from the answer on by which it shows that it honours keys: one that is replayed, or that has
// the key. Another key, and other servers' answers, show nothing.
func TestDeclaredAndShownServers(t *testing.T) {
	t.Parallel()
	echo := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Idempotency-Key", r.Header.Get("Idempotency-Key"))
	}
	for name, test := range map[string]struct {
		declared string // PORT is the server's
		first    func(w http.ResponseWriter, r *http.Request)
		again    bool
	}{
		"host":          {"127.0.0.1", nil, true},
		"host and port": {"127.0.0.1:PORT", nil, true},
		"all":           {"*", nil, true},
		"another port":  {"127.0.0.1:1", nil, false},
		"another host":  {"bank.example", nil, false},
		"echo":          {"", echo, true},
		"replay":        {"", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Idempotent-Replayed", "true") }, true},
		"another key":   {"", func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Idempotency-Key", "x") }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newRemote(t, func(n int, w http.ResponseWriter, r *http.Request) {
				if n == 0 && test.first != nil {
					test.first(w, r)
					return
				}
				if n < 3 {
					w.WriteHeader(http.StatusGatewayTimeout)
				}
			})
			_, port, err := net.SplitHostPort(s.Listener.Addr().String())
			require.NoError(t, err)
			cfg := unknown(keyclient.TransportConfig{})
			if test.declared != "" {
				cfg.Honours = []string{strings.ReplaceAll(test.declared, "PORT", port)}
			}
			client := newClient(t, cfg)
			if test.first != nil {
				_, _, err := do(t.Context(), t, client, http.MethodPost, s.URL, "first")
				require.NoError(t, err)
			}
			status, _, err := do(t.Context(), t, client, http.MethodPost, s.URL, "x")
			require.NoError(t, err)
			require.Equal(t, test.again, status == http.StatusOK, status)

			other := newRemote(t, failing(http.StatusGatewayTimeout, 1))
			status, _, err = do(t.Context(), t, client, http.MethodPost, other.URL, "x")
			require.NoError(t, err)
			require.Equal(t, test.declared == "*" || test.declared == "127.0.0.1", status == http.StatusOK)
		})
	}
}

// Property: a server that shows it with a response that is to be retried gets the retry of the same
// request; behind a redirect each server counts for itself; no more servers are remembered than are
// promised.
func TestServersShowItInTheMiddle(t *testing.T) {
	t.Parallel()
	s := newRemote(t, func(n int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Idempotency-Key", r.Header.Get("Idempotency-Key"))
		if n < 2 {
			w.WriteHeader(http.StatusGatewayTimeout)
		}
	})
	client := newClient(t, unknown(keyclient.TransportConfig{}))
	status, _, err := do(t.Context(), t, client, http.MethodPost, s.URL, "x")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status)

	ignores := newRemote(t, failing(http.StatusGatewayTimeout, 1))
	redirects := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, ignores.URL, http.StatusTemporaryRedirect)
	})
	_, port, err := net.SplitHostPort(redirects.Listener.Addr().String())
	require.NoError(t, err)
	cfg := unknown(keyclient.TransportConfig{})
	cfg.Honours = []string{"127.0.0.1:" + port}
	status, _, err = do(t.Context(), t, newClient(t, cfg), http.MethodPost, redirects.URL, "x")
	require.NoError(t, err)
	require.Equal(t, http.StatusGatewayTimeout, status)
	require.Len(t, ignores.all(), 1)

	asked := map[string]int{}
	transport, err := keyclient.NewTransport(roundTripper(func(r *http.Request) (*http.Response, error) {
		asked[r.URL.Host]++
		if asked[r.URL.Host] == 2 {
			return answerOf(http.StatusGatewayTimeout, http.Header{}), nil
		}
		return answerOf(http.StatusOK, http.Header{"Idempotent-Replayed": {"true"}}), nil
	}), unknown(keyclient.TransportConfig{}))
	require.NoError(t, err)
	remembered := 0
	for n := range 300 {
		for range 2 {
			status, _, err = do(t.Context(), t, &http.Client{Transport: transport}, http.MethodPost, fmt.Sprintf("http://bank-%d.example", n), "x")
			require.NoError(t, err)
		}
		if status == http.StatusOK {
			remembered++
		}
	}
	require.Equal(t, 256, remembered)
}
