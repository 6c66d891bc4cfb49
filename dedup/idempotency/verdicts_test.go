package idempotency_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
)

// verdictTable is the table of doc.go: for each row what is said in each column.
func verdictTable(t *testing.T) (columns []string, rows map[string][]string) {
	t.Helper()
	text, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(text), "//\t               Handler")
	require.True(t, found)
	table, _, _ = strings.Cut("Handler"+table, "\n//\n")
	rows = map[string][]string{}
	for i, line := range strings.Split(table, "\n") {
		cells := regexp.MustCompile(` {2,}`).Split(strings.TrimPrefix(line, "//\t"), -1)
		if i == 0 {
			columns = cells
			continue
		}
		require.Len(t, cells, 1+len(columns), line)
		rows[cells[0]] = cells[1:]
	}
	return columns, rows
}

// Property: the table in the package's documentation states the effect of each verdict on a key.
func TestVerdictsAreWhatIsDocumented(t *testing.T) {
	t.Parallel()
	because := errors.New("because")
	verdicts := map[string]error{
		"no error": nil, "other error": because, "NotDone": idempotency.NotDone(because), "Indeterminate": idempotency.Indeterminate(because),
		"Final": idempotency.Final(idempotency.Response{Status: 422}, because),
	}
	statuses := map[string]int{"Commit": 201, "Refuse": 422, "Forget": 503}
	columns, rows := verdictTable(t)
	require.Len(t, rows, len(verdicts)+len(statuses))
	for i, column := range columns {
		t.Run(column, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			for row, cells := range rows {
				verdict, known := verdicts[row]
				if cells[i] == "-" || !known && statuses[row] == 0 {
					continue
				}
				k := strings.ReplaceAll(row, " ", "-")
				give(t, pool, column, k, verdict, statuses[row])
				require.Equal(t, cells[i], becameOf(t, pool, k), row)
			}
		})
	}
}

// becameOf is what a key is, by its row and its effects.
func becameOf(t *testing.T, pool *pgxpool.Pool, k string) string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT state FROM effectonce.idempotency_keys WHERE key = $1`, k)
	require.NoError(t, err)
	states, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	n := effects(t, pool, k)
	if len(states) == 0 {
		require.Zero(t, n)
		return "free"
	}
	require.Len(t, states, 1)
	word := map[string]string{"finished": "refused", "running": "resumed", "indeterminate": "undecided"}[states[0]]
	if n == 1 && word == "refused" {
		return "stored"
	}
	require.Zero(t, n)
	return word
}

// give has the work of a column end with an error, or with a status.
func give(t *testing.T, pool *pgxpool.Pool, column, k string, verdict error, status int) {
	t.Helper()
	once := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201}, errors.Join(effect(ctx, tx, k), verdict)
	}
	phase := idempotency.Phase[payment]{Name: "work", AtMostOnce: column == "AtMostOnce" || column == "its Write" || column == "Reconcile"}
	phase.Write = func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[payment]) error {
		step.Finish(idempotency.Response{Status: 201})
		if err := effect(ctx, tx, k); err != nil || !strings.HasSuffix(column, "Write") {
			return err
		}
		return verdict
	}
	var cfg idempotency.FlowConfig[payment]
	switch column {
	case "Handler":
		m, err := httpkey.New(pool, func(*http.Request) (string, error) { return "tenant", nil }, httpkey.Config{Operation: idempotency.Config{Operation: "order"}})
		require.NoError(t, err)
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", http.NoBody)
		request.Header.Set("Idempotency-Key", k)
		m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			assert.NoError(t, effect(r.Context(), httpkey.Tx(r), k))
			if verdict != nil {
				httpkey.Fail(r, verdict)
			}
			w.WriteHeader(max(status, 201))
		})).ServeHTTP(httptest.NewRecorder(), request)
		return
	case "Once":
		_, _ = newOperation(t, pool, idempotency.Config{}).Once(t.Context(), key(k), once)
		return
	case "webhook":
		scheme := webhook.SchemeOf(func(http.Header, []byte) (webhook.Event, error) { return webhook.Event{ID: k}, nil })
		receiver, err := webhook.New(pool, webhook.Config{Sender: "sender", Scheme: scheme}, func(ctx context.Context, tx pgx.Tx, _ webhook.Event) error {
			_, err := once(ctx, tx)
			return err
		})
		require.NoError(t, err)
		receiver.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", http.NoBody))
		return
	case "Call", "AtMostOnce":
		phase.Call = func(context.Context, *idempotency.Step[payment]) error { return verdict }
	case "its Write":
		phase.Call = func(context.Context, *idempotency.Step[payment]) error { return nil }
	case "Reconcile":
		phase.Call = func(context.Context, *idempotency.Step[payment]) error { return errAway }
		cfg.Reconcile = func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
			return idempotency.Unknown(), verdict
		}
	}
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{}), cfg, []idempotency.Phase[payment]{phase})
	_, _ = flow.Do(t.Context(), key(k), nil)
	if cfg.Reconcile != nil {
		passes(t, pool, time.Minute)
		decided, err := flow.Reconcile(t.Context())
		require.ErrorIs(t, err, verdict)
		require.Zero(t, decided)
	}
}

// Property: Advise reports weaknesses of a value alone; it reports none for random values and
// names.
func TestAdviceOnOneValue(t *testing.T) {
	t.Parallel()
	type weak = []idempotency.Weakness
	for value, want := range map[string]weak{
		"a1b2":                                  {idempotency.WeakShort},
		"4127":                                  {idempotency.WeakShort, idempotency.WeakNumber},
		"00004127":                              {idempotency.WeakNumber},
		"1732199163":                            {idempotency.WeakTime},
		"1732199163123":                         {idempotency.WeakTime},
		"1732199163123456789":                   {idempotency.WeakTime},
		"2026-11-21T14:26:03Z":                  {idempotency.WeakTime},
		"2026-11-21T14:26:03.123456+02:00":      {idempotency.WeakTime},
		"20261121142603":                        {idempotency.WeakTime},
		"00000000-0000-0000-0000-000000000000":  {idempotency.WeakConstant},
		"aaaaaaaaaaaa":                          {idempotency.WeakConstant},
		idempotency.NewKey():                    nil,
		uuid.NewString():                        nil,
		"stripe-node-retry-" + uuid.NewString(): nil,
		"KG5LxwFBepaKHyUD":                      nil, // Stripe's example
		"01ARZ3NDEKTSV4RRFFQ69G5FAV":            nil, // a ULID
		"295617483920475610293847561029384756":  nil, // 119 bits, drawn
		idempotency.Domain("charge", "order", "4127"): nil,
		idempotency.Domain("pay", "7"):                nil,
	} {
		require.ElementsMatch(t, want, idempotency.Advise(value), value)
	}
}
