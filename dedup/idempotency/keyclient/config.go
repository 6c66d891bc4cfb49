package keyclient

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/effectonce/effectonce/internal/bounds"
)

// TransportConfig of a Transport. The zero value works.
type TransportConfig struct {
	// Methods whose requests get a key where they have none. Default POST and PATCH. GET, HEAD, OPTIONS and TRACE cannot be
	// among them.
	Methods []string
	// Header that carries the key. Default "Idempotency-Key".
	Header string
	// Honours are the servers that keep keys, and so may be asked again after they may have acted: "bank.example" (at any port),
	// "bank.example:8443", or "*" for all. A server that keeps none acts again. Another one is asked again, too, as soon as it
	// has shown that it keeps them, by an answer with Idempotent-Replayed: true, or with the key in the header of the key:
	// for as long as the Transport lives, and of 256 servers at most. Default: none.
	Honours []string
	// AttemptsMax is how often a request is sent at most. 1 to 100; default 6.
	AttemptsMax int
	// TotalMax bounds all attempts of a request and the pauses between them, up to the header of the response; its body is
	// read under the request's own context. Where that has a deadline, the attempts end a tenth of the time ahead of it, 250 ms at
	// most. 1 ms to 1 h; default 1 min.
	TotalMax time.Duration
	// AttemptMax bounds one attempt, sending included, up to the header of the response. 1 ms to 1 h; default 20 s.
	// What is sent only once has no other limit than its context, neither this one nor TotalMax.
	AttemptMax time.Duration
	// BackoffMin and BackoffMax bound the pauses: before attempt n+1 it is anything up to BackoffMin·2ⁿ⁻¹, at most BackoffMax
	// (full jitter). 1 ms to 1 h; default 100 ms and 10 s.
	BackoffMin, BackoffMax time.Duration
	// BodyBytesMax is the largest body without a GetBody that is read into memory, so that it can be sent again. A larger one
	// is sent once. 1 byte to 64 MiB; default 1 MiB.
	BodyBytesMax int
	// Pending remembers the keys of requests that have a name (WithRequestName), so that they survive this process. Default:
	// requests that have a name are refused.
	Pending PendingStore
	// ForgetAnswered makes the Transport forget a pending key by itself, when the body of an answer that settles the request was
	// read to its end or closed: 2xx, 3xx but 307 and 308, 4xx but 401, 403, 407, 408, 409, 410, 421, 422, 423, 425 and 429. A 202 does
	// so only with Idempotent-Replayed: true: without, the request is still being executed (httpkey.AcceptHandler). Where
	// an earlier attempt got a 5xx, 409 or no answer, or the request was pending already or came with a key of the caller's, a 4xx
	// does so only with Idempotent-Replayed: true: the earlier attempt may have been executed.
	// Who dies between that and writing the answer down asks again under a new key: a second effect. Default: the caller
	// forgets it in the transaction that writes the answer down (Pending.ForgetTx).
	ForgetAnswered bool
	// Logger gets what is tried again, and trouble with forgetting. It never gets a key. Default: none.
	Logger *slog.Logger
	// Retrying is called before the pause ahead of each attempt but the first, synchronously.
	Retrying func(r *http.Request, retry Retry)
}

// Retry says why a request is sent again.
type Retry struct {
	Attempt int           // that is over, counted from 1
	Status  int           // of its response; 0: there was none
	Err     error         // why there was none
	Wait    time.Duration // before the next one
}

func (c TransportConfig) withDefaults() (TransportConfig, error) {
	var problems []error
	if len(c.Methods) == 0 {
		c.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	c.Methods = slices.Clone(c.Methods)
	for _, method := range c.Methods {
		if safe(method) || !token(method) {
			problems = append(problems, bounds.Problem("Methods", strconv.Quote(method), "methods that change something"))
		}
	}
	c.Header = http.CanonicalHeaderKey(cmp.Or(c.Header, defaultHeader))
	if !token(c.Header) {
		problems = append(problems, bounds.Problem("Header", strconv.Quote(c.Header), "the name of a header"))
	}
	c.Honours = slices.Clone(c.Honours)
	for i, server := range c.Honours {
		if named, err := url.Parse("//" + server); err != nil || named.Host != server || named.Hostname() == "" {
			problems = append(problems, bounds.Problem("Honours", strconv.Quote(server), `"host", "host:port" or "*"`))
		}
		c.Honours[i] = strings.ToLower(server)
	}
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "TotalMax", Value: &c.TotalMax, Default: time.Minute, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "AttemptMax", Value: &c.AttemptMax, Default: 20 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "BackoffMin", Value: &c.BackoffMin, Default: 100 * time.Millisecond, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "BackoffMax", Value: &c.BackoffMax, Default: max(10*time.Second, c.BackoffMin), Min: time.Millisecond, Max: time.Hour},
	)...)
	if c.BackoffMax < c.BackoffMin {
		problems = append(problems, bounds.Problem("BackoffMax", c.BackoffMax, fmt.Sprintf("at least BackoffMin, %v", c.BackoffMin)))
	}
	problems = append(problems, bounds.Ints(
		bounds.Int{Field: "AttemptsMax", Value: &c.AttemptsMax, Default: 6, Min: 1, Max: 100},
		bounds.Int{Field: "BodyBytesMax", Value: &c.BodyBytesMax, Default: 1 << 20, Min: 1, Max: 64 << 20},
	)...)
	if c.ForgetAnswered && c.Pending == nil {
		problems = append(problems, bounds.Problem("ForgetAnswered", c.ForgetAnswered, "it only with Pending"))
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(problems...)
}

// token is what names of methods and headers are made of (RFC 9110, 5.6.2).
func token(text string) bool {
	const chars = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	return text != "" && strings.Trim(text, chars) == ""
}
