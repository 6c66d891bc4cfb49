package keyclient

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/effectonce/effectonce/internal/bounds"
)

// TransportConfig of a Transport. The zero value works.
type TransportConfig struct {
	// Header that carries the key. Default "Idempotency-Key".
	Header string
	// Honours are the servers that honour keys, as in the addresses of requests: "bank.example" (at
	// any port), "bank.example:8443", or "*" for all. Requests to them are retried even if the
	// server may have acted; a server that ignores keys would act again. Default: none.
	Honours []string
	// AttemptsMax is the maximum number of attempts of a request. 1 to 100; default 6.
	AttemptsMax int
	// BackoffMin and BackoffMax bound the pauses: the pause before attempt n+1 is random, up to
	// BackoffMin·2ⁿ⁻¹, at most BackoffMax (full jitter). A server whose Retry-After is longer than
	// BackoffMax is not asked again. 1 ms to 1 h; default 100 ms and 10 s.
	BackoffMin, BackoffMax time.Duration
	// Logger gets retries. It never gets a key. Default: none.
	Logger *slog.Logger
}

func (c TransportConfig) withDefaults() (TransportConfig, error) {
	c.Header = http.CanonicalHeaderKey(cmp.Or(c.Header, "Idempotency-Key"))
	c.Honours = slices.Clone(c.Honours)
	c.BackoffMin = cmp.Or(c.BackoffMin, 100*time.Millisecond)
	problems := bounds.Durations(
		bounds.Duration{Field: "BackoffMin", Value: &c.BackoffMin, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "BackoffMax", Value: &c.BackoffMax, Default: max(10*time.Second, c.BackoffMin), Min: c.BackoffMin, Max: time.Hour},
	)
	problems = append(problems, bounds.Ints(bounds.Int{Field: "AttemptsMax", Value: &c.AttemptsMax, Default: 6, Min: 1, Max: 100})...)
	for _, server := range c.Honours {
		if named, err := url.Parse("//" + server); err != nil || named.Host != server || named.Hostname() == "" {
			problems = append(problems, bounds.Problem("Honours", fmt.Sprintf("%q", server), `"host", "host:port" or "*"`))
		}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(problems...)
}

// honours reports whether the caller stated that a server honours keys.
func (c TransportConfig) honours(address *url.URL) bool {
	return slices.ContainsFunc(c.Honours, func(server string) bool {
		return server == "*" || strings.EqualFold(server, address.Host) || strings.EqualFold(strings.Trim(server, "[]"), address.Hostname())
	})
}
