package idempotency_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
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

// transfers is a flow of one phase that is AtMostOnce.
func transfers(t *testing.T, pool *pgxpool.Pool, call func(ctx context.Context, key string) error) *idempotency.Flow[payment] {
	t.Helper()
	return newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{CallMax: 2 * time.Second}, []idempotency.Phase[payment]{
		{Name: "transfer", AtMostOnce: true, Call: func(ctx context.Context, step *idempotency.Step[payment]) error {
			step.Finish(idempotency.Response{Status: http.StatusCreated})
			return call(ctx, step.ChildID().String())
		}},
	})
}

// ask sends a request without regard to its answer.
func ask(ctx context.Context, client *http.Client, method, address, key string) error {
	r, err := http.NewRequestWithContext(ctx, method, address, strings.NewReader("100"))
	if err != nil {
		return err
	}
	r.Header.Set("Idempotency-Key", key)
	response, err := client.Do(r)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, response.Body)
	return errors.Join(err, response.Body.Close())
}

// closed refuses connections: its port is reserved. A port that a listener gave back may be another
// test's.
const closed = "http://127.0.0.1:1"

// noNames is a name server that knows none.
func noNames(t *testing.T) *net.Resolver {
	t.Helper()
	server, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		query := make([]byte, 512)
		for {
			n, from, err := server.ReadFrom(query)
			if err != nil {
				return
			}
			query[2], query[3] = 0x81, 0x83 // a response: no such name (RFC 1035, 4.1.1)
			_, _ = server.WriteTo(query[:n], from)
		}
	}()
	t.Cleanup(func() { assert.NoError(t, server.Close()) })
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", server.LocalAddr().String())
	}}
}

// Property: a bank that cannot be reached leaves no key for a person: it refuses, or has no route,
// no name or no trusted certificate. This holds for a client that sends once, without NotSent, and
// for a plain client with NotSent. When the bank is back, each key is paid once. Row H26 of
// guarantees.md.
func TestDeadBankLeavesKeysFree(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	names := noNames(t)
	strange := httptest.NewUnstartedServer(http.NotFoundHandler()) // its certificate is refused
	strange.Config.ErrorLog = log.New(io.Discard, "", 0)
	strange.StartTLS()
	t.Cleanup(strange.Close)
	loopback := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}
	for name, dead := range map[string]struct {
		address string
		dialer  net.Dialer
	}{
		"refused":  {address: closed},
		"no route": {address: "http://192.0.2.1", dialer: net.Dialer{LocalAddr: loopback}}, // for documentation (RFC 5737), and not from loopback
		"no name":  {address: "http://bank.invalid.", dialer: net.Dialer{Resolver: names}},
		"no trust": {address: strange.URL},
	} {
		for _, how := range []string{"Single", "Transport", "NotSent"} {
			t.Run(name+", "+how, func(t *testing.T) {
				t.Parallel()
				requests := 10
				if name == "refused" {
					requests = 250
				}
				base := &http.Transport{DialContext: dead.dialer.DialContext}
				t.Cleanup(base.CloseIdleConnections)
				client := &http.Client{Transport: base}
				var back atomic.Bool
				switch how {
				case "Single":
					client.Transport = keyclient.Single(base)
				case "Transport":
					transport, err := keyclient.NewTransport(base, keyclient.TransportConfig{})
					require.NoError(t, err)
					client.Transport = transport
				}
				flow := transfers(t, pool, func(ctx context.Context, key string) error {
					if back.Load() {
						return ask(ctx, http.DefaultClient, http.MethodPost, b.URL, key)
					}
					err := ask(ctx, client, http.MethodPost, dead.address, key)
					if how == "NotSent" {
						return idempotency.NotSent(err)
					}
					return err
				})
				all := func(check func(err error)) {
					var group sync.WaitGroup
					for worker := range 5 {
						group.Go(func() {
							for n := worker; n < requests; n += 5 {
								_, err := flow.Do(t.Context(), key(fmt.Sprint(name, how, n)), nil)
								check(err)
							}
						})
					}
					group.Wait()
				}
				var failed, paid atomic.Int64
				all(func(err error) {
					if err != nil && !errors.Is(err, idempotency.ErrIndeterminate) {
						failed.Add(1)
					}
				})
				require.EqualValues(t, requests, failed.Load())
				require.Zero(t, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE (state = 'indeterminate' OR calling IS NOT NULL) AND key LIKE $1`, name+how+"%"))
				back.Store(true)
				all(func(err error) {
					if assert.NoError(t, err) {
						paid.Add(1)
					}
				})
				require.EqualValues(t, requests, paid.Load())
			})
		}
	}
	t.Cleanup(func() {
		asked, charges := b.counts()
		assert.Equal(t, 3*(250+3*10), charges)
		assert.Equal(t, charges, asked)
	})
}

// vanishing is a bank that acts at the second request of its first connection, and then is gone:
// the connection closes without an answer, and later ones are refused.
func vanishing(t *testing.T) (address string, acted *atomic.Int64) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	acted = &atomic.Int64{}
	var group sync.WaitGroup
	group.Go(func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer func() { assert.NoError(t, conn.Close()) }()
		reader := bufio.NewReader(conn)
		for {
			r, err := http.ReadRequest(reader)
			if err != nil {
				return
			}
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				return
			}
			if r.Method == http.MethodPost {
				acted.Add(1)
				_ = listener.Close()
				return
			}
			if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"); err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		group.Wait()
	})
	return "http://" + listener.Addr().String(), acted
}

// Property: a refused connection proves nothing if a request was sent before: by net/http, which
// tries another connection by itself, or by the call, which made two requests, or one to another
// system; nor if the request had another context. The key is in doubt, and the bank has acted at
// most once. NotDone is the caller's promise, and counts. Row H26 of guarantees.md.
func TestRefusedAfterAReusedConnectionIsDoubt(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	for name, test := range map[string]struct {
		call  func(ctx context.Context, base http.RoundTripper, address, key string) error
		acted int64
		free  bool
	}{
		"resent by net/http": {func(ctx context.Context, base http.RoundTripper, address, key string) error {
			client := &http.Client{Transport: base}
			warm := ask(context.WithoutCancel(t.Context()), client, http.MethodGet, address, key) //nolint:contextcheck // as if it were before the call
			return errors.Join(warm, idempotency.NotSent(ask(ctx, client, http.MethodPost, address, key)))
		}, 1, false},
		"asked twice by the call": {func(ctx context.Context, base http.RoundTripper, address, key string) error {
			client := &http.Client{Transport: keyclient.Single(base)}
			_ = ask(ctx, client, http.MethodGet, address, key)
			_ = ask(ctx, client, http.MethodPost, address, key)
			return idempotency.NotSent(ask(ctx, client, http.MethodPost, address, key))
		}, 1, false},
		"after another request": {func(ctx context.Context, base http.RoundTripper, _, key string) error {
			client := &http.Client{Transport: keyclient.Single(base)}
			return errors.Join(ask(ctx, http.DefaultClient, http.MethodGet, b.URL, key), ask(ctx, client, http.MethodPost, closed, key))
		}, 0, false},
		"under another context": {func(_ context.Context, base http.RoundTripper, address, key string) error {
			client := &http.Client{Transport: base}
			warm := ask(t.Context(), client, http.MethodGet, address, key)                                         //nolint:contextcheck // the mistake
			return errors.Join(warm, idempotency.NotSent(ask(t.Context(), client, http.MethodPost, address, key))) //nolint:contextcheck // the same
		}, 1, false},
		"by the caller's word": {func(ctx context.Context, base http.RoundTripper, _, key string) error {
			client := &http.Client{Transport: keyclient.Single(base)}
			return errors.Join(ask(ctx, http.DefaultClient, http.MethodGet, b.URL, key), idempotency.NotDone(ask(ctx, client, http.MethodPost, closed, key)))
		}, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := &http.Transport{}
			t.Cleanup(base.CloseIdleConnections)
			address, acted := vanishing(t)
			flow := transfers(t, pool, func(ctx context.Context, key string) error { return test.call(ctx, base, address, key) })
			_, err := flow.Do(t.Context(), key(name), nil)
			require.ErrorContains(t, err, "refused")
			require.Equal(t, !test.free, errors.Is(err, idempotency.ErrIndeterminate), "%v", err)
			require.Equal(t, test.acted, acted.Load())
		})
	}
}

// Property: NotSent marks what shows that nothing was sent, and leaves everything else, and nil, as
// it is.
func TestNotSentMarksWhatShowsIt(t *testing.T) {
	t.Parallel()
	require.NoError(t, idempotency.NotSent(nil))
	for _, err := range []error{
		io.EOF, context.DeadlineExceeded, &net.OpError{Op: "read", Err: io.EOF}, &net.OpError{Op: "write", Err: net.ErrClosed},
	} {
		require.Equal(t, err, idempotency.NotSent(err))
	}
	refused := fmt.Errorf("pay: %w", &net.OpError{Op: "dial", Err: net.ErrClosed})
	marked := idempotency.NotSent(refused)
	require.NotEqual(t, refused, marked)
	require.ErrorIs(t, marked, net.ErrClosed)
	require.Equal(t, refused.Error(), marked.Error())
}

// Property: the context of a call reports that it must not be repeated if its phase is AtMostOnce,
// and in no other phase; a flow inside of such a call inherits it.
func TestContextOfACallSaysItsKind(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	got := map[string]bool{}
	noting := func(name string, more func(ctx context.Context) error) func(context.Context, *idempotency.Step[payment]) error {
		return func(ctx context.Context, step *idempotency.Step[payment]) error {
			got[name] = idempotency.CalledOnce(ctx)
			if name != "often" {
				step.Finish(idempotency.Response{Status: http.StatusCreated})
			}
			return more(ctx)
		}
	}
	nothing := func(context.Context) error { return nil }
	inner, err := idempotency.New(pool, idempotency.Config{Operation: "inner"})
	require.NoError(t, err)
	inside := newFlow(t, inner, idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{Name: "inside", Call: noting("inside", nothing)}})
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{
		{Name: "often", Call: noting("often", nothing)},
		{Name: "once", AtMostOnce: true, Call: noting("once", func(ctx context.Context) error {
			_, err := inside.Do(ctx, key("k"), nil)
			return err
		})},
	})
	_, err = flow.Do(t.Context(), key("k"), nil)
	require.NoError(t, err)
	require.Equal(t, map[string]bool{"often": false, "once": true, "inside": true}, got)
}
