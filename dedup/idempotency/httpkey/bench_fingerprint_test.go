package httpkey_test

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
)

// BenchmarkFingerprint compares the fingerprint of a body of 1 MiB whose objects lie in each other,
// as deep as allowed and in the order that costs most, with one of the same size whose objects are
// flat.
func BenchmarkFingerprint(b *testing.B) {
	r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, "/", nil)
	require.NoError(b, err)
	r.Header.Set("Content-Type", "application/json")
	fill := func(part func(i int) string) []byte {
		var text strings.Builder
		for i := 0; text.Len() < 1<<20-4096; i++ {
			text.WriteString(part(i))
		}
		return []byte("[" + strings.TrimSuffix(text.String(), ",") + "]")
	}
	flat := fill(func(i int) string { return `{"z":` + strconv.Itoa(i) + `,"name":"x"},` })
	hooks := map[string]func(*http.Request, []byte) ([]byte, error){"Canonical": httpkey.Canonical, "Without": httpkey.Without("/z/z/z/y", "/0/z")}
	for _, depth := range []int{63, 999} {
		chain := strings.Repeat(`{"z":`, depth-1) + `{"z":"` + strings.Repeat("x", (1<<20)/2) + `","y":1}` + strings.Repeat(`,"y":1}`, depth-1)
		wide := strings.Repeat(`{"z":`, depth-1) + string(flat) + strings.Repeat(`,"y":1}`, depth-1)
		for name, hook := range hooks {
			for kind, nested := range map[string][]byte{
				"many": fill(func(int) string { return strings.Repeat(`{"z":`, depth) + "1" + strings.Repeat(`,"y":1}`, depth) + "," }), "chain": []byte(chain), "wide": []byte(wide),
			} {
				b.Run(name+"/"+kind+"/"+strconv.Itoa(depth), func(b *testing.B) {
					cost := func(body []byte) time.Duration {
						begun := time.Now()
						_, err := hook(r, body)
						require.NoError(b, err)
						return time.Since(begun)
					}
					var a, n time.Duration
					for b.Loop() {
						a += cost(flat)
						n += cost(nested)
					}
					b.ReportMetric(float64(n)/float64(a), "times-flat")
				})
			}
		}
	}
}
