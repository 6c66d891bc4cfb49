package main

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) {
	if os.Getenv(envDatabase) != "" {
		main() // the API's process
		return
	}
	pgtest.Main(m)
}

// Property: wherever the API is killed, the client's request under the same key ends with one charge, one order and one
// receipt. Rows H1, H4, H5.
func TestEachDeathLeavesOneCharge(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, os.Getenv("DATABASE_URL")), out.String())
	t.Log("\n" + out.String())
	rows := regexp.MustCompile(`(?m)  (\d)  +(\d+)  +201  +(\d)  +1  +1  +1$`).FindAllStringSubmatch(out.String(), -1)
	require.Len(t, rows, 7, out.String())
	for i, row := range rows {
		require.Equal(t, i > 0, row[1] == "1", "every API but the first is killed once: %s", out.String())
	}
	require.Equal(t, "2", rows[4][3], "the one that was killed after the charge asked again: %s", out.String())
}

// Property: a decline is an answer: it is booked, and replayed to who asks again; another order under the same key is
// refused. Row H6.
func TestDeclineIsReplayed(t *testing.T) {
	t.Parallel()
	s, err := openSite(t.Context(), os.Getenv("DATABASE_URL"))
	require.NoError(t, err)
	defer s.close(t.Context())
	key, rich := idempotency.NewKey(), request{Customer: s.customerOf("poor"), Cents: creditMax + 1}
	first, err := s.ask(t.Context(), "", key, rich)
	require.NoError(t, err)
	require.Equal(t, 402, first.status)
	again, err := s.ask(t.Context(), "", key, rich)
	require.NoError(t, err)
	require.True(t, again.replayed)
	require.Equal(t, first.body, again.body)
	asked, charged := s.provider.count(rich.Customer)
	require.Equal(t, []int{1, 0}, []int{asked, charged})
	rich.Cents--
	other, err := s.ask(t.Context(), "", key, rich)
	require.NoError(t, err)
	require.Equal(t, 422, other.status)
}

// Property: an outcome without a status, as a person may have stored it, is answered with 200.
func TestOutcomeWithoutAStatusIsAnswered(t *testing.T) {
	t.Parallel()
	s, err := openSite(t.Context(), os.Getenv("DATABASE_URL"))
	require.NoError(t, err)
	defer s.close(t.Context())
	key, r := idempotency.NewKey(), request{Customer: s.customerOf("finished"), Cents: 100}
	_, err = s.ask(t.Context(), "", key, r)
	require.NoError(t, err)
	changed, err := s.pool.Exec(t.Context(), `UPDATE effectonce_payments.idempotency_keys SET status = 0, body = NULL WHERE key = $1`, key)
	require.NoError(t, err)
	require.EqualValues(t, 1, changed.RowsAffected())
	again, err := s.ask(t.Context(), "", key, r)
	require.NoError(t, err)
	require.Equal(t, 200, again.status)
	require.True(t, again.replayed)
}

// Property: a key is the same with and without quotes; without one, or with two, nothing is done.
func TestKeysAreReadAsEverywhere(t *testing.T) {
	t.Parallel()
	s, err := openSite(t.Context(), os.Getenv("DATABASE_URL"))
	require.NoError(t, err)
	defer s.close(t.Context())
	key, r := idempotency.NewKey(), request{Customer: s.customerOf("quoted"), Cents: 100}
	first, err := s.ask(t.Context(), "", key, r)
	require.NoError(t, err)
	require.Equal(t, 201, first.status)
	again, err := s.ask(t.Context(), "", `"`+key+`"`, r)
	require.NoError(t, err)
	require.True(t, again.replayed)
	require.Equal(t, first.body, again.body)

	for _, keys := range [][]string{nil, {"a", "b"}, {"a b"}} {
		w := httptest.NewRecorder()
		ask := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", strings.NewReader("{}"))
		ask.Header["Idempotency-Key"] = keys
		(&api{}).ServeHTTP(w, ask) // it has no flow
		require.Equal(t, http.StatusBadRequest, w.Code)
	}
}

// Property: a client is told to come again only where that helps: an order that a person has to look into is 409 without
// Retry-After.
func TestWhatAPersonDecidesIsNotAskedAgain(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		err        error
		status     int
		retryAfter string
	}{
		{idempotency.ErrAbandoned, 409, ""},
		{fmt.Errorf("charge: %w", idempotency.ErrIndeterminate), 409, ""},
		{&idempotency.InProgressError{RetryAfter: 2 * time.Second}, 409, "2"},
		{idempotency.ErrMismatch, 422, ""},
		{errors.New("the provider is away"), 503, ""},
	} {
		w := httptest.NewRecorder()
		refuse(w, test.err)
		require.Equal(t, test.status, w.Code, test.err)
		require.Equal(t, test.retryAfter, w.Header().Get("Retry-After"), test.err)
	}
}
