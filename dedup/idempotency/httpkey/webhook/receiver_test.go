package webhook_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
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
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// newPool is a database with a table for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, `CREATE TABLE effects (sender text, event text, type text, body bytea)`)
}

func newReceiver(t *testing.T, pool *pgxpool.Pool, cfg webhook.Config, handle webhook.Handler) *webhook.Receiver {
	t.Helper()
	if cfg.Sender == "" {
		cfg.Sender = "stripe"
	}
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
		now := dbNow(t)
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

// Property: fifty deliveries of one event at once have one effect; each gets 200, or 409 with the
// time to try again, and 200 then. Row H7 of guarantees.md.
func TestRedeliveredFiftyTimesAtOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var answered, replayed atomic.Int64
	server := httptest.NewServer(newReceiver(t, pool, webhook.Config{Hooks: webhook.Hooks{Answered: func(a webhook.Answer) {
		answered.Add(1)
		if a.Replayed {
			replayed.Add(1)
		}
	}}}, book))
	defer server.Close()
	for round := range 20 {
		id := fmt.Sprintf("evt_%d", round)
		var group sync.WaitGroup
		for range 50 {
			group.Go(func() {
				for {
					status, after, err := send(t.Context(), server, request(t, id, dbNow(t)))
					if !assert.NoError(t, err) { //nolint:testifylint // not the test's goroutine
						return
					}
					if status != http.StatusConflict {
						assert.Equal(t, http.StatusOK, status)
						return
					}
					assert.NotEmpty(t, after)
				}
			})
		}
		group.Wait()
		require.Equal(t, 1, effects(t, pool, id))
	}
	require.GreaterOrEqual(t, answered.Load(), int64(1000))
	require.Equal(t, int64(980), replayed.Load())
}

// send delivers over the network.
func send(ctx context.Context, server *httptest.Server, delivery *http.Request) (status int, retryAfter string, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, delivery.Body)
	if err != nil {
		return 0, "", err
	}
	r.Header, r.ContentLength = delivery.Header, delivery.ContentLength
	response, err := server.Client().Do(r)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	_, err = io.Copy(io.Discard, response.Body)
	return response.StatusCode, response.Header.Get("Retry-After"), err
}

// Property: an error of the handler, whatever it wraps, is 503 with Retry-After, stores nothing,
// reveals nothing to the sender, and the next delivery is handled. Row H18 of guarantees.md.
func TestFailureIsDeliveredAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	failures := []error{errors.New("canary"), webhook.ErrSignature, idempotency.ErrMismatch, idempotency.ErrInProgress, context.Canceled, nil}
	var logged bytes.Buffer
	i := 0
	r := newReceiver(t, pool, webhook.Config{RetryAfter: 1500 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&logged, nil))},
		func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
			return errors.Join(book(ctx, tx, event), failures[i])
		})
	for ; failures[i] != nil; i++ {
		w := deliver(r, request(t, "evt_1", dbNow(t)))
		require.Equal(t, http.StatusServiceUnavailable, w.Code, failures[i])
		require.NotEmpty(t, w.Header().Get("Retry-After"))
		require.Equal(t, "Service Unavailable\n", w.Body.String())
		require.Contains(t, logged.String(), failures[i].Error())
		require.Zero(t, effects(t, pool, "evt_1")+storedKeys(t, pool))
	}
	require.NotContains(t, logged.String(), "amount", "bodies are not logged")
	require.Equal(t, http.StatusOK, deliver(r, request(t, "evt_1", dbNow(t))).Code)
	require.Equal(t, 1, effects(t, pool, "evt_1"))
	require.Equal(t, http.StatusServiceUnavailable, deliver(newReceiver(t, pgtest.NoPool(t), webhook.Config{}, book), request(t, "evt_1", dbNow(t))).Code)
}

// Property: a refusal rolls back what the handler wrote, is stored with the configured status, and
// never retried; with AttemptsMax also an event that failed that often. Recordings that are out of
// tolerance use up no attempt.
func TestRefusalsStopTheSender(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for _, status := range []int{200, 204, 422} {
		id := fmt.Sprint("evt_", status)
		calls := 0
		var answers []webhook.Answer
		r := newReceiver(t, pool, webhook.Config{RefusedStatus: status, Hooks: webhook.Hooks{Answered: func(a webhook.Answer) { answers = append(answers, a) }}},
			func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
				calls++
				return errors.Join(book(ctx, tx, event), fmt.Errorf("parse: %w", webhook.Refuse(io.EOF)))
			})
		for range 3 {
			w := deliver(r, request(t, id, dbNow(t)))
			require.Equal(t, status, w.Code)
			require.Empty(t, w.Header().Get("Retry-After"))
		}
		require.Equal(t, 1, calls)
		require.Zero(t, effects(t, pool, id))
		require.ErrorIs(t, answers[0].Err, io.EOF)
		for i, a := range answers {
			require.Equal(t, []any{true, i > 0, id, "invoice.paid", "stripe"}, []any{a.Refused, a.Replayed, a.ID, a.Type, a.Sender})
		}
	}
	r := newReceiver(t, pool, webhook.Config{Idempotency: idempotency.Config{AttemptsMax: 3}}, func(context.Context, pgx.Tx, webhook.Event) error { return io.EOF })
	for range 5 {
		require.Equal(t, http.StatusBadRequest, deliver(r, request(t, "evt_9", dbNow(t).Add(-time.Hour))).Code)
	}
	for _, want := range []int{503, 503, 200, 200} {
		require.Equal(t, want, deliver(r, request(t, "evt_9", dbNow(t))).Code)
	}
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
		require.Equal(t, c.want, deliver(r, request(t, id, dbNow(t).Add(c.by))).Code, c.by)
		require.Equal(t, c.want == 200, effects(t, pool, id) == 1, c.by)
		require.Equal(t, http.StatusOK, deliver(r, request(t, id, dbNow(t))).Code, c.by)
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
		delivery := request(t, "evt_1", dbNow(t))
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
		"cut off":        {with(func(r *http.Request) { r.Body = io.NopCloser(failing{}) }), 400},
		"no ID":          {request(t, "", dbNow(t)), 400},
		"long ID":        {request(t, strings.Repeat("a", 256), dbNow(t)), 400},
		"control in ID":  {request(t, `a\u0000`, dbNow(t)), 400},
		"refused ID":     {request(t, "bad", dbNow(t)), 400},
		"well-formed":    {request(t, "evt_1", dbNow(t)), 503},
	} {
		w := deliver(r, c.request)
		require.Equal(t, c.want, w.Code, name)
		require.Equal(t, c.want == 503, w.Header().Get("Retry-After") != "", name)
		require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// Property: a sender of a slow body is cut off, over the network, and holds no database connection:
// there is none. Row H10 of guarantees.md.
func TestSlowBodyIsCutOff(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(newReceiver(t, pgtest.NoPool(t), webhook.Config{ReadMax: 50 * time.Millisecond}, book))
	defer server.Close()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: a\r\nStripe-Signature: t=1,v1=a\r\nContent-Length: 100\r\n\r\n{")
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
	answer, err := io.ReadAll(conn) // to its end: the server closes the connection
	require.NoError(t, err)
	require.Contains(t, string(answer), "HTTP/1.1 408 ")
}

// Property: the deadline of the body is not one of the handler, nor of the connection: a handler
// that takes longer is not taken for a sender that hung up, and the next delivery on the connection
// is served. Without a body net/http reads on from the connection at once, and would never take the
// deadline back by itself. Row H10 of guarantees.md.
func TestDeadlineEndsWithTheBody(t *testing.T) {
	t.Parallel()
	for name, body := range map[string][]byte{"body": bodyOf("evt_1"), "no body": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			const readMax = time.Second
			cfg := webhook.Config{Scheme: webhook.GitHub(secret), ReadMax: readMax}
			r := newReceiver(t, pool, cfg, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
				_, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, 2*readMax.Seconds())
				return errors.Join(err, book(ctx, tx, event))
			})
			var ended atomic.Int64
			var connections sync.Map
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
				connections.Store(request.RemoteAddr, true)
				r.ServeHTTP(w, request)
				if request.Context().Err() != nil { // outer layers would take it for a sender that disconnected
					ended.Add(1)
				}
			}))
			defer server.Close()
			for _, id := range []string{"evt_1", "evt_2"} {
				delivery := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", bytes.NewReader(body))
				delivery.Header = senders()["github"].sign(t, secret, id, dbNow(t), body)
				if body == nil {
					delivery.Body = http.NoBody // an empty one goes in chunks
				}
				status, _, err := send(t.Context(), server, delivery)
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, status)
				require.Equal(t, 1, effects(t, pool, id))
			}
			require.Zero(t, ended.Load())
			n := 0
			connections.Range(func(any, any) bool { n++; return true })
			require.Equal(t, 1, n)
		})
	}
}

// Property: a sender with too many concurrent deliveries, or too many IDs, gets an answer with the
// time of a retry. Row H29 of guarantees.md.
func TestTooManyDeliveriesAreAskedToWait(t *testing.T) {
	t.Parallel()
	r := newReceiver(t, pgtest.NoPool(t), webhook.Config{RetryAfter: 7 * time.Second}, book)
	for _, c := range []struct {
		err                error
		status, afterwards int
	}{
		{&idempotency.CrowdedError{RetryAfter: 1500 * time.Millisecond}, 429, 2},
		{&idempotency.QuotaError{Max: 1, RetryAfter: time.Minute}, 429, 60},
		{&idempotency.QuotaError{Max: 1}, 429, 7},
		{&idempotency.InProgressError{RetryAfter: 3 * time.Second}, 409, 3},
		{io.EOF, 503, 7},
	} {
		status, afterwards := r.Answer(fmt.Errorf("once: %w", c.err))
		require.Equal(t, c.status, status)
		require.Equal(t, c.afterwards, afterwards)
	}
}

// Property: where a body is compared, an ID that comes with another one is refused; where not, the
// ID decides. Row H6 of guarantees.md.
func TestChangedBody(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	changed := func() *http.Request {
		body := bytes.ReplaceAll(bodyOf("evt_1"), []byte("100"), []byte("999"))
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", bytes.NewReader(body))
		r.Header = senders()["stripe"].sign(t, secret, "evt_1", dbNow(t), body)
		return r
	}
	for compare, want := range map[bool]int{false: 200, true: 422} {
		r := newReceiver(t, pool, webhook.Config{Sender: fmt.Sprint(compare), CompareBody: compare}, book)
		require.Equal(t, http.StatusOK, deliver(r, request(t, "evt_1", dbNow(t))).Code)
		require.Equal(t, want, deliver(r, changed()).Code)
		require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effects WHERE sender = $1`, fmt.Sprint(compare)))
	}
}

// Property: where Config.ID makes the ID, two events of one happening have one effect.
func TestOwnIDs(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	r := newReceiver(t, pool, webhook.Config{ID: func(e webhook.Event) (string, error) { return idempotency.Domain(e.Type, "in_1"), nil }}, book)
	for _, id := range []string{"evt_1", "evt_2"} {
		require.Equal(t, http.StatusOK, deliver(r, request(t, id, dbNow(t))).Code)
	}
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effects`))
}

// Property: the connection is killed at each point of the transaction: the sender gets 503 and
// delivers again, or got a correct answer; one effect. Rows H1, H4 of guarantees.md.
func TestKilledAtEachPoint(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	killer := pgtest.Connect(t, pool.Config().ConnString())
	for _, point := range []string{crashpoint.KeyClaimed, crashpoint.KeyWorked, crashpoint.KeyCommitting, crashpoint.KeyCommitted} {
		id := "evt_" + point
		var backend atomic.Uint32
		killed := false
		r := newReceiver(t, pool, webhook.Config{}, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
			backend.Store(tx.Conn().PgConn().PID())
			return book(ctx, tx, event)
		})
		kill := crashpoint.With(t.Context(), func(at string) {
			if at == point && !killed {
				killed = true
				pid := backend.Load()
				if pid == 0 { // before the handler: no other transaction has the claim
					require.NoError(t, killer.QueryRow(t.Context(), `SELECT pid FROM pg_stat_activity
						WHERE datname = current_database() AND state = 'idle in transaction' AND pid <> pg_backend_pid()`).Scan(&pid))
				}
				var dead bool
				require.NoError(t, killer.QueryRow(t.Context(), `SELECT pg_terminate_backend($1, 10000)`, pid).Scan(&dead))
			}
		})
		want := http.StatusServiceUnavailable
		if point == crashpoint.KeyCommitted {
			want = http.StatusOK
		}
		require.Equal(t, want, deliver(r, request(t, id, dbNow(t)).WithContext(kill)).Code, point)
		require.True(t, killed)
		// The sender tries again. The pool may hand out the dead connection once more.
		code := 0
		for tries := 0; tries < 3 && code != http.StatusOK; tries++ {
			code = deliver(r, request(t, id, dbNow(t))).Code
		}
		require.Equal(t, http.StatusOK, code, point)
		require.Equal(t, 1, effects(t, pool, id), point)
	}
}

// Property: a sender that hangs up does not end the work: its next delivery finds the outcome. Row
// H19 of guarantees.md.
func TestSenderHangsUp(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	calls := 0
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	r := newReceiver(t, pool, webhook.Config{}, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
		calls++
		hangUp()
		return book(ctx, tx, event)
	})
	for range 2 {
		require.Equal(t, http.StatusOK, deliver(r, request(t, "evt_1", dbNow(t)).WithContext(ctx)).Code)
	}
	require.Equal(t, 1, calls)
	require.Equal(t, 1, effects(t, pool, "evt_1"))
}

// Property: a handler that is too slow is ended after HandleMax, and its event delivered again.
func TestHandlerIsEnded(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	slow := true
	r := newReceiver(t, pool, webhook.Config{HandleMax: 200 * time.Millisecond, Idempotency: idempotency.Config{WaitMax: time.Millisecond}}, func(ctx context.Context, tx pgx.Tx, event webhook.Event) error {
		if slow {
			slow = false
			<-ctx.Done()
		}
		return book(ctx, tx, event)
	})
	require.Equal(t, http.StatusServiceUnavailable, deliver(r, request(t, "evt_1", dbNow(t))).Code)
	require.Eventually(t, func() bool { return deliver(r, request(t, "evt_1", dbNow(t))).Code == http.StatusOK }, 2*time.Minute, time.Millisecond)
	require.Equal(t, 1, effects(t, pool, "evt_1"))
}

// dbNow is the time by the database's clock, which is the one that reports whether a delivery is
// too old.
func dbNow(t *testing.T) time.Time {
	t.Helper()
	offset, err := pgtest.ClockOffset()
	require.NoError(t, err)
	return time.Now().Add(offset)
}
