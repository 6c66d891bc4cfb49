package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
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

// flowOf is a flow of a program of its own.
func flowOf(t *testing.T, pool *pgxpool.Pool, phases ...idempotency.Phase[payment]) *idempotency.Flow[payment] {
	t.Helper()
	return newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{}, phases)
}

// do makes a request without a body. It has to fail with the error that is wanted, or with none.
func do(t *testing.T, flow *idempotency.Flow[payment], value string, want error) idempotency.Response {
	t.Helper()
	response, err := flow.Do(t.Context(), key(value), nil)
	require.ErrorIs(t, err, want)
	return response
}

// reconciles has a flow decide about as many keys.
func reconciles(t *testing.T, flow *idempotency.Flow[payment], want int) {
	t.Helper()
	decided, err := flow.Reconcile(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, decided)
}

// requirePaidOnce retries with the same key, as a client does, and checks everything that may exist
// once.
func requirePaidOnce(t *testing.T, pool *pgxpool.Pool, b *bank) {
	t.Helper()
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{WaitMax: 30 * time.Second}), idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, false))
	for range 2 {
		response, err := flow.Do(t.Context(), key("k"), []byte("100"))
		require.NoError(t, err)
		require.Equal(t, 201, response.Status)
		require.Regexp(t, `^order \d+, charge-1$`, string(response.Body))
	}
	_, charges := b.counts()
	require.Equal(t, 1, charges)
	for _, phase := range []string{"reserve", "charge", "book"} {
		require.Equal(t, 1, effects(t, pool, phase+" k"), phase)
	}
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox`))
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE state = 'finished' AND phases = '{reserve,charge,book}'`))
}

// dies makes the request "k" to a worker that ends at a point: its lock stays, as that of a process that
// is killed does.
func dies(t *testing.T, flow *idempotency.Flow[payment], at string) {
	t.Helper()
	died := make(chan struct{})
	go func() {
		defer close(died)
		_, _ = flow.Do(crashpoint.With(t.Context(), func(point string) {
			if point == at {
				runtime.Goexit()
			}
		}), key("k"), []byte("100"))
	}()
	testwait.Chan(t, "the worker dies", died)
}

// Property: where the foreign system does not deduplicate, a call that a worker may have made when
// it died is never made again by itself: the key becomes indeterminate, until a person or the
// reconciler decides.
func TestCallThatMustNotBeMadeTwice(t *testing.T) {
	t.Parallel()
	for at, asked := range map[string]int{crashpoint.KeyCalling: 0, crashpoint.KeyCalled: 1} {
		happened := asked == 1
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			pool, b := newPool(t), newBank(t)
			dies(t, newFlow(t, newOperation(t, pool, idempotency.Config{Lock: time.Second}), idempotency.FlowConfig[payment]{}, paymentPhases(b.URL, true)), at)
			require.Equal(t, "running", stateOf(t, pool, "k"))
			cfg := idempotency.FlowConfig[payment]{Reconcile: func(_ context.Context, u idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
				assert.Equal(t, "charge", u.Phase)
				assert.Equal(t, "k", u.Key.Value)
				assert.Positive(t, u.State.Order)
				if happened {
					return u.Continue(u.State), nil
				}
				return idempotency.DidNotHappen(), nil
			}}
			flow := newFlow(t, newOperation(t, pool, idempotency.Config{WaitMax: 30 * time.Second}), cfg, paymentPhases(b.URL, true))
			for range 3 {
				do(t, flow, "k", idempotency.ErrIndeterminate)
			}
			made, _ := b.counts()
			require.Equal(t, asked, made)
			passes(t, pool, time.Minute)
			reconciles(t, flow, 1)
			require.False(t, do(t, flow, "k", nil).Replayed)
			made, _ = b.counts()
			if happened {
				require.Equal(t, asked, made)
			} else {
				require.Equal(t, asked+1, made)
			}
			reconciles(t, flow, 0)
		})
	}
}
