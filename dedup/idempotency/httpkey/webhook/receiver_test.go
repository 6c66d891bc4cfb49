package webhook_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// newPool is a database with a table for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, `CREATE TABLE effects (sender text, event text, type text, body bytea)`)
}

func newReceiver(t *testing.T, pool *pgxpool.Pool, cfg webhook.Config, handle webhook.Handler) *webhook.Receiver {
	t.Helper()
	cfg.Sender, cfg.Name = cmp.Or(cfg.Sender, "stripe"), cmp.Or(cfg.Name, "webhook")
	if fmt.Sprint(cfg.Scheme) == fmt.Sprint(webhook.Scheme{}) {
		cfg.Scheme = webhook.Stripe(secret)
	}
	r, err := webhook.New(pool, cfg, handle)
	require.NoError(t, err)
	return r
}

// book is a handler with one effect.
func book(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
	_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1, $2, $3, $4)`, event.Sender, event.ID, event.Type, event.Body)
	return err
}

func effects(t *testing.T, pool *pgxpool.Pool, id string) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE event = $1`, id)
}

func storedKeys(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`)
}

// request is a delivery of Stripe's, signed at a time.
func request(t *testing.T, id string, at time.Time) *http.Request {
	t.Helper()
	body := bodyOf(id)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/webhooks", bytes.NewReader(body))
	r.Header = senders()["stripe"].sign(t, secret, id, at, body)
	return r
}

func deliver(handler http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	return w
}

// Property: an event of each scheme is handled once, its redelivery, signed anew, is answered alike
// without an effect, and senders never meet. Row H8 of guarantees.md.
func TestEachSchemeIsHandledOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, s := range senders() {
		var seen webhook.Event
		r := newReceiver(t, pool, webhook.Config{Sender: name, Scheme: s.scheme(secret)}, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
			seen = event
			return book(ctx, tx, event)
		})
		now := pgtest.Now(t)
		for _, at := range []time.Time{now, now.Add(time.Minute), now.Add(-time.Minute)} {
			delivery := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", bytes.NewReader(bodyOf("evt_1")))
			delivery.Header = s.sign(t, secret, "evt_1", at, bodyOf("evt_1"))
			require.Equal(t, http.StatusOK, deliver(r, delivery).Code, name)
		}
		require.Equal(t, []any{name, "evt_1", "invoice.paid", string(bodyOf("evt_1"))}, []any{seen.Sender, seen.ID, seen.Type, string(seen.Body)})
		require.NotEmpty(t, seen.Header.Get(s.signature))
		require.Equal(t, idempotency.Key{Scope: name, Operation: "webhook", Value: "evt_1"}.ChildID("a"), seen.ChildID("a"))
		if s.timed {
			require.Equal(t, now.Unix(), seen.Timestamp.Unix())
		}
		require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE sender = $1`, name))
	}
	require.Equal(t, len(senders()), storedKeys(t, pool))
	require.Equal(t, len(senders()), pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys
		WHERE operation = 'webhook' AND key = 'evt_1' AND expires_at - finished_at BETWEEN interval '6 days 23 hours' AND interval '7 days'`))
}

// Property: an error of the handler, whatever it wraps, is 503 with Retry-After, stores nothing,
// reveals nothing to the sender, and the next delivery is handled. Row H18 of guarantees.md.
func TestFailureIsDeliveredAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	failures := []error{errors.New("canary"), webhook.ErrSignature, idempotency.ErrMismatch, idempotency.ErrInProgress, context.Canceled, nil}
	var logged bytes.Buffer
	i := 0
	r := newReceiver(t, pool, webhook.Config{Idempotency: idempotency.Config{Logger: slog.New(slog.NewTextHandler(&logged, nil))}},
		func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
			return errors.Join(book(ctx, tx, event), failures[i])
		})
	for ; failures[i] != nil; i++ {
		w := deliver(r, request(t, "evt_1", pgtest.Now(t)))
		require.Equal(t, http.StatusServiceUnavailable, w.Code, failures[i])
		require.Equal(t, "10", w.Header().Get("Retry-After"))
		require.Equal(t, "Service Unavailable\n", w.Body.String())
		require.Contains(t, logged.String(), failures[i].Error())
		require.Zero(t, effects(t, pool, "evt_1")+storedKeys(t, pool))
	}
	require.NotContains(t, logged.String(), "amount", "bodies are not logged")
	require.Equal(t, http.StatusOK, deliver(r, request(t, "evt_1", pgtest.Now(t))).Code)
	require.Equal(t, 1, effects(t, pool, "evt_1"))
	require.Equal(t, http.StatusServiceUnavailable, deliver(newReceiver(t, pgtest.NoPool(t), webhook.Config{}, book), request(t, "evt_1", pgtest.Now(t))).Code)
}

// Property: a refusal rolls back what the handler wrote, is stored, and never retried.
func TestRefusalsStopTheSender(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for id, refusal := range map[string]error{
		"evt_1": webhook.Refuse(io.EOF), "evt_2": idempotency.Final(idempotency.Response{Status: 422, Body: []byte("not shown")}, io.EOF),
	} {
		calls := 0
		var logged bytes.Buffer
		r := newReceiver(t, pool, webhook.Config{Idempotency: idempotency.Config{Logger: slog.New(slog.NewTextHandler(&logged, nil))}},
			func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
				calls++
				return errors.Join(book(ctx, tx, event), fmt.Errorf("parse: %w", refusal))
			})
		for range 3 {
			w := deliver(r, request(t, id, pgtest.Now(t)))
			require.Equal(t, []any{200, "refused\n"}, []any{w.Code, w.Body.String()})
			require.Empty(t, w.Header().Get("Retry-After"))
		}
		require.Equal(t, 1, calls)
		require.Zero(t, effects(t, pool, id))
		require.Equal(t, 1, strings.Count(logged.String(), "sender=stripe id="+id+" type=invoice.paid status=200 error=\"parse: EOF\""), logged.String())
	}
}

// Property: name and ID decide: two receivers of one event have an effect each, an event that comes
// again with another body is not handled again, and where Config.ID makes the ID, two events of one
// happening have one effect. A sender that hangs up does not end the work. Row H19 of guarantees.md.
func TestNameAndIDDecide(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	hangsUp := func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
		hangUp()
		return book(ctx, tx, event)
	}
	happening := func(e webhook.Event) (string, error) { return idempotency.Domain(e.Type, "in_1"), nil }
	changed := bytes.ReplaceAll(bodyOf("evt_1"), []byte("100"), []byte("999"))
	for _, body := range [][]byte{bodyOf("evt_1"), changed, bodyOf("evt_2")} {
		for _, cfg := range []webhook.Config{{Name: "ledger"}, {Name: "mail"}, {Name: "happenings", ID: happening}} {
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/", bytes.NewReader(body))
			r.Header = senders()["stripe"].sign(t, secret, "", pgtest.Now(t), body)
			require.Equal(t, http.StatusOK, deliver(newReceiver(t, pool, cfg, hangsUp), r).Code)
		}
	}
	require.Equal(t, []int{2, 2}, []int{effects(t, pool, "evt_1"), effects(t, pool, "evt_2")}, "ledger and mail")
	require.Equal(t, 5, pgtest.Count(t, pool, `SELECT count(*) FROM effects`), "and one of the happening")
}

// Property: a delivery that was signed too long ago, or too far ahead, has no effect and stores
// nothing; the event itself can still be delivered. Any recording of an event that was handled gets
// its outcome. Row H16 of guarantees.md.
func TestToleranceInBothDirections(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	r := newReceiver(t, pool, webhook.Config{}, book)
	for _, c := range []struct {
		by   time.Duration
		want int
	}{
		{-time.Hour, 400},
		{-6 * time.Minute, 400},
		{-4 * time.Minute, 200},
		{4 * time.Minute, 200},
		{6 * time.Minute, 400}, // it gets younger while the test stalls
		{24 * 365 * time.Hour, 400},
	} {
		id := fmt.Sprint("evt_", c.by)
		require.Equal(t, c.want, deliver(r, request(t, id, pgtest.Now(t).Add(c.by))).Code, c.by)
		require.Equal(t, c.want == 200, effects(t, pool, id) == 1, c.by)
		require.Equal(t, http.StatusOK, deliver(r, request(t, id, pgtest.Now(t))).Code, c.by)
		require.Equal(t, http.StatusOK, deliver(r, request(t, id, time.Unix(1, 0))).Code, c.by)
		require.Equal(t, 1, effects(t, pool, id))
	}
}

// Property: forged, malformed and oversized deliveries are answered before a database connection is
// asked for. Rows H9, H10 of guarantees.md.
func TestStrangersTakeNoConnection(t *testing.T) {
	t.Parallel()
	r := newReceiver(t, pgtest.NoPool(t), webhook.Config{BodyBytesMax: 1000, ID: func(e webhook.Event) (string, error) {
		if strings.HasPrefix(e.ID, "bad") {
			return "", io.EOF
		}
		return e.ID, nil
	}}, book)
	with := func(change func(r *http.Request)) *http.Request {
		delivery := request(t, "evt_1", pgtest.Now(t))
		change(delivery)
		return delivery
	}
	for name, c := range map[string]struct {
		request *http.Request
		want    int
	}{
		"GET":            {with(func(r *http.Request) { r.Method = http.MethodGet }), 405},
		"no signature":   {with(func(r *http.Request) { r.Header = http.Header{} }), 400},
		"two signatures": {with(func(r *http.Request) { r.Header.Add("Stripe-Signature", "t=1") }), 400},
		"forged":         {with(func(r *http.Request) { r.Header.Set("Stripe-Signature", "t=1700000000,v1=ab") }), 401},
		"said too large": {with(func(r *http.Request) { r.ContentLength = 1001 }), 413},
		"too large":      {with(func(r *http.Request) { r.Body, r.ContentLength = io.NopCloser(endless{}), -1 }), 413},
		"slow":           {with(func(r *http.Request) { r.Body = io.NopCloser(slow{}) }), 408},
		"cut off":        {with(func(r *http.Request) { r.Body = io.NopCloser(failing{}) }), 400},
		"no ID":          {request(t, "", pgtest.Now(t)), 400},
		"long ID":        {request(t, strings.Repeat("a", 256), pgtest.Now(t)), 400},
		"control in ID":  {request(t, `a\u0000`, pgtest.Now(t)), 400},
		"refused ID":     {request(t, "bad", pgtest.Now(t)), 400},
		"well-formed":    {request(t, "evt_1", pgtest.Now(t)), 503},
	} {
		w := deliver(r, c.request)
		require.Equal(t, c.want, w.Code, name)
		require.Equal(t, c.want == 503, w.Header().Get("Retry-After") != "", name)
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

type slow struct{}

func (slow) Read([]byte) (int, error) { return 0, os.ErrDeadlineExceeded }

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// Property: a sender with too many concurrent deliveries gets an answer with the time of a retry. Row H29 of guarantees.md.
func TestTooManyDeliveriesAreAskedToWait(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err    error
		status int
		after  time.Duration
	}{
		{&idempotency.InProgressError{Crowded: true, RetryAfter: 1500 * time.Millisecond}, 429, 1500 * time.Millisecond},
		{&idempotency.InProgressError{RetryAfter: 3 * time.Second}, 409, 3 * time.Second},
		{idempotency.ErrIndeterminate, 503, 10 * time.Second},
		{io.EOF, 503, 10 * time.Second},
	} {
		status, after := webhook.AnswerTo(fmt.Errorf("once: %w", c.err))
		require.Equal(t, []any{c.status, c.after}, []any{status, after}, c.err)
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }
