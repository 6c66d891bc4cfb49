package torture

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/pause"
)

const (
	shoppersAll = 8
	answerMax   = 3 * time.Second // a client asks again then
	callMax     = time.Second     // of the bank
	unheardHTTP = 30              // of a thousand requests are cut after they were sent
)

// bank is a foreign system, in memory: how often each key acted, for each request that needs it.
type bank struct {
	mu    sync.Mutex
	acted map[string]map[string]int
}

// expect notes a request that must be charged.
func (b *bank) expect(request string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.acted[request] = map[string]int{}
}

// charge acts, unless the bank honours keys and knows this one. The answer may come late, or be an error
// although the bank acted.
func (b *bank) charge(ctx context.Context, request, key string, honours bool) error {
	trouble := rand.IntN(12) //nolint:gosec // as much chance as the timing
	switch trouble {
	case 0:
		return errTorture
	case 1:
		pause.For(ctx, 2*callMax)
	}
	b.mu.Lock()
	err := ctx.Err() // who stopped waiting is not charged
	if err == nil && (!honours || b.acted[request][key] == 0) {
		b.acted[request][key]++
	}
	b.mu.Unlock()
	switch trouble {
	case 2:
		return errTorture
	case 3:
		pause.For(ctx, 2*callMax)
	}
	return errors.Join(err, ctx.Err())
}

// did reports whether a request was charged.
func (b *bank) did(request string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.acted[request]) > 0
}

// serve is a replica of a service whose requests carry idempotency keys: /orders places an order in the
// transaction of its key, /charges and /single let the bank act and book that. For /single it does not honour
// keys. Two receivers of webhooks, /event and /copy, get the same events.
func (r *run) serve(ctx context.Context, pool *pgxpool.Pool, door *string) error {
	tenant := func(*http.Request) (string, error) { return "torture", nil }
	limits := idempotency.Config{
		Lock: lease, StatementTimeout: time.Second, LockTimeout: 800 * time.Millisecond, IdleTimeout: 2 * lease, Logger: r.logger,
	}
	config := func(operation string) httpkey.Config {
		named := limits
		named.Operation = operation
		return httpkey.Config{HandlerTimeout: 5 * time.Second, Operation: named}
	}
	orders, err := httpkey.New(pool, tenant, config("orders"))
	if err != nil {
		return err
	}
	mux, background := http.NewServeMux(), sync.WaitGroup{}
	ctx, stop := context.WithCancel(ctx)
	defer background.Wait()
	defer stop()
	mux.Handle("POST /orders", orders.Handler(http.HandlerFunc(r.handleOrder)))
	background.Go(func() { orders.Operation().Run(ctx) })
	for path, honours := range map[string]bool{"/charges": true, "/single": false} {
		charges, err := httpkey.New(pool, tenant, config(path))
		if err != nil {
			return err
		}
		flow, err := r.flow(charges.Operation(), honours)
		if err != nil {
			return err
		}
		charge, err := httpkey.FlowHandler(charges, flow, nil)
		if err != nil {
			return err
		}
		mux.Handle("POST "+path, charge)
		background.Go(func() { flow.Run(ctx) })
	}
	for name, sign := range receivers() {
		received, err := webhook.New(pool, webhook.Config{
			Sender: "torture", Name: name, Scheme: webhook.GitHub(secret), Idempotency: limits,
		}, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
			number, err := strconv.ParseInt(string(event.Body), 10, 64)
			if err != nil {
				return webhook.Refuse(err)
			}
			_, err = tx.Exec(ctx, requestSQL, sign*number)
			return err
		})
		if err != nil {
			return err
		}
		mux.Handle("POST "+name, received)
		background.Go(func() { received.Run(ctx) })
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	r.mu.Lock()
	*door = "http://" + listener.Addr().String()
	r.mu.Unlock()
	server := &http.Server{Handler: mux, ReadHeaderTimeout: answerMax, BaseContext: func(net.Listener) context.Context { return ctx }}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	return server.Serve(listener)
}

func (r *run) handleOrder(w http.ResponseWriter, q *http.Request) {
	body, err := io.ReadAll(q.Body)
	number, parseErr := strconv.ParseInt(string(body), 10, 64)
	var id int64
	if err = errors.Join(err, parseErr); err == nil {
		random := rand.New(rand.NewPCG(r.plan.Seed, uint64(number))) //nolint:gosec // repeatable
		id, err = r.place(q.Context(), httpkey.Tx(q), random)
	}
	if err == nil {
		_, err = httpkey.Tx(q).Exec(q.Context(), requestSQL, number)
	}
	if err != nil {
		httpkey.Fail(q, err)
		return
	}
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, strconv.FormatInt(id, 10)) // a client that is gone asks again
}

const requestSQL = `INSERT INTO public.torture_requests (number) VALUES ($1)`

type receipt struct{ Key string }

// flow is a call of the bank, and the booking. Where the bank does not honour keys, the call is made once, and
// the bank's books decide about one whose answer is unknown.
func (r *run) flow(operation *idempotency.Operation, honours bool) (*idempotency.Flow[receipt], error) {
	return idempotency.NewFlow(operation, idempotency.FlowConfig[receipt]{
		StoreRequest: true, CallMax: callMax, RetryAfter: 100 * time.Millisecond, Every: 100 * time.Millisecond,
		Reconcile: func(_ context.Context, u idempotency.UndecidedKey[receipt]) (idempotency.Decision, error) {
			if r.bank.did(string(u.Request)) {
				return u.Continue(receipt{Key: u.Key.ChildID(u.Phase).String()}), nil
			}
			return idempotency.DidNotHappen(), nil
		},
	}, idempotency.Phase[receipt]{
		Name: "charged", AtMostOnce: !honours, Call: func(ctx context.Context, step *idempotency.Step[receipt]) error {
			step.State.Key = step.ChildID().String()
			return r.bank.charge(ctx, string(step.Request), step.State.Key, honours)
		},
	}, idempotency.Phase[receipt]{
		Name: "booked", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[receipt]) error {
			number, err := strconv.ParseInt(string(step.Request), 10, 64)
			if err != nil {
				return err
			}
			if rand.IntN(8) == 0 { //nolint:gosec // as much chance as the timing
				pause.For(ctx, lease/2)
			}
			step.Finish(idempotency.Response{Status: http.StatusCreated, Body: []byte(step.State.Key)})
			_, err = tx.Exec(ctx, requestSQL, number)
			return err
		},
	})
}

// shop sends requests, each until it is answered.
func (r *run) shop(ctx context.Context, random *rand.Rand) {
	network := newWire(rand.New(rand.NewPCG(random.Uint64(), 0)), unheardHTTP, "idempotency-key") //nolint:gosec // repeatable
	client := &http.Client{Timeout: answerMax, Transport: &http.Transport{DialContext: network.dialer()}}
	defer client.CloseIdleConnections()
	for pause.For(ctx, between(random, 0, writerGapMax)) {
		r.request(context.WithoutCancel(ctx), client, random)
	}
}

// receivers of webhooks, and the sign with which they note an event.
func receivers() map[string]int64 { return map[string]int64{"/event": 1, "/copy": -1} }

const secret = "torture"

// request sends one request, or one event to its receivers.
func (r *run) request(ctx context.Context, client *http.Client, random *rand.Rand) {
	number, path, key := r.requests.Add(1), pick(random, "/orders", "/charges", "/single", "/event"), idempotency.NewKey()
	switch path {
	case "/event":
		r.repeat(ctx, client, random, "/copy", key, number)
	case "/charges", "/single":
		r.bank.expect(strconv.FormatInt(number, 10))
	}
	r.repeat(ctx, client, random, path, key, number)
}

// repeat sends a request, sometimes twice at the same time, until there is an answer. A client that does
// not need it any more asks again sometimes.
func (r *run) repeat(ctx context.Context, client *http.Client, random *rand.Rand, path, key string, number int64) {
	body := strconv.FormatInt(number, 10)
	var answers []string
	for since, rounds := time.Now(), 1+random.IntN(2); rounds > 0; {
		if time.Since(since) > StuckAfter {
			r.broken("request %d to %s was not answered within %v", number, path, StuckAfter)
			return
		}
		var copies sync.WaitGroup
		answered := false
		for range 1 + random.IntN(2) {
			door := random.IntN(len(r.doors))
			copies.Go(func() {
				answer, err := r.ask(ctx, client, door, path, key, body)
				r.mu.Lock()
				defer r.mu.Unlock()
				answered = answered || err == nil
				if err == nil && !slices.Contains(answers, answer) {
					answers = append(answers, answer)
				}
			})
		}
		copies.Wait()
		if answered {
			rounds--
		}
		pause.For(ctx, between(random, 0, restartGap))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(answers) > 1 && !r.requestMayBeLost(number, len(r.answered)) {
		r.report.Problems = append(r.report.Problems, fmt.Sprintf("request %d to %s has %d answers: %q", number, path, len(answers), answers))
	}
	if path == "/copy" {
		number = -number // as that receiver notes it
	}
	r.answered = append(r.answered, number)
	if id, err := strconv.ParseInt(answers[0], 10, 64); err == nil && path == "/orders" {
		r.acknowledged = append(r.acknowledged, id)
	}
}

// ask sends one copy of a request, and returns the body of its success.
func (r *run) ask(ctx context.Context, client *http.Client, door int, path, key, body string) (string, error) {
	r.mu.Lock()
	address := r.doors[door]
	r.mu.Unlock()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, address+path, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	request.Header.Set("Idempotency-Key", key)
	if receivers()[path] != 0 {
		mac := hmac.New(sha256.New, []byte(secret))
		_, _ = io.WriteString(mac, body)
		request.Header.Set("X-GitHub-Event", "push")
		request.Header.Set("X-GitHub-Delivery", key)
		request.Header.Set("X-Hub-Signature-256", "sha256="+hex.EncodeToString(mac.Sum(nil)))
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	answer, err := io.ReadAll(response.Body)
	switch code := response.StatusCode; {
	case code == http.StatusCreated || code == http.StatusOK && receivers()[path] != 0:
	case code == http.StatusConflict || code >= http.StatusInternalServerError:
		err = errors.Join(err, fmt.Errorf("status %d", code))
	default:
		r.broken("a request to %s got status %d: %s", path, code, answer)
		err = errors.Join(err, fmt.Errorf("status %d", code))
	}
	return string(answer), err
}

// judgeRequests compares the requests, what they did, and the bank's books.
func (r *run) judgeRequests(ctx context.Context) {
	r.report.Requests = len(r.answered)
	var kept []int64
	again := map[string]bool{} // what may have happened again
	for nth, number := range r.answered {
		if r.requestMayBeLost(number, nth) {
			again[strconv.FormatInt(number, 10)] = true
		} else {
			kept = append(kept, number)
		}
	}
	r.report.Lost += r.none(ctx, "request was answered and has no effect",
		`SELECT a.n FROM unnest($1::bigint[]) AS a (n) WHERE NOT EXISTS (SELECT FROM public.torture_requests AS q WHERE q.number = a.n)`, kept)
	r.report.Doubled += r.none(ctx, "request happened more than once", `SELECT number, count(*) FROM public.torture_requests GROUP BY number HAVING count(*) > 1`)
	r.none(ctx, "key is not finished", `SELECT operation, key, state, phases, error FROM effectonce.idempotency_keys WHERE state <> 'finished'`)
	for request, keys := range r.bank.acted {
		times := 0
		for _, n := range keys {
			times += n
		}
		switch {
		case times > 1 && again[request]:
			continue
		case times == 0:
			r.report.Lost++
		case times > 1:
			r.report.Doubled++
		}
		if times != 1 {
			r.broken("the bank acted %d times for request %s: %v", times, request, keys)
		}
	}
}
