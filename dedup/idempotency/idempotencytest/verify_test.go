package idempotencytest_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/idempotencytest"
	"github.com/effectonce/effectonce/internal/effects"
	"github.com/effectonce/effectonce/internal/longtest"
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

// Property: work that refuses, and so has no effect, is right.
func TestVerifyPassesWhatIsRefused(t *testing.T) {
	longtest.Only(t, "a run for each point")
	t.Parallel()
	idempotencytest.Verify(t, idempotencytest.Once(idempotency.Config{Operation: "order"}, key(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		declined := idempotency.Response{Status: 402, Body: []byte("declined")}
		return idempotency.Response{}, errors.Join(order(ctx, tx, "o"), idempotency.Final(declined, errors.New("declined")))
	}), idempotencytest.Options{Setup: orders})
}

// Property: with a reconciler a flow in doubt ends, and nothing of it is missed: its phases continue behind
// a call that happened.
func TestVerifyPassesWhatAReconcilerContinues(t *testing.T) {
	longtest.Only(t, "a run for each point")
	t.Parallel()
	var b bank
	charge := func(*idempotency.Step[string]) error { return b.charge(uuid.NewString()) }
	reconcile := func(ctx context.Context, u idempotency.UndecidedKey[string]) (idempotency.Decision, error) {
		if charged, _ := b.effects(ctx, nil); len(charged) == 0 {
			return idempotency.DidNotHappen(), nil
		}
		return u.Continue(u.State), nil
	}
	start := idempotencytest.Flow(payment(charge, true, idempotency.FlowConfig[string]{Reconcile: reconcile}), key(), []byte("o"))
	idempotencytest.Verify(t, start, idempotencytest.Options{Setup: orders, Prepare: b.reset, Effects: b.effects})
}

// Property: a mistake in the work is found, and reported as what it is.
func TestVerifyFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	type do = func(ctx context.Context, tx pgx.Tx, pool *pgxpool.Pool) error
	var b bank
	asks := func(key func() idempotency.Key, work do, answer func(*idempotency.Response)) idempotencytest.Start {
		return func(pool *pgxpool.Pool) (idempotencytest.Request, error) {
			op, err := idempotency.New(pool, idempotency.Config{Operation: "order"})
			return func(ctx context.Context) (idempotency.Response, error) {
				response, err := op.Once(ctx, key(), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
					return idempotency.Response{Status: 201}, work(ctx, tx, pool)
				})
				answer(&response)
				return response, err
			}, err
		}
	}
	once := func(work do) idempotencytest.Start { return asks(key, work, func(*idempotency.Response) {}) }
	right := func(ctx context.Context, tx pgx.Tx, _ *pgxpool.Pool) error { return order(ctx, tx, "o") }
	fresh := func() idempotency.Key { return idempotency.Key{Scope: "tenant", Value: idempotency.NewKey()} }
	for name, tc := range map[string]struct {
		start idempotencytest.Start
		says  []string
	}{
		"another connection": {once(func(ctx context.Context, _ pgx.Tx, pool *pgxpool.Pool) error {
			_, err := pool.Exec(ctx, `INSERT INTO orders (id) VALUES ('o')`)
			return err
		}), []string{
			"the replica is killed after the work, before COMMIT", "doubled: public.orders", "another connection than its tx",
		}},
		"a call within the transaction": {
			once(func(context.Context, pgx.Tx, *pgxpool.Pool) error { return b.charge(uuid.NewString()) }),
			[]string{"the replica is killed after the work", "doubled: Options.Effects has 2 times a charge of 5"},
		},
		"chance": {
			once(func(ctx context.Context, tx pgx.Tx, _ *pgxpool.Pool) error { return order(ctx, tx, uuid.NewString()) }),
			[]string{"a second clean run", "differ from run to run"},
		},
		"a key for each request": {
			asks(fresh, right, func(*idempotency.Response) {}),
			[]string{"three times in a row", "10 times at once", "the same key each time"},
		},
		"a body that is not stored": {
			asks(key, right, func(r *idempotency.Response) { r.Body = []byte(uuid.NewString()) }),
			[]string{"answered differently: first status 201"},
		},
		"no engine": {func(*pgxpool.Pool) (idempotencytest.Request, error) {
			return func(context.Context) (idempotency.Response, error) { return idempotency.Response{Status: 201}, nil }, nil
		}, []string{"the clean run", "passed none of the points"}},
		"a failure": {once(func(context.Context, pgx.Tx, *pgxpool.Pool) error { return errors.New("no such account") }), []string{"the clean run", "no such account"}},
		"nothing":   {once(func(context.Context, pgx.Tx, *pgxpool.Pool) error { return nil }), []string{"changed nothing in any table"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "a body that is not stored" || name == "a call within the transaction" {
				longtest.Only(t, "a run for each point, as in other cases")
			}
			options := idempotencytest.Options{Setup: orders}
			if name == "a call within the transaction" {
				options.Prepare, options.Effects = b.reset, b.effects
			}
			said := strings.Join(idempotencytest.Problems(t, tc.start, options), "\n")
			for _, text := range tc.says {
				require.Contains(t, said, text)
			}
		})
	}
}

func newMiddleware(pool *pgxpool.Pool, cfg idempotency.Config) (*httpkey.Middleware, error) {
	cfg.Operation = "order"
	return httpkey.New(pool, func(*http.Request) (string, error) { return "tenant", nil }, httpkey.Config{Operation: cfg})
}

func posted(build func(pool *pgxpool.Pool) (http.Handler, error)) idempotencytest.Start {
	return idempotencytest.Handler(build, http.MethodPost, "/orders", http.Header{"Idempotency-Key": {"k"}}, []byte("o"))
}

// Property: a handler of httpkey is right, also if its body is too large to be kept, and it answers
// 410 from then on.
func TestVerifyPassesHandlers(t *testing.T) {
	t.Parallel()
	idempotencytest.Verify(t, posted(func(pool *pgxpool.Pool) (http.Handler, error) {
		m, err := newMiddleware(pool, idempotency.Config{ResponseBytesMax: 10})
		if err != nil {
			return nil, err
		}
		return m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := work(r.Context(), httpkey.Tx(r)); err != nil {
				httpkey.Fail(r, err)
				return
			}
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, strings.Repeat("o", 100))
		})), nil
	}), idempotencytest.Options{Setup: orders})
}

// Property: a flow with a call that may be made at most once, which answers that a person has to
// decide, is in doubt, and right: the call is not made twice.
func TestVerifyPassesHandlersInDoubt(t *testing.T) {
	longtest.Only(t, "a run for each point of three phases")
	t.Parallel()
	var b bank
	charge := func(*idempotency.Step[string]) error { return b.charge(uuid.NewString()) }
	idempotencytest.Verify(t, posted(func(pool *pgxpool.Pool) (http.Handler, error) {
		m, err := newMiddleware(pool, idempotency.Config{})
		if err != nil {
			return nil, err
		}
		flow, err := payment(charge, true, idempotency.FlowConfig[string]{})(pool)
		if err != nil {
			return nil, err
		}
		return httpkey.FlowHandler(m, flow, nil)
	}), idempotencytest.Options{Setup: orders, Prepare: b.reset, Effects: b.effects})
}

// Property: where the outcome is in doubt a second effect is found however much was lost besides,
// and also with another text; what is lost, or has another text in the place of the clean run's, or
// is the first of its kind, is none.
func TestDoubtIsNoSecondEffect(t *testing.T) {
	t.Parallel()
	many := map[string]int{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1, "z": 1}
	for name, test := range map[string]struct {
		clean, other map[string]int
		says         []string
	}{
		"behind much that is lost":     {many, map[string]int{"z": 2}, []string{"doubled: charges has 2 times z"}},
		"behind much that differs":     {many, map[string]int{"a1": 1, "a2": 1, "a3": 1, "a4": 1, "a5": 1, "z": 2}, []string{"doubled: charges has 2 times z"}},
		"with another text":            {map[string]int{"5 at 12:00": 1}, map[string]int{"5 at 12:00": 1, "5 at 12:01": 1}, []string{"different: charges has 5 at 12:01"}},
		"nothing happened":             {many, nil, nil},
		"in the place of another text": {map[string]int{"5 at 12:00": 1}, map[string]int{"5 at 12:01": 1}, nil},
		"the first of its kind":        {nil, map[string]int{"to be looked into": 1}, nil},
	} {
		said := idempotencytest.Doubt(effects.Effects{"charges": test.clean}, effects.Effects{"charges": test.other})
		if test.says == nil {
			require.Empty(t, said, name)
		}
		for _, text := range test.says {
			require.Contains(t, said, text, name)
		}
		require.NotContains(t, said, "lost:", name)
	}
}
