package hammertest_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/crashpoint"
)

// spec is what a server is started with.
type spec struct {
	URL, Bank string
	Seed      uint64
	At        string // the point at which it ends
	Nth       int    // which time the point is passed, from 1
	Freeze    bool   // it does not end there, but stops until it is continued
}

// server is a process of the hammer, which is killed and frozen. It writes a line for each outcome
// of a handler that it is about to hand over: "ran KEY EXECUTION STATUS".
type server struct {
	spec

	pool   *pgxpool.Pool
	mu     sync.Mutex
	rng    *rand.Rand
	passed int
}

// pass ends, or freezes, this process at its point.
func (s *server) pass(point string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if point != s.At {
		return
	}
	if s.passed++; s.passed != s.Nth {
		return
	}
	if !s.Freeze {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	woken := make(chan os.Signal, 1)
	signal.Notify(woken, syscall.SIGCONT)
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	<-woken
}

// The kinds of keys. Each is a path, and an operation.
const (
	kindOrder  = "order"  // Once: succeeds, is declined for good, fails for now
	kindStrict = "strict" // the same, where the first outcome counts whatever it is
	kindDoubt  = "doubt"  // Once, whose handler may not know the outcome
	kindFlow   = "flow"   // phases around a bank that honours keys
	kindSingle = "single" // phases around a bank that does not: AtMostOnce
	kindHook   = "hook"   // webhook
)

var errDrawn = errors.New("drawn by the hammer")

// lot returns one of the choices.
func (s *server) lot(choices ...string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return choices[s.rng.IntN(len(choices))]
}

// say reports an outcome to the judge.
func say(key, exec string, status int) { _, _ = fmt.Fprintln(os.Stdout, "ran", key, exec, status) }

func serve(text string) error {
	s := &server{}
	if err := json.Unmarshal([]byte(text), &s.spec); err != nil {
		return err
	}
	s.rng = rand.New(rand.NewPCG(s.Seed, 0))
	crashpoint.Arm(s.pass)
	ctx := context.Background() //nolint:forbidigo // this process is a program, not a test
	var err error
	if s.pool, err = pgxpool.New(ctx, s.URL); err != nil {
		return err
	}
	mux := http.NewServeMux()
	for _, kind := range []string{kindOrder, kindStrict, kindDoubt, kindFlow, kindSingle} {
		m, err := httpkey.New(s.pool, func(*http.Request) (string, error) { return "tenant", nil }, httpkey.Config{
			Operation: operation(kind), HandlerTimeout: 20 * time.Second,
		})
		if err != nil {
			return err
		}
		if kind != kindFlow && kind != kindSingle {
			mux.Handle("/"+kind, m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.handle(w, r, kind) })))
			continue
		}
		flow, err := idempotency.NewFlow(m.Operation(), idempotency.FlowConfig[steps]{
			StoreRequest: true, CallMax: 2 * time.Second, RetryAfter: 50 * time.Millisecond, Every: 200 * time.Millisecond,
		}, s.phases(kind == kindSingle)...)
		if err != nil {
			return err
		}
		go flow.Run(ctx)
		handler, err := httpkey.FlowHandler(m, flow, nil)
		if err != nil {
			return err
		}
		mux.Handle("/"+kind, handler)
	}
	hook := operation(kindHook)
	hook.Operation = ""
	receiver, err := webhook.New(s.pool, webhook.Config{
		Sender: "sender", Name: kindHook, Idempotency: hook,
		Scheme: webhook.SchemeOf(func(header http.Header, _ []byte) (webhook.Event, error) {
			return webhook.Event{ID: header.Get("Idempotency-Key")}, nil
		}),
	}, s.receive)
	if err != nil {
		return err
	}
	mux.Handle("/"+kindHook, receiver)
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintln(os.Stdout, "listens", listener.Addr())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); os.Exit(0) }() //nolint:forbidigo // it ends with the test's process
	return (&http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}).Serve(listener)
}

// operation has limits that a freeze passes, so that work of a frozen server is taken over.
func operation(kind string) idempotency.Config {
	return idempotency.Config{
		Operation: kind, Strict: kind == kindStrict, Lock: time.Second,
		WaitMax: 2 * time.Second, StatementTimeout: 10 * time.Second, IdleTimeout: 3 * time.Second,
	}
}

// write has the effect, and takes as long as it takes others to come.
func (s *server) write(ctx context.Context, tx pgx.Tx, key, step, body, exec string) error {
	_, err := tx.Exec(ctx, `INSERT INTO ledger (key, step, body, exec) SELECT $1, $2, $3, $4 FROM pg_sleep(random() * 0.03)`, key, step, body, exec)
	return err
}

func (s *server) handle(w http.ResponseWriter, r *http.Request, kind string) {
	body, _ := io.ReadAll(r.Body)
	key, exec := httpkey.Key(r).Value, uuid.NewString()
	tx := httpkey.Tx(r)
	if err := s.write(r.Context(), tx, key, "order", string(body), exec); err != nil {
		httpkey.Fail(r, err)
		return
	}
	declined := idempotency.Response{Status: http.StatusPaymentRequired, Body: []byte("exec " + exec)}
	fails := http.StatusServiceUnavailable
	lot := s.lot("commit", "commit", "commit", "refuse", "final", "broken and final", "forget", "broken", "panic")
	if kind == kindDoubt {
		lot = s.lot("commit", "doubt", "forget")
	}
	if strings.HasPrefix(lot, "broken") {
		_, err := tx.Exec(r.Context(), `SELECT 1 / 0`)
		httpkey.Fail(r, err)
		fails = http.StatusInternalServerError
	}
	switch lot {
	case "commit":
		say(key, exec, http.StatusCreated)
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, "exec "+exec)
	case "refuse":
		say(key, exec, declined.Status)
		w.WriteHeader(declined.Status)
		_, _ = w.Write(declined.Body)
	case "final", "broken and final":
		say(key, exec, declined.Status)
		httpkey.Fail(r, idempotency.Final(declined, errDrawn))
	case "doubt":
		say(key, exec, http.StatusConflict)
		httpkey.Fail(r, idempotency.Indeterminate(errDrawn))
	case "panic":
		panic(http.ErrAbortHandler)
	default:
		if kind == kindStrict {
			say(key, exec, fails)
		}
		w.WriteHeader(fails)
		_, _ = io.WriteString(w, "exec "+exec)
	}
}

func (s *server) receive(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
	exec := uuid.NewString()
	if err := s.write(ctx, tx, event.ID, "order", string(event.Body), exec); err != nil {
		return err
	}
	switch s.lot("commit", "commit", "refuse", "forget") {
	case "commit":
		say(event.ID, exec, http.StatusOK)
		return nil
	case "refuse":
		say(event.ID, exec, http.StatusPaymentRequired)
		return webhook.Refuse(errDrawn)
	}
	return errDrawn
}

// steps is what the phases hand on.
type steps struct{ Exec string }

func (s *server) phases(atMostOnce bool) []idempotency.Phase[steps] {
	write := func(name string) func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[steps]) error {
		return func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[steps]) error {
			step.State.Exec = cmp.Or(step.State.Exec, uuid.NewString())
			if err := s.write(ctx, tx, step.Key.Value, name, string(step.Request), step.State.Exec); err != nil {
				return err
			}
			if name == "order" {
				say(step.Key.Value, step.State.Exec, http.StatusCreated)
				step.Finish(idempotency.Response{Status: http.StatusCreated, Body: []byte("exec " + step.State.Exec)})
			}
			return nil
		}
	}
	return []idempotency.Phase[steps]{
		{Name: "reserve", Write: write("reserve")},
		{Name: "charge", AtMostOnce: atMostOnce, Write: write("charge"), Call: func(ctx context.Context, step *idempotency.Step[steps]) error {
			return s.charge(ctx, step, atMostOnce)
		}},
		{Name: "order", Write: write("order")},
	}
}

func (s *server) charge(ctx context.Context, step *idempotency.Step[steps], atMostOnce bool) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.Bank, http.NoBody)
	if err != nil {
		return err
	}
	request.Header.Set("Key", step.Key.Value)
	if !atMostOnce {
		request.Header.Set("Idempotency-Key", step.ChildID().String())
	}
	request.Close = true // net/http would send a request again where a connection that it kept ends
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	_ = response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusPaymentRequired:
		say(step.Key.Value, step.State.Exec, response.StatusCode)
		return idempotency.Final(idempotency.Response{Status: response.StatusCode, Body: []byte("exec " + step.State.Exec)}, errDrawn)
	}
	return idempotency.NotDone(errDrawn)
}
