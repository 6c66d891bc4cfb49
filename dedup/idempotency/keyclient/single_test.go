package keyclient_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
)

// inPhase makes a call in a phase that is AtMostOnce.
func inPhase(t *testing.T, pool *pgxpool.Pool, call func(ctx context.Context, key string) error) error {
	t.Helper()
	operation, err := idempotency.New(pool, idempotency.Config{Operation: "transfer"})
	require.NoError(t, err)
	flow, err := idempotency.NewFlow(operation, idempotency.FlowConfig[struct{}]{},
		idempotency.Phase[struct{}]{Name: "transferred", AtMostOnce: true, Call: func(ctx context.Context, step *idempotency.Step[struct{}]) error {
			step.Finish(idempotency.Response{Status: http.StatusCreated})
			return call(ctx, step.ChildID().String())
		}})
	require.NoError(t, err)
	_, err = flow.Do(t.Context(), idempotency.Key{Scope: "shop", Value: idempotency.NewKey()}, nil)
	return err
}

// Property: if a connection is closed, or a stream is reset, after the server acted, Single does
// not send the request again: not over HTTP/1, not over HTTP/2, whatever its body; the error leaves
// the outcome unknown, and so makes the key of its phase indeterminate. A plain http.Transport
// sends it again, which is why. Row H26 of guarantees.md.
func TestCallOfAPhaseIsSentOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	servers := map[string]func(*rawBank, net.Conn) error{
		"HTTP/1 closes":          http1,
		"HTTP/2 refuses":         http2(refused),
		"HTTP/2 protocol error":  http2(protocolError),
		"HTTP/2 graceful ending": http2GoAway,
	}
	bodies := map[string]struct {
		body  func() io.Reader
		again bool // by a plain client
	}{
		"nil":    {func() io.Reader { return nil }, true},
		"NoBody": {func() io.Reader { return http.NoBody }, true},
		"bytes":  {func() io.Reader { return bytes.NewReader([]byte("100")) }, true},
		"pipe": {func() io.Reader {
			reader, writer := io.Pipe()
			go func() {
				_, err := writer.Write([]byte("100"))
				_ = writer.CloseWithError(err)
			}()
			return reader
		}, false},
	}
	for server, serve := range servers {
		for name, body := range bodies {
			for _, client := range []string{"plain", "Single", "Transport"} {
				t.Run(server+", "+name+", "+client, func(t *testing.T) {
					t.Parallel()
					b, base := newRawBank(t, serve, strings.HasPrefix(server, "HTTP/2"))
					var sender http.RoundTripper = base
					switch client {
					case "Single":
						sender = keyclient.Single(base)
					case "Transport":
						transport, err := keyclient.NewTransport(base, quick(keyclient.TransportConfig{}))
						require.NoError(t, err)
						sender = transport
					}
					send := func(ctx context.Context, method, key string, body io.Reader) error {
						r, err := http.NewRequestWithContext(ctx, method, b.url, body)
						if err != nil {
							return err
						}
						r.Header.Set("Idempotency-Key", key)
						_, _, err = send(t, &http.Client{Transport: sender}, r)
						return err
					}
					err := inPhase(t, pool, func(ctx context.Context, key string) error {
						if strings.HasPrefix(server, "HTTP/1") { // the next one is over a connection that was used
							assert.NoError(t, send(ctx, http.MethodGet, key, nil))
						}
						return send(ctx, http.MethodPost, key, body.body())
					})
					acted, empty := b.acts()
					if name == "nil" || name == "NoBody" {
						require.Equal(t, acted, empty)
					} else {
						require.Zero(t, empty)
					}
					if client == "plain" && body.again {
						require.NoError(t, err)
						require.Equal(t, 2, acted)
						return
					}
					require.ErrorIs(t, err, idempotency.ErrIndeterminate)
					require.Equal(t, 1, acted)
				})
			}
		}
	}
}

// Property: Single does not send a request again for a redirect that asks for that (307, 308), to
// the same server or another one: the response is returned, without the address. A redirect to a
// GET (303) is followed. Row H26 of guarantees.md.
func TestRedirectsThatWouldSendAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for status, follows := range map[int]bool{307: false, 308: false, 301: true, 302: true, 303: true} {
		for _, client := range []string{"Single", "Transport"} {
			t.Run(client+", "+http.StatusText(status), func(t *testing.T) {
				t.Parallel()
				s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/pay" {
						http.Redirect(w, r, "/elsewhere", status)
					}
				})
				base := &http.Transport{}
				defer base.CloseIdleConnections()
				sender := keyclient.Single(base)
				if client == "Transport" {
					var err error
					sender, err = keyclient.NewTransport(base, quick(keyclient.TransportConfig{}))
					require.NoError(t, err)
				}
				for _, body := range []io.Reader{nil, strings.NewReader("x")} {
					before := len(s.all())
					err := inPhase(t, pool, func(ctx context.Context, key string) error {
						r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/pay", body)
						if err != nil {
							return err
						}
						r.Header.Set("Idempotency-Key", key)
						got, _, err := send(t, &http.Client{Transport: sender}, r)
						if follows {
							assert.Equal(t, http.StatusOK, got)
						} else {
							assert.Equal(t, status, got)
						}
						return err
					})
					require.NoError(t, err)
					all := s.all()[before:]
					require.Equal(t, "POST", all[0].method)
					require.Len(t, all[1:], map[bool]int{true: 1}[follows])
					for _, a := range all[1:] {
						require.Equal(t, "GET", a.method)
					}
				}
			})
		}
	}
}

// Property: an error of Single says that nothing was sent if that is so, and only then; it still
// wraps the error of base.
func TestErrorsBeforeAConnection(t *testing.T) {
	t.Parallel()
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0") // accepts, and says nothing
	require.NoError(t, err)
	defer func() { require.NoError(t, silent.Close()) }()
	const closed = "http://127.0.0.1:1" // reserved
	s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/moved" {
			http.Redirect(w, r, closed, http.StatusSeeOther)
			return
		}
		<-r.Context().Done()
	})
	fails := errors.New("fails")
	for name, test := range map[string]struct {
		address string
		base    http.RoundTripper
		notSent bool
	}{
		"refused":              {closed, nil, true},
		"no TLS in time":       {"https://" + silent.Addr().String(), nil, true},
		"no TLS":               {strings.Replace(s.URL, "http:", "https:", 1), nil, true},
		"no answer":            {s.URL, nil, false},
		"redirect that fails":  {s.URL + "/moved", nil, false},
		"base without a trace": {s.URL, roundTripper(func(*http.Request) (*http.Response, error) { return nil, fails }), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := test.base
			if base == nil {
				transport := &http.Transport{}
				defer transport.CloseIdleConnections()
				base = transport
			}
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // within which a request that can be sent is
			defer cancel()
			_, _, err := do(ctx, t, &http.Client{Transport: keyclient.Single(base)}, http.MethodPost, test.address, "x")
			var failed *url.Error
			require.ErrorAs(t, err, &failed)
			var marked interface{ NotSent() bool }
			require.Equal(t, test.notSent, errors.As(err, &marked) && marked.NotSent(), "%v", err)
			if test.base != nil {
				require.ErrorIs(t, err, fails)
			}
		})
	}
}
