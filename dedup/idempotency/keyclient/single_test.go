package keyclient_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
)

// inPhase makes a call in a phase that is AtMostOnce, under a key.
func inPhase(t *testing.T, pool *pgxpool.Pool, value string, call func(ctx context.Context, key string) error) error {
	t.Helper()
	operation, err := idempotency.New(pool, idempotency.Config{Operation: "transfer"})
	require.NoError(t, err)
	flow, err := idempotency.NewFlow(operation, idempotency.FlowConfig[struct{}]{CallMax: 2 * time.Second},
		idempotency.Phase[struct{}]{Name: "transferred", AtMostOnce: true, Call: func(ctx context.Context, step *idempotency.Step[struct{}]) error {
			step.Finish(idempotency.Response{Status: http.StatusCreated})
			return call(ctx, step.ChildID().String())
		}})
	require.NoError(t, err)
	_, err = flow.Do(t.Context(), idempotency.Key{Scope: "shop", Value: value}, nil)
	return err
}

// ask sends a request under a key without regard to its answer.
func ask(ctx context.Context, t *testing.T, client *http.Client, method, address, key, body string) error {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, method, address, strings.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Idempotency-Key", key)
	_, _, err = send(t, client, request)
	return err
}

// closed refuses connections: its port is reserved. A port that a listener gave back may be another
// test's.
const closed = "http://127.0.0.1:1"

// Property: a bank that cannot be reached leaves no key for a person if the client sends once: it
// refuses, or has no name. When the bank is back, each key is paid once. Row H26 of guarantees.md.
func TestDeadBankLeavesKeysFree(t *testing.T) {
	t.Parallel()
	pool, bank := newPool(t), newRemote(t, failing(0, 0))
	names := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no name server") }}
	for _, address := range []string{closed, "http://bank.invalid."} {
		base := &http.Transport{DialContext: (&net.Dialer{Resolver: names}).DialContext}
		for how, client := range map[string]*http.Client{"Single": {Transport: keyclient.Single(base)}, "Transport": clientOf(t, base, keyclient.TransportConfig{})} {
			pay := func(client *http.Client, at string) error {
				return inPhase(t, pool, address+how, func(ctx context.Context, key string) error {
					return ask(ctx, t, client, http.MethodPost, at, key, "100")
				})
			}
			for range 2 {
				err := pay(client, address)
				require.Error(t, err)
				require.NotErrorIs(t, err, idempotency.ErrIndeterminate)
			}
			require.NoError(t, pay(bank.Client(), bank.URL))
		}
	}
	paid := map[string]bool{}
	for _, charge := range bank.all() {
		paid[charge.key] = true
	}
	require.Equal(t, []int{4, 4}, []int{len(bank.all()), len(paid)})
}

// unsent is an error that says, wrongly, that nothing was sent.
type unsent struct{ error }

func (unsent) NotSent() bool { return true }

// Property: a refused connection proves nothing if a request was sent before: by net/http, which
// tries another connection by itself, or by the call, to another system. The key is in doubt, and the
// bank has acted at most once. NotDone is the caller's promise, and counts. Row H26 of guarantees.md.
func TestRefusedAfterAReusedConnectionIsDoubt(t *testing.T) {
	t.Parallel()
	pool, other := newPool(t), newRemote(t, failing(0, 0))
	gone, base := newRawBank(t, false)
	gone.leaves = true
	plain, single := &http.Client{Transport: base}, &http.Client{Transport: keyclient.Single(base)}
	for name, call := range map[string]func(ctx context.Context, key string) error{
		"resent by net/http": func(ctx context.Context, key string) error {
			warm := ask(context.WithoutCancel(t.Context()), t, plain, http.MethodGet, gone.url, key, "") //nolint:contextcheck // as if it were before the call
			return errors.Join(warm, unsent{ask(ctx, t, plain, http.MethodPost, gone.url, key, "100")})
		},
		"after another request": func(ctx context.Context, key string) error {
			return errors.Join(ask(ctx, t, other.Client(), http.MethodGet, other.URL, key, "100"), ask(ctx, t, single, http.MethodPost, closed, key, "100"))
		},
		"by the caller's word": func(ctx context.Context, key string) error {
			return errors.Join(ask(ctx, t, other.Client(), http.MethodGet, other.URL, key, "100"), idempotency.NotDone(ask(ctx, t, single, http.MethodPost, closed, key, "100")))
		},
	} {
		err := inPhase(t, pool, name, call)
		require.ErrorContains(t, err, "refused")
		require.Equal(t, name != "by the caller's word", errors.Is(err, idempotency.ErrIndeterminate), "%v", err)
	}
	require.EqualValues(t, 1, gone.acted.Load())
}

// Property: if a connection is closed, or a stream is reset, after the server acted, Single does
// not send the request again: not over HTTP/1, not over HTTP/2, whatever its body; the error leaves
// the outcome unknown, and so makes the key of its phase indeterminate. A plain http.Transport
// sends it again, which is why. Row H26 of guarantees.md.
func TestCallOfAPhaseIsSentOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for _, overHTTP2 := range []bool{false, true} {
		for _, body := range []string{"", "100"} {
			for _, client := range []string{"plain", "Single", "Transport"} {
				t.Run(fmt.Sprintf("HTTP2 %v, %q, %s", overHTTP2, body, client), func(t *testing.T) {
					t.Parallel()
					b, base := newRawBank(t, overHTTP2)
					sender := map[string]*http.Client{
						"plain": {Transport: base}, "Single": {Transport: keyclient.Single(base)}, "Transport": clientOf(t, base, quick(keyclient.TransportConfig{})),
					}[client]
					err := inPhase(t, pool, idempotency.NewKey(), func(ctx context.Context, key string) error {
						if !overHTTP2 { // the next one is over a connection that was used
							assert.NoError(t, ask(ctx, t, sender, http.MethodGet, b.url, key, "")) //nolint:testifylint // not in the goroutine of the test
						}
						return ask(ctx, t, sender, http.MethodPost, b.url, key, body)
					})
					if client == "plain" {
						require.NoError(t, err)
						require.EqualValues(t, 2, b.acted.Load())
						return
					}
					require.ErrorIs(t, err, idempotency.ErrIndeterminate)
					require.EqualValues(t, 1, b.acted.Load())
				})
			}
		}
	}
}

// Property: Single does not send a request again for a redirect that asks for that (307, 308): the
// response is returned, without the address. A redirect to a GET (303) is followed. Row H26 of
// guarantees.md.
func TestRedirectsThatWouldSendAgain(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]int{307: 307, 308: 308, 302: 200, 303: 200} {
		s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/pay" {
				http.Redirect(w, r, "/elsewhere", status)
			}
		})
		base := &http.Transport{}
		t.Cleanup(base.CloseIdleConnections)
		for _, body := range []string{"", "x"} {
			got, _, err := do(t.Context(), t, &http.Client{Transport: keyclient.Single(base)}, http.MethodPost, s.URL+"/pay", body)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		for _, a := range s.all() {
			require.Equal(t, a.path == "/pay", a.method == http.MethodPost)
		}
	}
}

// Property: an error of Single says that nothing was sent if that is so, and only then; it still
// wraps the error of base.
func TestErrorsBeforeAConnection(t *testing.T) {
	t.Parallel()
	ctx, leave := context.WithCancel(t.Context()) // when the silent server was asked
	defer leave()
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, silent.Close()) }()
	go func() {
		if conn, err := silent.Accept(); err == nil {
			_, _ = conn.Read(make([]byte, 1))
			leave()
		}
	}()
	s := newRemote(t, func(_ int, w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/moved" {
			http.Redirect(w, r, closed, http.StatusSeeOther)
			return
		}
		panic(http.ErrAbortHandler)
	})
	fails := errors.New("fails")
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	for name, test := range map[string]struct {
		address string
		base    http.RoundTripper
		notSent bool
	}{
		"refused":              {closed, transport, true},
		"no TLS":               {strings.Replace(s.URL, "http:", "https:", 1), transport, true},
		"no answer":            {s.URL, transport, false},
		"redirect that fails":  {s.URL + "/moved", transport, false},
		"base without a trace": {s.URL, roundTripper(func(*http.Request) (*http.Response, error) { return nil, fails }), false},
		"no TLS in time":       {"https://" + silent.Addr().String(), transport, true},
	} {
		with := t.Context()
		if name == "no TLS in time" {
			with = ctx
		}
		_, _, err := do(with, t, &http.Client{Transport: keyclient.Single(test.base)}, http.MethodPost, test.address, "x")
		var failed *url.Error
		require.ErrorAs(t, err, &failed)
		var marked interface{ NotSent() bool }
		require.Equal(t, test.notSent, errors.As(err, &marked) && marked.NotSent(), "%s: %v", name, err)
		require.Equal(t, name == "base without a trace", errors.Is(err, fails))
	}
}

// rawBank acts on each whole POST that arrives, whatever its key, and does not answer the first
// one: it closes the connection, or resets the stream. It has no server of net/http below it, which
// answers in better order.
type rawBank struct {
	url      string
	listener net.Listener
	leaves   bool // when it acted: later connections are refused
	acted    atomic.Int64
}

// newRawBank listens on loopback until the test ends, and returns a base that sends to it. HTTP/2
// has TLS.
func newRawBank(t *testing.T, overHTTP2 bool) (*rawBank, *http.Transport) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	b, base, serve := &rawBank{url: "http://" + listener.Addr().String()}, &http.Transport{}, (*rawBank).http1
	if overHTTP2 {
		lender := httptest.NewTLSServer(nil) // of its certificate
		defer lender.Close()
		base = lender.Client().Transport.(*http.Transport).Clone()
		base.ForceAttemptHTTP2 = true
		b.url, serve = "https://"+listener.Addr().String(), (*rawBank).http2
		listener = tls.NewListener(listener, &tls.Config{Certificates: lender.TLS.Certificates, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13})
	}
	b.listener = listener
	var group sync.WaitGroup
	group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			group.Go(func() {
				_ = serve(b, conn) // it ends where the client goes
				_ = conn.Close()
			})
		}
	})
	t.Cleanup(func() {
		base.CloseIdleConnections()
		_ = listener.Close()
		group.Wait()
	})
	return b, base
}

// http1 closes the connection at the first POST, which must not be its first request, since a
// client knows what that means.
func (b *rawBank) http1(conn net.Conn) error {
	reader := bufio.NewReader(conn)
	for {
		r, err := http.ReadRequest(reader)
		if err != nil {
			return err
		}
		if _, err = io.Copy(io.Discard, r.Body); err != nil {
			return err
		}
		if r.Method == http.MethodPost && b.acted.Add(1) == 1 {
			if b.leaves {
				_ = b.listener.Close()
			}
			return nil
		}
		if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"); err != nil {
			return err
		}
	}
}

// Frames of HTTP/2 (RFC 9113, 6), and what is in them.
const (
	dataFrame, headersFrame, resetFrame, settingsFrame = 0, 1, 3, 4

	endStream, ack, endHeaders      = 1, 1, 4
	refused                         = 7
	preface                         = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	status200                  byte = 0x88 // in HPACK's static table
)

func frame(conn net.Conn, kind, flags byte, stream uint32, payload ...byte) error {
	head := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	head = binary.BigEndian.AppendUint32(append(head, flags), stream)
	_, err := conn.Write(append(head, payload...))
	return err
}

// http2 resets the stream of the first request, as one that it did not look at.
func (b *rawBank) http2(conn net.Conn) error {
	reader := bufio.NewReader(conn)
	if _, err := reader.Discard(len(preface)); err != nil {
		return err
	}
	if err := frame(conn, settingsFrame, 0, 0); err != nil {
		return err
	}
	for {
		var head [9]byte
		if _, err := io.ReadFull(reader, head[:]); err != nil {
			return err
		}
		if _, err := reader.Discard(int(binary.BigEndian.Uint32(head[:4]) >> 8)); err != nil {
			return err
		}
		kind, flags, stream := head[3], head[4], binary.BigEndian.Uint32(head[5:])
		var err error
		switch whole := (kind == dataFrame || kind == headersFrame) && flags&endStream != 0; {
		case kind == settingsFrame && flags&ack == 0:
			err = frame(conn, settingsFrame, ack, 0)
		case whole && b.acted.Add(1) == 1:
			err = frame(conn, resetFrame, 0, stream, 0, 0, 0, refused)
		case whole:
			err = frame(conn, headersFrame, endHeaders|endStream, stream, status200)
		}
		if err != nil {
			return err
		}
	}
}

// unknown are quick settings for servers of which nothing is known.
func unknown(cfg keyclient.TransportConfig) keyclient.TransportConfig {
	cfg.Honours = []string{}
	return quick(cfg)
}

// Property: a server that ignores keys acts once, whatever it answers, a redirect among it, even if it closes a
// reused connection: with the default settings a request is sent once. The error says so, and has the key.
func TestServerThatIgnoresKeysActsOnce(t *testing.T) {
	t.Parallel()
	for _, status := range []int{307, 308, 408, 409, 425, 429, 500, 502, 503, 504} {
		s := newRemote(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "0")
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(status)
		})
		got, _, err := do(t.Context(), t, newClient(t, unknown(keyclient.TransportConfig{AttemptsMax: 3})), http.MethodPost, s.URL, "x")
		require.NoError(t, err)
		require.Equal(t, status, got)
		require.Len(t, s.all(), 1)
	}
	for _, body := range []string{"x", ""} {
		b, base := newRawBank(t, false)
		client := clientOf(t, base, unknown(keyclient.TransportConfig{}))
		_, _, err := do(t.Context(), t, client, http.MethodGet, b.url, "")
		require.NoError(t, err)
		_, _, err = do(t.Context(), t, client, http.MethodPost, b.url, body)
		var unanswered *keyclient.UnansweredError
		require.ErrorAs(t, err, &unanswered)
		require.NotEmpty(t, unanswered.Key)
		require.False(t, unanswered.Honoured)
		require.ErrorContains(t, err, "TransportConfig.Honours")
		require.EqualValues(t, 1, b.acted.Load())
	}
}

// Property: an error says that nothing was sent if that is certain, and the text, too: not after several
// attempts, also if base marks what was not sent.
func TestErrorOfAttemptsThatWereNotSent(t *testing.T) {
	t.Parallel()
	s := newRemote(t, failing(http.StatusTooManyRequests, 100))
	for honours, want := range map[string]struct {
		sent, attempts int
		text           string
	}{"another": {0, 1, "nothing was sent"}, "*": {1, 3, "the server may have acted"}} {
		dials := 0
		base := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if dials++; dials > want.sent {
				address = "127.0.0.1:1"
			}
			return (&net.Dialer{}).DialContext(ctx, network, address)
		}}
		client := clientOf(t, keyclient.Single(base), quick(keyclient.TransportConfig{AttemptsMax: 3, Honours: []string{honours}}))
		_, _, err := do(t.Context(), t, client, http.MethodPost, s.URL, "x")
		var unanswered *keyclient.UnansweredError
		require.ErrorAs(t, err, &unanswered)
		require.Equal(t, want.attempts, unanswered.Attempts)
		require.ErrorContains(t, err, want.text)
		var marked interface{ NotSent() bool }
		require.Equal(t, want.sent == 0, errors.As(err, &marked))
	}
}

// Property: a server gets retries after an unknown outcome if the caller declared it, by host, or with all
// others, and in no other case.
func TestDeclaredServers(t *testing.T) {
	t.Parallel()
	for declared, again := range map[string]bool{"127.0.0.1": true, "*": true, "http://127.0.0.1": false, "": false, "bank.example": false} {
		s := newRemote(t, func(n int, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Idempotency-Key", r.Header.Get("Idempotency-Key")) // an echo proves nothing
			if n < 2 {
				w.WriteHeader(http.StatusGatewayTimeout)
			}
		})
		client := newClient(t, quick(keyclient.TransportConfig{Honours: []string{declared}}))
		status, _, err := do(t.Context(), t, client, http.MethodPost, s.URL, "x")
		require.NoError(t, err)
		require.Equal(t, again, status == http.StatusOK, declared)
	}
}
