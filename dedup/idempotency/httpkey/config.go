package httpkey

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/bounds"
)

// Scope returns the tenant, or the principal, that sent a request, as authentication determined it:
// the same key in two scopes is two keys. An error that wraps ErrUnauthenticated is answered with
// 401; any other error, and an empty scope, with 500. There is no default: one that mixed tenants
// would show one tenant's responses to another.
type Scope func(r *http.Request) (string, error)

// ErrUnauthenticated is for Scope: the request has no principal.
var ErrUnauthenticated = serving.ErrUnauthenticated

// Config of a Middleware. The zero value works, except that Operation.Operation is required.
type Config struct {
	// Operation configures the keys: the name, which is required, window, waiting, encryption. One
	// name may serve all routes; one of these may be a flow. A key that is sent again for another
	// method, path or query is a mismatch. Failed is not allowed: with Strict the handler's response
	// to a failure is stored.
	Operation idempotency.Config
	// RequestBytesMax is the largest body that is read. 1 byte to 64 MiB; default 1 MiB.
	RequestBytesMax int
	// ReadTimeout is how long reading a body may take; no database connection is held during it. It
	// can shorten http.Server.ReadTimeout, never extend it. If the server's ResponseWriter is
	// wrapped by a type without Unwrap, only the server's own timeouts apply. 1 ms to 1 h; default
	// 10 s.
	ReadTimeout time.Duration
	// HandlerTimeout is how long claim and handler may take together, whether or not the client
	// waits. More than Operation.WaitMax; 1 ms to 1 h; default 30 s.
	HandlerTimeout time.Duration
	// Headers of responses to store and replay, in addition to ReplayedHeaders: none that may not be
	// shown again (tokens), and none that idempotency.NeverStored reports.
	Headers []string
	// Fingerprint returns the part of the body that distinguishes requests; method, path, query and
	// media type always count. An error is answered with 400. Default: Canonical.
	Fingerprint func(r *http.Request, body []byte) ([]byte, error)
}

// Middleware executes requests once for each key. It is safe for concurrent use.
type Middleware struct {
	op    *idempotency.Operation
	scope Scope
	cfg   Config
	keep  map[string]bool
}

// New returns a middleware, or all problems of its configuration at once. It opens no connection.
// The caller owns the pool, which must connect to the primary.
func New(pool *pgxpool.Pool, scope Scope, cfg Config) (*Middleware, error) {
	problems := cfg.check()
	m := &Middleware{scope: scope, cfg: cfg, keep: map[string]bool{}}
	for _, name := range append(ReplayedHeaders(), cfg.Headers...) {
		m.keep[http.CanonicalHeaderKey(name)] = true
	}
	op, err := serving.New(pool, m.cfg.Operation, failed, scope != nil, m.cfg.HandlerTimeout)
	if err := errors.Join(append(problems, err)...); err != nil {
		return nil, err
	}
	m.op = op
	return m, nil
}

// Operation returns the operation that stores the keys: for idempotency.NewFlow, and for its Run.
func (m *Middleware) Operation() *idempotency.Operation { return m.op }

// check fills in defaults and returns all problems, except those of Operation.
func (c *Config) check() []error {
	problems := bounds.Durations(
		bounds.Duration{Field: "ReadTimeout", Value: &c.ReadTimeout, Default: 10 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "HandlerTimeout", Value: &c.HandlerTimeout, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
	)
	problems = append(problems, bounds.Ints(
		bounds.Int{Field: "RequestBytesMax", Value: &c.RequestBytesMax, Default: 1 << 20, Min: 1, Max: 64 << 20},
	)...)
	for _, name := range c.Headers {
		switch {
		case name == "" || strings.ContainsAny(name, " \t\r\n:,"):
			problems = append(problems, bounds.Problem("Headers", fmt.Sprintf("%q", name), "the name of a header"))
		case idempotency.NeverStored(name):
			problems = append(problems, bounds.Problem("Headers", name, "none that belongs to one client, connection or moment"))
		}
	}
	if c.Fingerprint == nil {
		c.Fingerprint = Canonical
	}
	return problems
}
