package keyclient_test

import (
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
)

func nothing() *log.Logger { return log.New(io.Discard, "", 0) }

func textLogger(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

// network is a client's base in a bubble of synctest, where real connections would stop the clock.
type network func(attempt int) (*http.Response, error)

func (n network) transport(t *testing.T, attempts *[]time.Time, cfg keyclient.TransportConfig) *keyclient.Transport {
	t.Helper()
	transport, err := keyclient.NewTransport(roundTripper(func(*http.Request) (*http.Response, error) {
		*attempts = append(*attempts, time.Now())
		return n(len(*attempts))
	}), cfg)
	require.NoError(t, err)
	return transport
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func answerOf(status int, header http.Header) *http.Response {
	return &http.Response{StatusCode: status, Header: header, Body: http.NoBody}
}

func post(t *testing.T, transport *keyclient.Transport) (*http.Response, error) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://bank.example", http.NoBody)
	require.NoError(t, err)
	return transport.RoundTrip(request)
}

// Property: the pause before attempt n+1 is anything up to BackoffMin doubled n-1 times, at most
// BackoffMax: never more, and spread over the whole of it, so that clients that failed together do
// not come back together.
func TestPausesGrowAndAreSpread(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ceilings := []int{100, 200, 400, 800, 1000, 1000, 1000} // ms
		low, high := make([]bool, len(ceilings)), make([]bool, len(ceilings))
		for range 100 { // 2⁻¹⁰⁰ is the chance of a failure by chance
			var attempts []time.Time
			transport := network(func(int) (*http.Response, error) { return nil, errors.New("reset") }).
				transport(t, &attempts, keyclient.TransportConfig{Honours: []string{"*"}, AttemptsMax: len(ceilings) + 1, BackoffMin: 100 * time.Millisecond, BackoffMax: time.Second})
			_, err := post(t, transport) //nolint:bodyclose // there is none
			require.Error(t, err)
			require.Len(t, attempts, len(ceilings)+1)
			for i, ms := range ceilings {
				ceiling := time.Duration(ms) * time.Millisecond
				pause := attempts[i+1].Sub(attempts[i])
				require.LessOrEqual(t, pause, ceiling, "before attempt %d", i+2)
				low[i] = low[i] || pause < ceiling/2
				high[i] = high[i] || pause > ceiling/2
			}
		}
		assert.NotContains(t, low, false)
		assert.NotContains(t, high, false)
	})
}

// Property: the client waits for Retry-After in seconds; a date and an unreadable value are ignored.
func TestRetryAfterIsWaitedFor(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		header http.Header
		want   time.Duration
	}{
		"seconds":  {http.Header{"Retry-After": {"7"}}, 7 * time.Second},
		"date":     {http.Header{"Retry-After": {"Fri, 31 Dec 1999 00:00:00 GMT"}}, 0},
		"nonsense": {http.Header{"Retry-After": {"soon"}}, 0},
		"negative": {http.Header{"Retry-After": {"-5"}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var attempts []time.Time
				transport := network(func(attempt int) (*http.Response, error) {
					if attempt == 1 {
						return answerOf(http.StatusTooManyRequests, test.header), nil
					}
					return answerOf(http.StatusOK, http.Header{}), nil
				}).transport(t, &attempts, keyclient.TransportConfig{Honours: []string{"*"}})
				response, err := post(t, transport)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.Len(t, attempts, 2)
				pause := attempts[1].Sub(attempts[0])
				require.GreaterOrEqual(t, pause, test.want)
				require.LessOrEqual(t, pause, test.want+100*time.Millisecond)
			})
		})
	}
}

// Property: a caller whose context ends during a pause gets its error at once, with the key.
func TestPauseEndsWithTheContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		gone := errors.New("gone")
		ctx, cancel := context.WithCancelCause(keyclient.WithKey(t.Context(), "k"))
		var attempts []time.Time
		transport := network(func(int) (*http.Response, error) {
			time.AfterFunc(time.Second, func() { cancel(gone) })
			return answerOf(http.StatusServiceUnavailable, http.Header{"Retry-After": {"50"}}), nil
		}).transport(t, &attempts, keyclient.TransportConfig{Honours: []string{"*"}, BackoffMax: time.Minute})
		start := time.Now()
		_, _, err := do(ctx, t, &http.Client{Transport: transport}, http.MethodPost, "http://bank.example", "")
		var unanswered *keyclient.UnansweredError
		require.ErrorAs(t, err, &unanswered)
		require.ErrorIs(t, err, gone)
		require.Equal(t, "k", unanswered.Key)
		require.Equal(t, time.Second, time.Since(start))
	})
}
