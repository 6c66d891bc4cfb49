package idempotencytest_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/idempotencytest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

func TestMain(m *testing.M) {
	pgtest.SideBySide()
	idempotencytest.Main(m)
}

const orders = `CREATE TABLE orders (n bigint GENERATED ALWAYS AS IDENTITY, id text, made_at timestamptz DEFAULT now())`

func key() idempotency.Key { return idempotency.Key{Scope: "tenant", Operation: "order", Value: "k"} }

func order(ctx context.Context, tx pgx.Tx, id string) error {
	_, err := tx.Exec(ctx, `INSERT INTO orders (id) VALUES ($1)`, id)
	return err
}

// work is as it should be.
func work(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
	if err := order(ctx, tx, "o"); err != nil {
		return idempotency.Response{}, err
	}
	return idempotency.Response{Status: 201, Body: []byte("made")},
		outbox.Publish(ctx, tx, outbox.Message{ID: key().ChildID("made"), Topic: "made"})
}

// bank is a foreign system that honours keys, if it is given some.
type bank struct {
	mu      sync.Mutex
	charges []string
	keys    map[string]bool
}

func (b *bank) reset(context.Context, *pgxpool.Pool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.charges, b.keys = nil, map[string]bool{}
	return nil
}

func (b *bank) charge(key string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.keys[key] {
		b.keys[key] = true
		b.charges = append(b.charges, "a charge of 5")
	}
	return nil
}

func (b *bank) effects(context.Context, *pgxpool.Pool) ([]string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.charges, nil
}

// payment is a flow of three phases; call is what its second one does.
func payment(call func(step *idempotency.Step[string]) error, atMostOnce bool, cfg idempotency.FlowConfig[string]) func(*pgxpool.Pool) (*idempotency.Flow[string], error) {
	return func(pool *pgxpool.Pool) (*idempotency.Flow[string], error) {
		op, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
		if err != nil {
			return nil, err
		}
		return idempotency.NewFlow(op, cfg, idempotency.Phase[string]{
			Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[string]) error {
				step.State = "reserved"
				return order(ctx, tx, string(step.Request))
			},
		}, idempotency.Phase[string]{
			Name: "charge", AtMostOnce: atMostOnce, Call: func(_ context.Context, step *idempotency.Step[string]) error { return call(step) },
		}, idempotency.Phase[string]{
			Name: "book", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[string]) error {
				step.Finish(idempotency.Response{Status: 201, Body: []byte(step.State)})
				return outbox.Publish(ctx, tx, outbox.Message{ID: step.Key.ChildID("paid"), Topic: "paid"})
			},
		})
	}
}

// Property: work that does everything through its transaction, and calls other systems under
// derived keys, passes in each shape.
func TestVerifyPassesWhatIsRight(t *testing.T) {
	t.Parallel()
	idempotencytest.Verify(t, idempotencytest.Once(idempotency.Config{Operation: "order"}, key(), work), idempotencytest.Options{Setup: orders})
}

// Property: work that refuses runs once, however many copies wait for it.
func TestVerifyPassesWhatIsRefused(t *testing.T) {
	t.Parallel()
	idempotencytest.Verify(t, idempotencytest.Once(idempotency.Config{Operation: "order"}, key(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		declined := idempotency.Response{Status: 402, Body: []byte("declined")}
		return idempotency.Response{}, errors.Join(order(ctx, tx, "o"), idempotency.Final(declined, errors.New("declined")))
	}), idempotencytest.Options{Setup: orders})
}

func TestVerifyPassesFlows(t *testing.T) {
	t.Parallel()
	var b bank
	options := idempotencytest.Options{Setup: orders, Prepare: b.reset, Effects: b.effects}
	charge := func(step *idempotency.Step[string]) error { return b.charge(step.ChildID().String()) }
	idempotencytest.Verify(t, idempotencytest.Flow(payment(charge, false, idempotency.FlowConfig[string]{}), key(), []byte("o")), options)
}

// Property: a foreign system that honours no keys may leave the outcome in doubt, but is not called
// twice; with a reconciler that asks it the flow ends.
func TestVerifyPassesCallsAtMostOnce(t *testing.T) {
	t.Parallel()
	var b bank
	options := idempotencytest.Options{Setup: orders, Prepare: b.reset, Effects: b.effects}
	charge := func(*idempotency.Step[string]) error { return b.charge(uuid.NewString()) }
	idempotencytest.Verify(t, idempotencytest.Flow(payment(charge, true, idempotency.FlowConfig[string]{}), key(), []byte("o")), options)

	reconcile := func(ctx context.Context, _ idempotency.UndecidedKey[string]) (idempotency.Decision, error) {
		if charged, _ := b.effects(ctx, nil); len(charged) == 0 {
			return idempotency.DidNotHappen(), nil
		}
		return idempotency.Happened(idempotency.Response{Status: 201, Body: []byte("reserved")}), nil
	}
	said := idempotencytest.Problems(t, idempotencytest.Flow(payment(charge, true, idempotency.FlowConfig[string]{Reconcile: reconcile}), key(), []byte("o")), options)
	// What is left of the phases is not executed after Happened: the message is missed, and that is
	// found.
	require.NotEmpty(t, said)
	for _, problem := range said {
		require.Contains(t, problem, "lost: effectonce.outbox")
		require.NotContains(t, problem, "doubled")
	}
}

// serve is an HTTP handler around work.
func serve(do func(r *http.Request, key idempotency.Key) (idempotency.Response, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, "body", http.StatusBadRequest)
			return
		}
		k := idempotency.Key{Scope: "tenant", Value: r.Header.Get("Idempotency-Key"), Fingerprint: idempotency.NewFingerprint(body)}
		response, err := do(r, k)
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(response.Status)
		_, _ = w.Write(response.Body)
	})
}

func handler(pool *pgxpool.Pool) (http.Handler, error) {
	op, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
	return serve(func(r *http.Request, k idempotency.Key) (idempotency.Response, error) {
		return op.Once(r.Context(), k, work)
	}), err
}

func TestVerifyPassesHandlers(t *testing.T) {
	t.Parallel()
	start := idempotencytest.Handler(handler, http.MethodPost, "/orders", http.Header{"Idempotency-Key": {"k"}}, []byte("body"))
	idempotencytest.Verify(t, start, idempotencytest.Options{Setup: orders})
}

// world is the environment of incorrect work.
type world struct {
	bank

	own  *pgxpool.Pool
	seen int
}

func (w *world) prepare(ctx context.Context, pool *pgxpool.Pool) error {
	w.own, w.seen = pool, 0
	return w.reset(ctx, pool)
}

// Property: a mistake in the work is found, and reported as what it is.
func TestVerifyFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	once := func(work func(ctx context.Context, tx pgx.Tx, w *world) error) func(w *world) idempotencytest.Start {
		return func(w *world) idempotencytest.Start {
			return idempotencytest.Once(idempotency.Config{Operation: "order"}, key(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				return idempotency.Response{Status: 201}, work(ctx, tx, w)
			})
		}
	}
	flow := func(call func(step *idempotency.Step[string], w *world) error) func(w *world) idempotencytest.Start {
		return func(w *world) idempotencytest.Start {
			charge := func(step *idempotency.Step[string]) error { return call(step, w) }
			return idempotencytest.Flow(payment(charge, false, idempotency.FlowConfig[string]{}), key(), []byte("o"))
		}
	}
	always := func(start idempotencytest.Start) func(*world) idempotencytest.Start {
		return func(*world) idempotencytest.Start { return start }
	}
	for name, tc := range map[string]struct {
		start func(w *world) idempotencytest.Start
		says  []string
	}{
		"another connection": {once(func(ctx context.Context, _ pgx.Tx, w *world) error {
			_, err := w.own.Exec(ctx, `INSERT INTO orders (id) VALUES ('o')`)
			return err
		}), []string{
			"the replica is killed after the work, before COMMIT", "the connection is cut", "fails at COMMIT, with a full disk",
			"the client goes away", "doubled: public.orders", "another connection than its tx",
		}},
		"chance": {
			once(func(ctx context.Context, tx pgx.Tx, _ *world) error { return order(ctx, tx, uuid.NewString()) }),
			[]string{"a second clean run", "differ from run to run"},
		},
		"the process's clock": {
			once(func(ctx context.Context, tx pgx.Tx, _ *world) error { return order(ctx, tx, time.Now().String()) }),
			[]string{"a second clean run", "differ from run to run"},
		},
		"a message without an ID": {
			once(func(ctx context.Context, tx pgx.Tx, _ *world) error {
				return outbox.Publish(ctx, tx, outbox.Message{Topic: "made"})
			}),
			[]string{"a second clean run", "effectonce.outbox", "Key.ChildID"},
		},
		"memory": {once(func(ctx context.Context, tx pgx.Tx, w *world) error {
			w.seen++
			return order(ctx, tx, strings.Repeat("o", w.seen))
		}), []string{"killed", "different: public.orders", "in memory"}},
		"a call within the transaction": {
			once(func(_ context.Context, _ pgx.Tx, w *world) error { return w.charge(uuid.NewString()) }),
			[]string{"the replica is killed after the work", "doubled: Options.Effects has 2 times a charge of 5"},
		},
		"a call under a random key": {
			flow(func(_ *idempotency.Step[string], w *world) error { return w.charge(uuid.NewString()) }),
			[]string{"the replica is killed after a foreign call", "doubled: Options.Effects has 2 times a charge of 5", "Step.ChildID"},
		},
		"a key for each request": {always(func(pool *pgxpool.Pool) (idempotencytest.Request, error) {
			op, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
			return func(ctx context.Context) (idempotency.Response, error) {
				return op.Once(ctx, idempotency.Key{Scope: "tenant", Value: idempotency.NewKey()}, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					return idempotency.Response{Status: 201}, order(ctx, tx, "o")
				})
			}, err
		}), []string{"three times in a row", "10 times at once", "the same key each time"}},
		"an answer that is not stored": {always(func(pool *pgxpool.Pool) (idempotencytest.Request, error) {
			op, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
			return func(ctx context.Context) (idempotency.Response, error) {
				response, err := op.Once(ctx, key(), work)
				response.Body = []byte(uuid.NewString())
				return response, err
			}, err
		}), []string{"the request was answered differently"}},
		"no engine": {always(func(pool *pgxpool.Pool) (idempotencytest.Request, error) {
			return func(ctx context.Context) (idempotency.Response, error) {
				_, err := pool.Exec(ctx, `INSERT INTO orders (id) VALUES ('o')`)
				return idempotency.Response{Status: 201}, err
			}, nil
		}), []string{"the clean run", "passed none of the points"}},
		"a failure": {once(func(_ context.Context, _ pgx.Tx, _ *world) error { return errors.New("no such account") }), []string{"the clean run", "no such account"}},
		"nothing":   {once(func(_ context.Context, _ pgx.Tx, _ *world) error { return nil }), []string{"changed nothing in any table"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var w world
			said := strings.Join(idempotencytest.Problems(t, tc.start(&w), idempotencytest.Options{Setup: orders, Effects: w.effects, Prepare: w.prepare}), "\n")
			for _, text := range tc.says {
				require.Contains(t, said, text)
			}
		})
	}
}
