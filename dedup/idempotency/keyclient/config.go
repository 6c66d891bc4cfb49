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
	// Methods whose requests get a key if they have none. Default POST and PATCH. GET, HEAD,
	// OPTIONS and TRACE are not allowed.
	Methods []string
	// Header that carries the key. Default "Idempotency-Key".
	Header string
	// Honours are the servers that honour keys, so that requests to them may be retried after the
	// server may have acted: "bank.example" (at any port), "bank.example:8443", or "*" for all. A
	// server that ignores keys would act again. Requests to another server are retried, too, as
	// soon as it has shown that it honours keys, by a response with Idempotent-Replayed: true, or
	// with the key in the header of the key. The Transport remembers this for its lifetime, for at
	// most 256 servers. Default: none.
	Honours []string
	// AttemptsMax is the maximum number of attempts of a request. 1 to 100; default 6.
	AttemptsMax int
	// TotalMax bounds all attempts of a request and the pauses between them, up to the header of
	// the response; its body is read under the request's own context. If that has a deadline, the
	// attempts end before it, by a tenth of the remaining time, at most 250 ms. 1 ms to 1 h;
	// default 1 min.
	TotalMax time.Duration
	// AttemptMax bounds one attempt, including sending, up to the header of the response. 1 ms to 1
	// h; default 20 s. A request that is sent only once is bounded by its context alone, not by
	// AttemptMax or TotalMax.
	AttemptMax time.Duration
	// BackoffMin and BackoffMax bound the pauses: the pause before attempt n+1 is random, up to
	// BackoffMin·2ⁿ⁻¹, at most BackoffMax (full jitter). 1 ms to 1 h; default 100 ms and 10 s.
	BackoffMin, BackoffMax time.Duration
	// BodyBytesMax is the largest body without a GetBody that is read into memory for retries. A
	// request with a larger one is sent once. 1 byte to 64 MiB; default 1 MiB.
	BodyBytesMax int
	// Pending stores the keys of requests that have a name (WithRequestName), so that they survive
	// this process. Default: requests that have a name are rejected.
	Pending PendingStore
	// ForgetAnswered makes the Transport forget a pending key by itself, when the body of a
	// response that settles the request was read to its end or closed. Such responses are 2xx; 3xx
	// except 307 and 308; and 4xx except 401, 403, 407, 408, 409, 410, 421, 422, 423, 425 and 429.
	// A 202 counts only with Idempotent-Replayed: true: without it, the request is still being
	// executed (httpkey.AcceptHandler). A 4xx counts only with Idempotent-Replayed: true if an
	// earlier attempt got a 5xx, 409 or no response, or if the request was pending already or came
	// with a key of the caller's: the earlier attempt may have been executed. A program that dies
	// after the key was forgotten, and before it stored the response, sends the request again under
	// a new key: a second effect. Default: the caller forgets the key in the transaction that
	// stores the response (Pending.ForgetTx).
	ForgetAnswered bool
	// Logger gets retries, and failures to forget a key. It never gets a key. Default: none.
	Logger *slog.Logger
	// Retrying is called synchronously before the pause that precedes each retry.
	Retrying func(r *http.Request, retry Retry)
}

// Retry is the reason why a request is sent again.
type Retry struct {
	Attempt int           // the attempt that ended, counted from 1
	Status  int           // of its response; 0: no response
	Err     error         // why there was no response
	Wait    time.Duration // before the next attempt
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

// token reports whether text is a token, as names of methods and headers are (RFC 9110, 5.6.2).
func token(text string) bool {
	const chars = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	return text != "" && strings.Trim(text, chars) == ""
}
