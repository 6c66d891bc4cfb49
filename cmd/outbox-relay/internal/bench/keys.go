package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pause"
)

// keysClients make requests, and as many connections to the database serve them.
const keysClients = 32

// keys is a handler of some statements: bare, and under idempotency keys.
type keys struct {
	*site

	statements int
	pool       *pgxpool.Pool
	op         *idempotency.Operation
	n          atomic.Int64
	bare, once *httptest.Server // nil: not over HTTP
	client     *http.Client
}

func (m *measurement) newKeys(ctx context.Context, statements int, overHTTP bool) (*keys, error) {
	k := &keys{site: m.site, statements: statements}
	var err error
	if k.pool, err = m.newPool(ctx, keysClients); err != nil {
		return nil, err
	}
	config := idempotency.Config{Schema: m.schema, Operation: "bench"}
	if k.op, err = idempotency.New(k.pool, config); err != nil || !overHTTP {
		return k, err
	}
	keyed, err := httpkey.New(k.pool, func(*http.Request) (string, error) { return "bench", nil }, httpkey.Config{Operation: config})
	if err != nil {
		return nil, err
	}
	answer := func(w http.ResponseWriter, err error) {
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(keysBody()) // the client sees it
	}
	k.bare = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { answer(w, k.plain(r.Context())) }))
	k.once = httptest.NewServer(keyed.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer(w, k.work(r.Context(), httpkey.Tx(r)))
	})))
	k.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: keysClients}}
	return k, nil
}

func (k *keys) close() {
	if k.client != nil {
		k.client.CloseIdleConnections()
		k.bare.Close()
		k.once.Close()
	}
	k.pool.Close()
}

func keysBody() []byte { return []byte(`{"state":"booked","note":"` + strings.Repeat("x", 170) + `"}`) }

// work changes an account, and inserts an effect for each other statement.
func (k *keys) work(ctx context.Context, tx pgx.Tx) error {
	i := k.n.Add(1)
	if _, err := tx.Exec(ctx, k.sql(bookSQL), i*7919%accounts); err != nil {
		return err
	}
	for line := range k.statements - 1 {
		if _, err := tx.Exec(ctx, k.sql(effectSQL), "account", fmt.Appendf(nil, "%d/%d", i, line)); err != nil {
			return err
		}
	}
	return nil
}

func (k *keys) plain(ctx context.Context) error {
	return pgx.BeginFunc(ctx, k.pool, func(tx pgx.Tx) error { return k.work(ctx, tx) })
}

// whileInProgress asks as long as the answer is that the request is in progress, as clients do: on a
// busy machine a handler may run out of time, and be run again.
func whileInProgress(ctx context.Context, ask func() error) error {
	for {
		if err := ask(); !errors.Is(err, idempotency.ErrInProgress) || !pause.For(ctx, 100*time.Millisecond) {
			return err
		}
	}
}

func (k *keys) under(ctx context.Context, key string) error {
	return whileInProgress(ctx, func() error {
		_, err := k.op.Once(ctx, k.op.Key("bench", key, idempotency.NewFingerprint([]byte("order"))), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: http.StatusCreated, Body: keysBody()}, k.work(ctx, tx)
		})
		return err
	})
}

// request asks as whileInProgress does.
func (k *keys) request(ctx context.Context, server *httptest.Server, key string) error {
	for {
		status, err := k.ask(ctx, server, key)
		switch {
		case err != nil:
			return err
		case status == http.StatusCreated:
			return nil
		case status != http.StatusConflict || !pause.For(ctx, 100*time.Millisecond):
			return fmt.Errorf("status %d", status)
		}
	}
}

func (k *keys) ask(ctx context.Context, server *httptest.Server, key string) (status int, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, strings.NewReader(`{"lines":[{"sku":"a-1","count":2}]}`))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Idempotency-Key", key)
	response, err := k.client.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	_, err = io.Copy(io.Discard, response.Body)
	return response.StatusCode, err
}

// ways are the bare handler, the handler under keys, and replays of a stored response.
func (k *keys) ways(m *measurement) []way {
	n := max(200, 6000/m.opts.scale)
	const bare, executed = "no keys", "Once"
	ways := []way{{name: bare}, {name: executed, against: bare}, {name: "replay", against: executed}}
	for i, executions := range []int{n, n, 0} {
		key := idempotency.NewKey
		if executions == 0 {
			key = func() string { return "replayed-" + strconv.FormatBool(k.client != nil) }
		}
		one := func(ctx context.Context) error { return k.under(ctx, key()) }
		switch {
		case k.client == nil && i == 0:
			one = k.plain
		case k.client != nil && i == 0:
			one = func(ctx context.Context) error { return k.request(ctx, k.bare, key()) }
		case k.client != nil:
			one = func(ctx context.Context) error { return k.request(ctx, k.once, key()) }
		}
		ways[i].n = n
		ways[i].prepare = func(ctx context.Context) error {
			if err := k.exec(ctx, "empty the keys", emptyKeysSQL); err != nil {
				return err
			}
			if executions == 0 {
				return one(ctx) // which is replayed from then on
			}
			return nil
		}
		ways[i].run = func(ctx context.Context) (float64, error) { return k.load(ctx, n, executions, one) }
	}
	return ways
}

// load makes n requests and checks how often the work was done.
func (k *keys) load(ctx context.Context, n, executions int, one func(context.Context) error) (float64, error) {
	before, begun := k.n.Load(), time.Now()
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range keysClients {
		group.Go(func() error {
			for next.Add(1) <= int64(n) {
				if err := one(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	elapsed := time.Since(begun)
	if did := k.n.Load() - before; did != int64(executions) {
		return 0, fmt.Errorf("%d requests were executed %d times, not %d: this is a bug, the figures are void; please report it", n, did, executions)
	}
	return float64(n) / elapsed.Seconds(), nil
}
