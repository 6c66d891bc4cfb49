package metrics_test

import (
	"context"
	"fmt"
	"io"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/metrics"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// series are samples by name and labels, as they are written.
type series map[string]float64

// scrape reads what Prometheus would.
func scrape(t *testing.T, m *metrics.Metrics) (samples series, types map[string]string) {
	t.Helper()
	recorder := httptest.NewRecorder()
	m.Handler().ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	require.Equal(t, 200, recorder.Code, recorder.Body)
	text, err := io.ReadAll(recorder.Body)
	require.NoError(t, err)
	samples, types = series{}, map[string]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if rest, isType := strings.CutPrefix(line, "# TYPE "); isType {
			name, kind, _ := strings.Cut(rest, " ")
			types[name] = kind
		}
		if strings.HasPrefix(line, "#") {
			continue
		}
		i := strings.LastIndex(line, " ")
		value, err := strconv.ParseFloat(line[i+1:], 64)
		require.NoError(t, err, line)
		samples[line[:i]] = value
	}
	return samples, types
}

// await scrapes until a condition holds.
func await(t *testing.T, m *metrics.Metrics, what string, holds func(series) bool) series {
	t.Helper()
	return testwait.For(t, what, func() (series, bool) {
		s, _ := scrape(t, m)
		return s, holds(s)
	})
}

// watch reads the database until the test ends.
func watch(t *testing.T, m *metrics.Metrics, pool *pgxpool.Pool) {
	t.Helper()
	inBackground(t, func(ctx context.Context) { m.Watch(ctx, pool) })
}

// inBackground runs something until the test, or what it returns, ends it.
func inBackground(t *testing.T, work func(context.Context)) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		work(ctx)
	}()
	end = func() {
		cancel()
		testwait.Chan(t, "the end", done)
	}
	t.Cleanup(end)
	return end
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err, sql)
}

func of(name string, labels ...string) string {
	var pairs []string
	for i := 0; i < len(labels); i += 2 {
		pairs = append(pairs, fmt.Sprintf("%s=%q", labels[i], labels[i+1]))
	}
	return name + "{" + strings.Join(pairs, ",") + "}"
}
