package idempotency_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
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
	"github.com/effectonce/effectonce/outbox"
)

// bank is a foreign system: it charges once for each idempotency key, and remembers how often it
// was asked.
type bank struct {
	*httptest.Server

	mu      sync.Mutex
	asked   int
	charges map[string]string // by key
	refuse  int               // so many requests are refused before it did anything
}

func newBank(t *testing.T) *bank {
	t.Helper()
	b := &bank{charges: map[string]string{}}
	b.Server = httptest.NewServer(b)
	t.Cleanup(b.Close)
	return b
}

func (b *bank) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked++
	if b.refuse > 0 {
		b.refuse--
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	key := r.Header.Get("Idempotency-Key")
	if _, ok := b.charges[key]; !ok {
		b.charges[key] = string(body)
	}
	_, _ = fmt.Fprintf(w, "charge-%d", len(b.charges))
}

func (b *bank) counts() (asked, charges int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.asked, len(b.charges)
}

// errAway is a bank that certainly did nothing.
var errAway = errors.New("the bank is away")

func charge(ctx context.Context, url, key string, amount []byte) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(amount))
	if err != nil {
		return "", err
	}
	request.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = errAway
	}
	return string(body), err
}

// payment is what the phases of a payment hand on.
type payment struct {
	Order  int64
	Charge string
}

// paymentPhases reserve an order, charge for it and book it with a message. Each writes an effect.
func paymentPhases(url string, atMostOnce bool) []idempotency.Phase[payment] {
	return []idempotency.Phase[payment]{
		{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			return tx.QueryRow(ctx, `INSERT INTO effects (name) VALUES ($1) RETURNING id`, "reserve "+step.Key.Value).Scan(&step.State.Order)
		}},
		{
			Name:       "charge",
			AtMostOnce: atMostOnce,
			Call: func(ctx context.Context, step *idempotency.Step[payment]) (err error) {
				step.State.Charge, err = charge(ctx, url, step.ChildID().String(), step.Request)
				if errors.Is(err, errAway) {
					err = idempotency.NotDone(err)
				}
				return err
			},
			Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
				return effect(ctx, tx, "charge "+step.Key.Value)
			},
		},
		{Name: "book", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
			step.Finish(idempotency.Response{Status: 201, Body: fmt.Appendf(nil, "order %d, %s", step.State.Order, step.State.Charge)})
			if err := effect(ctx, tx, "book "+step.Key.Value); err != nil {
				return err
			}
			return outbox.Publish(ctx, tx, outbox.Message{ID: step.ChildID(), Topic: "receipts", Key: []byte(step.Key.Value)})
		}},
	}
}

func newFlow(t *testing.T, op *idempotency.Operation, cfg idempotency.FlowConfig[payment], phases []idempotency.Phase[payment]) *idempotency.Flow[payment] {
	t.Helper()
	f, err := idempotency.NewFlow(op, cfg, phases...)
	require.NoError(t, err)
	return f
}

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

// Property: a bank that cannot be reached leaves no key for a person if the client sends once: it
// refuses, or has no name. When the bank is back, each key is paid once. Row H26 of guarantees.md.
func TestDeadBankLeavesKeysFree(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	names := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no name server") }}
	for _, address := range []string{closed, "http://bank.invalid."} {
		base := &http.Transport{DialContext: (&net.Dialer{Resolver: names}).DialContext}
		transport, err := keyclient.NewTransport(base, keyclient.TransportConfig{})
		require.NoError(t, err)
		for how, client := range map[string]*http.Client{"Single": {Transport: keyclient.Single(base)}, "Transport": {Transport: transport}} {
			back := false
			flow := transfers(t, pool, func(ctx context.Context, key string) error {
				if back {
					return ask(ctx, http.DefaultClient, http.MethodPost, b.URL, key)
				}
				return ask(ctx, client, http.MethodPost, address, key)
			})
			for range 2 {
				_, err = flow.Do(t.Context(), key(address+how), nil)
				require.Error(t, err)
				require.NotErrorIs(t, err, idempotency.ErrIndeterminate)
			}
			back = true
			_, err = flow.Do(t.Context(), key(address+how), nil)
			require.NoError(t, err)
		}
	}
	asked, charges := b.counts()
	require.Equal(t, []int{4, 4}, []int{asked, charges})
}

// unsent is an error that says, wrongly, that nothing was sent.
type unsent struct{ error }

func (unsent) NotSent() bool { return true }

// Property: a refused connection proves nothing if a request was sent before: by net/http, which
// tries another connection by itself, or by the call, to another system. The key is in doubt, and the
// bank has acted at most once. NotDone is the caller's promise, and counts. Row H26 of guarantees.md.
func TestRefusedAfterAReusedConnectionIsDoubt(t *testing.T) {
	t.Parallel()
	pool, b := newPool(t), newBank(t)
	base := &http.Transport{}
	t.Cleanup(base.CloseIdleConnections)
	address, acted := vanishing(t)
	plain, single := &http.Client{Transport: base}, &http.Client{Transport: keyclient.Single(base)}
	for name, call := range map[string]func(ctx context.Context, key string) error{
		"resent by net/http": func(ctx context.Context, key string) error {
			warm := ask(context.WithoutCancel(t.Context()), plain, http.MethodGet, address, key) //nolint:contextcheck // as if it were before the call
			return errors.Join(warm, unsent{ask(ctx, plain, http.MethodPost, address, key)})
		},
		"after another request": func(ctx context.Context, key string) error {
			return errors.Join(ask(ctx, http.DefaultClient, http.MethodGet, b.URL, key), ask(ctx, single, http.MethodPost, closed, key))
		},
		"by the caller's word": func(ctx context.Context, key string) error {
			return errors.Join(ask(ctx, http.DefaultClient, http.MethodGet, b.URL, key), idempotency.NotDone(ask(ctx, single, http.MethodPost, closed, key)))
		},
	} {
		_, err := transfers(t, pool, call).Do(t.Context(), key(name), nil)
		require.ErrorContains(t, err, "refused")
		require.Equal(t, name != "by the caller's word", errors.Is(err, idempotency.ErrIndeterminate), "%v", err)
	}
	require.EqualValues(t, 1, acted.Load())
}
