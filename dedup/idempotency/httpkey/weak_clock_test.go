package httpkey_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// keyed returns what sends a key to a middleware that looks at it, and asks no database after that.
func keyed(tb testing.TB, log *bytes.Buffer, cfg httpkey.Config) func(key string) {
	tb.Helper()
	cfg.Operation = idempotency.Config{Operation: "api", Logger: textLogger(log)}
	cfg.Fingerprint = func(*http.Request, []byte) ([]byte, error) { return nil, errors.New("odd") }
	m, err := httpkey.New(pgtest.NoPool(tb), tenantOf, cfg)
	require.NoError(tb, err)
	handler := m.Handler(insert(201))
	request := httptest.NewRequestWithContext(tb.Context(), http.MethodPost, "/orders", http.NoBody)
	return func(key string) {
		w := httptest.NewRecorder()
		request.Header["Idempotency-Key"] = []string{key}
		handler.ServeHTTP(w, request)
		require.Equal(tb, http.StatusBadRequest, w.Code)
	}
}

// Property: weak keys are warned of whatever way they are weak, without a key, once an hour for all ways; good ones and tries
// of one request are not, nor anything where the caller does not want to hear of it.
func TestWeakKeysAreWarnedOf(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		key  func(i int) string
		cfg  httpkey.Config
		want string // weaknesses of which one is named; empty: no warning
	}{
		"sequential":         {func(i int) string { return strconv.Itoa(987_654_000 + i) }, httpkey.Config{}, "number"},
		"short and counting": {func(i int) string { return strconv.Itoa(98_700 + i) }, httpkey.Config{}, "short"},
		"alike":              {func(i int) string { return fmt.Sprintf("%016x", 0x1a2b3c4d987654+i) }, httpkey.Config{}, "all alike"},
		"UUIDv4":             {func(int) string { return uuid.NewString() }, httpkey.Config{}, ""},
		"UUIDv7":             {func(int) string { return idempotency.NewKey() }, httpkey.Config{}, ""},
		"one request":        {func(int) string { return "9876" }, httpkey.Config{}, ""},
		"ignored":            {func(i int) string { return strconv.Itoa(987_654_000 + i) }, httpkey.Config{IgnoreWeakKeys: true}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				send := keyed(t, &log, test.cfg)
				n := 0
				sends := func(times int) int {
					for range times {
						send(test.key(n))
						n++
					}
					return strings.Count(log.String(), "level=WARN")
				}
				if test.want == "" {
					require.Zero(t, sends(300), log.String())
					return
				}
				require.Equal(t, 1, sends(200), log.String())
				require.Contains(t, log.String(), test.want)
				require.Contains(t, log.String(), "operation=api")
				time.Sleep(59 * time.Minute)
				require.Equal(t, 1, sends(200))
				time.Sleep(time.Minute)
				require.Equal(t, 2, sends(200))
				require.NotContains(t, log.String(), "987")
			})
		})
	}
}

// Property: however many keys come, what is held of them does not grow: 64 of at most 255 bytes.
func TestWeakKeysTakeNoMemory(t *testing.T) { //nolint:paralleltest // others' memory would count
	var log bytes.Buffer
	send := keyed(t, &log, httpkey.Config{})
	held := func(keys int) int64 {
		for range keys {
			send(uuid.NewString() + strings.Repeat("k", 219))
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		runtime.KeepAlive(send)
		return int64(m.HeapAlloc)
	}
	before := held(200)
	require.Less(t, held(20_000)-before, int64(1<<20))
}

// BenchmarkWeakKeys is what looking at a key adds to a request that is answered before any SQL.
func BenchmarkWeakKeys(b *testing.B) {
	for name, ignore := range map[string]bool{"looked at": false, "ignored": true} {
		b.Run(name, func(b *testing.B) {
			var log bytes.Buffer
			send := keyed(b, &log, httpkey.Config{IgnoreWeakKeys: ignore})
			for b.Loop() {
				send(idempotency.NewKey())
			}
		})
	}
}
