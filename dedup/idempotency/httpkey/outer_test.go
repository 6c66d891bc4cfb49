package httpkey_test

import (
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// compressing announces what it will do before the handler runs, as compressing middlewares do.
func compressing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Encoding", "gzip")
		out := gzip.NewWriter(w)
		next.ServeHTTP(&compressed{w, out}, r)
		end(out)
	})
}

func end(out io.Closer) {
	if err := out.Close(); err != nil {
		panic(http.ErrAbortHandler)
	}
}

type compressed struct {
	http.ResponseWriter
	out io.Writer
}

func (w *compressed) Write(part []byte) (int, error) { return w.out.Write(part) }

// Property: what a layer outside sets before the handler runs is not stored: a compressed answer is
// replayed to a client that takes no gzip as it is, and to one that does with gzip again. What the
// handler set itself is.
func TestHeadersOfOuterLayersAreNotStored(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := serve(t, compressing(newMiddleware(t, pool, httpkey.Config{}).Handler(insert(http.StatusCreated))))
	for n, encoding := range []string{"gzip", "identity", "gzip"} {
		a := s.post(t, "k", "a", "Accept-Encoding", encoding)
		require.Equal(t, http.StatusCreated, a.status)
		require.Equal(t, n > 0, a.replayed())
		require.Equal(t, "text/plain", a.header.Get("Content-Type"))
		body := a.body
		if encoding == "gzip" {
			require.Equal(t, "gzip", a.header.Get("Content-Encoding"))
			in, err := gzip.NewReader(strings.NewReader(a.body))
			require.NoError(t, err)
			plain, err := io.ReadAll(in)
			require.NoError(t, err)
			body = string(plain)
		} else {
			assert.Empty(t, a.header.Get("Content-Encoding"))
		}
		require.Equal(t, "made a", body)
	}
	require.NotContains(t, stored(t, pool), "gzip")
	require.Contains(t, stored(t, pool), "text/plain")
}

// Property: a handler's trailers are neither announced nor sent, at the first answer as at a
// replay; those of a layer outside are.
func TestTrailersAreNotSent(t *testing.T) {
	t.Parallel()
	inner := newMiddleware(t, newPool(t), httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set(http.TrailerPrefix+"X-More", "canary")
		_, _ = io.WriteString(w, "body")
		w.Header().Set("X-Sum", "canary")
	}))
	plain := serve(t, inner)
	outside := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Outer")
		inner.ServeHTTP(w, r)
		w.Header().Set("X-Outer", "sum")
	}))
	for n, test := range []struct {
		s    *server
		want http.Header
	}{{plain, nil}, {plain, nil}, {outside, http.Header{"X-Outer": {"sum"}}}} {
		r, err := test.s.request(t.Context(), http.MethodPost, "/orders", "k", "")
		require.NoError(t, err)
		response, err := test.s.Client().Do(r)
		require.NoError(t, err)
		body, err := io.ReadAll(response.Body)
		require.NoError(t, errors.Join(err, response.Body.Close()))
		require.Equal(t, "body", string(body))
		require.Equal(t, n > 0, response.Header.Get("Idempotent-Replayed") == "true")
		require.Equal(t, test.want, response.Trailer)
	}
	r, err := outside.request(t.Context(), http.MethodPost, "/orders", "j", "")
	require.NoError(t, err)
	response, err := outside.Client().Do(r)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, response.Body)
	require.NoError(t, errors.Join(err, response.Body.Close()))
	require.Empty(t, response.Header.Get("Idempotent-Replayed"))
	require.Equal(t, http.Header{"X-Outer": {"sum"}}, response.Trailer)
}

// Property: informational responses of a handler do not reach the client, who gets one answer,
// after COMMIT.
func TestInformationalResponsesAreNotSent(t *testing.T) {
	t.Parallel()
	s := serve(t, newMiddleware(t, newPool(t), httpkey.Config{}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusProcessing)
		w.WriteHeader(http.StatusCreated)
	})))
	for _, replayed := range []bool{false, true} {
		var early []int
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(status int, _ textproto.MIMEHeader) error {
			early = append(early, status)
			return nil
		}})
		a, err := s.ask(ctx, http.MethodPost, "/orders", "k", "")
		require.NoError(t, err)
		require.Equal(t, http.StatusCreated, a.status)
		require.Equal(t, replayed, a.replayed())
		require.Equal(t, "</style.css>; rel=preload", a.header.Get("Link"))
		require.Empty(t, early)
	}
}
