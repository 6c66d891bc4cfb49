package main_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: an outcome that a person stored for a webhook's event in doubt is answered: status 0 as
// 200, and a body makes no refusal of it, unless it is that of one.
func TestOutcomeOfAPersonAnswersAWebhook(t *testing.T) {
	t.Parallel()
	const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	address := pgtest.Database(t)
	var answer webhook.Answer
	receiver, err := webhook.New(pool(t, address), webhook.Config{
		Sender: "github", Scheme: webhook.GitHub(secret), Hooks: webhook.Hooks{Answered: func(a webhook.Answer) { answer = a }},
	}, func(context.Context, pgx.Tx, webhook.Event) error { return idempotency.Indeterminate(io.EOF) })
	require.NoError(t, err)
	deliver := func(id string) *httptest.ResponseRecorder {
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(`{}`))
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/webhooks", strings.NewReader(`{}`))
		r.Header = http.Header{"X-Hub-Signature-256": {"sha256=" + hex.EncodeToString(mac.Sum(nil))}, "X-Github-Delivery": {id}, "X-Github-Event": {"invoice.paid"}}
		w := httptest.NewRecorder()
		receiver.ServeHTTP(w, r)
		return w
	}
	for id, c := range map[string]struct {
		status, body string
		want         int
		text         string
	}{
		"evt_0":   {"0", "", 200, "OK\n"},
		"evt_422": {"422", "", 422, "Unprocessable Entity\n"},
		"evt_no":  {"200", "refused", 200, "refused\n"},
	} {
		require.Equal(t, http.StatusServiceUnavailable, deliver(id).Code)
		args := []string{"keys", "finish", id, "--status", c.status, "--window", "24h", "--why", "looked"}
		if c.body != "" {
			args = append(args, "--body-file", file(t, c.body))
		}
		finished := runOn(t, address, args...)
		require.Zero(t, finished.code, finished.stderr)
		for range 2 {
			w := deliver(id)
			require.Equal(t, c.want, w.Code, id)
			require.Equal(t, c.text, w.Body.String(), id)
			require.Equal(t, []any{true, c.text == "refused\n"}, []any{answer.Replayed, answer.Refused}, id)
		}
	}
}
