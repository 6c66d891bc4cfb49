package httpkey

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
)

// Scope names the tenant, or the principal, that a request comes from, as authentication has found it out: keys of two
// scopes never meet. An error that wraps ErrUnauthenticated is answered with 401; any other one, and an empty scope, with
// 500. There is no default: one that mixes tenants would show the answers of one to the other.
type Scope func(r *http.Request) (string, error)

// ErrUnauthenticated is for Scope: the request has no principal.
var ErrUnauthenticated = errors.New("the request is not authenticated")

// Config of a Middleware. The zero value works, but for Operation.Operation.
type Config struct {
	// Operation says how keys are kept: its name, which is required, window, waiting, encryption. One name may serve all
	// routes, of which one may be a flow: a key that comes again for another method, path or query is a mismatch. For names of
	// their own see Middleware.For.
	Operation idempotency.Config
	// Optional lets requests without a key in. They get one that no other client knows, so that the handler has its
	// transaction all the same. Default: 400.
	Optional bool
	// PassThrough are the methods whose keys are not looked at, and that get neither transaction nor replay. Default GET, HEAD,
	// OPTIONS and TRACE, which change nothing.
	PassThrough []string
	// PassWithoutKey are the methods that pass through in the same way where they come without a key: with one, which a client sends
	// because it counts on it, they are executed once, as any other. Default PUT and DELETE, which HTTP defines as idempotent, where
	// PassThrough is nil, too; none where it is not. Empty and not nil: none. A handler of such a method asks TxOf for its transaction: what it
	// writes past that is committed by itself, whatever becomes of the key, and needs a connection besides the one of the request.
	PassWithoutKey []string
	// RequestBytesMax is the largest body that is read. 1 byte to 64 MiB; default 1 MiB.
	RequestBytesMax int
	// ReadTimeout is how long a body may take; no database connection is held meanwhile. It shortens what http.Server.ReadTimeout
	// allows and never extends it. Where the server's ResponseWriter is wrapped by something without Unwrap, only the server's own
	// timeouts count. 1 ms to 1 h; default 10 s.
	ReadTimeout time.Duration
	// HandlerTimeout is how long claim and handler may take, whether or not the client waits. More than Operation.WaitMax; 1 ms to
	// 1 h; default 30 s.
	HandlerTimeout time.Duration
	// BufferBytesMax is the largest body that a handler may answer with; beyond it its effect is rolled back. What is larger
	// than Operation.ResponseBytesMax reaches the first client, and is not stored. 1 byte to 1 GiB; default 8 MiB, or
	// Operation.ResponseBytesMax if that is larger.
	BufferBytesMax int
	// Headers of responses to store and replay, beside those of ReplayedHeaders. Cookies, credentials and headers of the
	// connection are refused.
	Headers []string
	// Outcome says what becomes of a response, by its status. Default: DefaultOutcome.
	Outcome func(status int) Outcome
	// Fingerprint returns what of the body tells two requests apart; method, path, query and media type count anyway. An
	// error is answered with 400. Default: Canonical. See Without.
	Fingerprint func(r *http.Request, body []byte) ([]byte, error)
	// JSONDepthMax is how deep arrays and objects of a JSON body may lie in each other; a deeper one is answered with 400,
	// ProblemTooDeep, before any SQL. 1 to 1000; default 64.
	JSONDepthMax int
	// Query reports whether parameters of a name count in the fingerprint; those that do count as they are written, in their order.
	// One that does not count must have no effect. Default: the whole query counts. To change it has retries of requests that
	// were executed before answered with 422, where their query had what counts no more, or counts again.
	Query func(name string) bool
	// Describe writes the body of an answer that this package gives instead of the handler's, and says its media type. Status and
	// headers do not depend on it. Default: ProblemJSON.
	Describe func(r *http.Request, answer Answer) (contentType string, body []byte)
	// DocsURL is where clients read how this API wants keys: the Link, of relation describedby, that the draft of the header
	// recommends with 400, 409 and 422. An absolute URL of http or https; default: no Link.
	DocsURL string
	// RetryAfter is what clients are told with 503. 1 s to 1 h; default 1 s.
	RetryAfter time.Duration
}

// Middleware executes requests once for each key. It is safe for concurrent use.
type Middleware struct {
	pool  *pgxpool.Pool
	op    *idempotency.Operation
	scope Scope
	cfg   Config
	keep  map[string]bool
	log   *slog.Logger
	all   *operations
}

// New returns a middleware, or all problems of its configuration at once. It opens no connection; the pool is borrowed,
// and must be one of the primary.
func New(pool *pgxpool.Pool, scope Scope, cfg Config) (*Middleware, error) {
	problems := cfg.check()
	if scope == nil {
		problems = append(problems, errors.New("scope is nil: want a function that tells the tenant of a request"))
	}
	m := &Middleware{pool: pool, scope: scope, cfg: cfg, keep: map[string]bool{}, log: cfg.Operation.Logger, all: &operations{}}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	for _, name := range append(ReplayedHeaders(), cfg.Headers...) {
		m.keep[http.CanonicalHeaderKey(name)] = true
	}
	m.cfg.Operation.Failed = func(err error) idempotency.Response {
		if cfg.Operation.Failed == nil || errors.Is(err, idempotency.ErrExpired) {
			return failed(err)
		}
		response := cfg.Operation.Failed(err)
		response.Header = m.kept(response.Header, nil)
		return response
	}
	op, err := idempotency.New(pool, m.cfg.Operation)
	if err != nil {
		problems = append(problems, err)
	} else if wait := op.Config().WaitMax; wait >= m.cfg.HandlerTimeout {
		problems = append(problems, bounds.Problem("HandlerTimeout", m.cfg.HandlerTimeout, fmt.Sprintf("more than Operation.WaitMax, %v", wait)))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	m.op = op
	m.all.of = map[string]*Middleware{cfg.Operation.Operation: m}
	return m, nil
}

// operations are the middlewares of one New, by the names of their operations.
type operations struct {
	mu sync.Mutex
	of map[string]*Middleware

	flows int           // of AcceptHandlers, that run
	idle  chan struct{} // closed when none does any more; nil before the first one
}

// For returns the middleware of another operation, with the same settings: the same key of two operations is two keys, and each may
// have a flow. A name has one middleware, however often it is asked for; bounds of waiting and of kept keys count for each. It
// panics where the name is out of bounds (Config.Operation), since routes are made with constants.
func (m *Middleware) For(operation string) *Middleware {
	m.all.mu.Lock()
	defer m.all.mu.Unlock()
	if known := m.all.of[operation]; known != nil {
		return known
	}
	other := *m
	other.cfg.Operation.Operation = operation
	op, err := idempotency.New(m.pool, other.cfg.Operation)
	if err != nil {
		panic(fmt.Sprintf("httpkey: Middleware.For(%q): %v", operation, err))
	}
	other.op = op
	m.all.of[operation] = &other
	return &other
}

// Operation is what the middleware keeps its keys in: for idempotency.NewFlow, and for forgetting old keys.
func (m *Middleware) Operation() *idempotency.Operation { return m.op }

// check fills in defaults and returns all problems, but for those of Operation.
func (c *Config) check() []error {
	problems := bounds.Durations(
		bounds.Duration{Field: "ReadTimeout", Value: &c.ReadTimeout, Default: 10 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "HandlerTimeout", Value: &c.HandlerTimeout, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "RetryAfter", Value: &c.RetryAfter, Default: time.Second, Min: time.Second, Max: time.Hour},
	)
	problems = append(problems, bounds.Ints(
		bounds.Int{Field: "RequestBytesMax", Value: &c.RequestBytesMax, Default: 1 << 20, Min: 1, Max: 64 << 20},
		bounds.Int{Field: "JSONDepthMax", Value: &c.JSONDepthMax, Default: 64, Min: 1, Max: 1000},
		bounds.Int{Field: "BufferBytesMax", Value: &c.BufferBytesMax, Default: max(8<<20, c.Operation.ResponseBytesMax), Min: 1, Max: 1 << 30},
	)...)
	if c.BufferBytesMax < c.Operation.ResponseBytesMax {
		problems = append(problems, bounds.Problem("BufferBytesMax", c.BufferBytesMax, fmt.Sprintf("at least Operation.ResponseBytesMax, %d", c.Operation.ResponseBytesMax)))
	}
	if c.PassWithoutKey == nil && c.PassThrough == nil { // else a list that was made without PUT would let it in without a key
		c.PassWithoutKey = []string{http.MethodPut, http.MethodDelete}
	}
	if c.PassThrough == nil {
		c.PassThrough = []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace}
	}
	for field, methods := range map[string][]string{"PassThrough": c.PassThrough, "PassWithoutKey": c.PassWithoutKey} {
		for _, method := range methods {
			if !isName(method) || method != strings.ToUpper(method) {
				problems = append(problems, bounds.Problem(field, fmt.Sprintf("%q", method), "a method in capitals"))
			}
		}
	}
	for _, name := range c.Headers {
		switch {
		case !isName(name):
			problems = append(problems, bounds.Problem("Headers", fmt.Sprintf("%q", name), "the name of a header"))
		case neverReplayed(name):
			problems = append(problems, bounds.Problem("Headers", name, "none that belongs to one client or one connection"))
		}
	}
	if docs, err := url.Parse(c.DocsURL); c.DocsURL != "" && (err != nil || docs.Host == "" || !slices.Contains([]string{"http", "https"}, docs.Scheme) || strings.ContainsAny(c.DocsURL, "<> ")) {
		problems = append(problems, bounds.Problem("DocsURL", strconv.Quote(c.DocsURL), "an absolute URL of http or https"))
	}
	if c.Describe == nil {
		c.Describe = ProblemJSON
	}
	if c.Outcome == nil {
		c.Outcome = DefaultOutcome
	}
	if c.Fingerprint == nil {
		c.Fingerprint = Canonical
	}
	return problems
}

func isName(text string) bool { return text != "" && !strings.ContainsAny(text, " \t\r\n:,") }
