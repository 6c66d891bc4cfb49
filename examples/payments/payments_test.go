package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	if os.Getenv(envDatabase) != "" {
		main() // the API's process
		return
	}
	pgtest.Main(m)
}

// Property: wherever the API is killed, the client's request under the same key ends with one
// charge, one transfer, one order and one receipt. Rows H1, H4, H5 of guarantees.md.
func TestEachDeathLeavesOneCharge(t *testing.T) {
	longtest.Only(t, "nine processes")
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, os.Getenv("DATABASE_URL")), out.String())
	t.Log("\n" + out.String())
	rows := regexp.MustCompile(`(?m)  (\d)  +(\d+)  +201  +(\d)  +1  +1  +1  +1$`).FindAllStringSubmatch(out.String(), -1)
	require.Len(t, rows, 9, out.String())
	for i, row := range rows {
		require.Equal(t, i > 0, row[1] == "1", "every API but the first is killed once: %s", out.String())
	}
	require.Equal(t, "2", rows[4][3], "the one that was killed after the charge asked again: %s", out.String())
}

// Property: a bank that pays and hangs up is not called again, although it has no keys: its records
// decide, and the order is paid. Row H26 of guarantees.md.
func TestBankThatHangsUpPaysOnce(t *testing.T) {
	t.Parallel()
	s, err := openSite(t.Context(), os.Getenv("DATABASE_URL"))
	require.NoError(t, err)
	defer s.close(t.Context())
	r := request{Customer: s.customerOf(hangUp), Cents: 100}
	o, err := s.ask(t.Context(), "", idempotency.NewKey(), r)
	require.NoError(t, err)
	require.Equal(t, 201, o.status)
	require.Greater(t, o.requests, 1, "the first response is that it is in doubt")
	require.Equal(t, 1, s.bank.count(r.Customer))
}

// Property: the bank's records decide only if the bank returns them: after another response,
// whatever its body, an order stays undecided.
func TestBankWithoutRecordsDecidesNothing(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]idempotency.Decision{200: idempotency.DidNotHappen(), 404: idempotency.Unknown(), 503: idempotency.Unknown()} {
		bank := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "[]")
		}))
		defer bank.Close()
		key := idempotency.Key{Scope: "shop", Operation: "create-order", Value: "k"}
		decision, err := newBankClient(bank.URL).reconcile(t.Context(), idempotency.UndecidedKey[payment]{Key: key, Phase: "transfer"})
		require.Equal(t, want, decision, status)
		require.Equal(t, status != 200, err != nil, err)
	}
}

// Property: a client that retries after its key is forgotten gets the response that the order was
// made (410); nothing is charged or paid again.
func TestOrderAfterTheWindow(t *testing.T) {
	t.Parallel()
	s, err := openSite(t.Context(), os.Getenv("DATABASE_URL"))
	require.NoError(t, err)
	defer s.close(t.Context())
	key, r := idempotency.NewKey(), request{Customer: s.customerOf("late"), Cents: 100}
	for _, status := range []int{201, 410, 410} {
		o, err := s.ask(t.Context(), "", key, r)
		require.NoError(t, err)
		require.Equal(t, status, o.status, o.body)
		require.Equal(t, 1, s.bank.count(r.Customer))
		asked, _ := s.provider.count(r.Customer)
		require.Equal(t, 1, asked)
		if status == 201 {
			_, err = s.Pool.Exec(t.Context(), `DELETE FROM effectonce_payments.idempotency_keys WHERE key = $1`, key)
			require.NoError(t, err)
		}
	}
}
