package region

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
)

// The headers of refused and forwarded requests.
const (
	HomeHeader      = "Effectonce-Home"      // of a refusal: the home region
	ForwardedHeader = "Effectonce-Forwarded" // of a forwarded request: the region that forwarded it
)

// Config of Middleware.
type Config struct {
	// Here is the region of this process. Required.
	Here string
	// Key returns the key of a request, with the scope, operation and value under which it is
	// claimed. With httpkey.Middleware the value is that of httpkey.ParseKey, not of the header,
	// since a client may send one key with and without quotes. ok is false for a request without a
	// key, or with a malformed one, which is served, or refused, here. Required.
	Key func(r *http.Request) (key idempotency.Key, ok bool)
	// Forward has the addresses of regions to which requests are forwarded; requests for other
	// regions are refused. Forward only to addresses that authenticate the caller again. An address
	// has no path and no query: the request arrives as the client sent it, so that its fingerprint
	// is the same, forwarded or not. Default: all are refused.
	Forward map[string]*url.URL
	// Transport for forwarded requests. Default: http.DefaultTransport.
	Transport http.RoundTripper
	// AheadMax is how far the time in a key may be ahead of this process's clock. A key from
	// further ahead is refused (400), because a table that not all regions have yet may apply to
	// it. A process whose clock is slow by more refuses all keys that carry the time; one whose
	// clock is fast accepts keys from that much further ahead: see the package's text on changing
	// tables. 1 s to 30 days; default 24 h, more than real clock errors, so that in practice only
	// clients that invent times are refused.
	AheadMax time.Duration
}

// Middleware passes requests whose keys have their home here to the next handler. It refuses those
// with a key from too far ahead (AheadMax), or from before the first table (400). Others are
// forwarded, once, or refused with 421 Misdirected Request and the home's name, as
// application/problem+json. Nothing was done for a refused request; one whose forwarding failed
// (502) may have been executed: the client retries with the same key.
func (h *Homes) Middleware(cfg Config) (func(http.Handler) http.Handler, error) {
	problems := bounds.Durations(bounds.Duration{Field: "AheadMax", Value: &cfg.AheadMax, Default: 24 * time.Hour, Min: time.Second, Max: 30 * 24 * time.Hour})
	if !named(cfg.Here) {
		problems = append(problems, bounds.Problem("Here", fmt.Sprintf("%.70q", cfg.Here), fmt.Sprintf("1 to %d bytes of visible ASCII", nameMax)))
	}
	if cfg.Key == nil {
		problems = append(problems, bounds.Problem("Key", "nil", "a function that finds the key of a request"))
	}
	proxies := map[string]http.Handler{}
	for _, region := range slices.Sorted(maps.Keys(cfg.Forward)) {
		to := cfg.Forward[region]
		switch {
		case to == nil || to.Host == "" || to.Scheme != "http" && to.Scheme != "https":
			problems = append(problems, bounds.Problem("Forward", fmt.Sprintf("to %.70q", region), "an address with http or https and a host"))
		case to.Path != "" && to.Path != "/", to.Opaque != "":
			problems = append(problems, bounds.Problem("Forward", fmt.Sprintf("to %.70q with path %.70q", region, to.Path+to.Opaque), "an address without a path, or with /"))
		case to.RawQuery != "" || to.ForceQuery: // not shown: it may have a secret
			problems = append(problems, bounds.Problem("Forward", fmt.Sprintf("to %.70q with a query", region), "an address without a query"))
		case region == cfg.Here:
			problems = append(problems, bounds.Problem("Forward", fmt.Sprintf("to %.70q", region), "other regions than Here"))
		default:
			proxies[region] = proxy(cfg, region, to)
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.route(cfg, proxies, next, w, r) })
	}, nil
}

func (h *Homes) route(cfg Config, proxies map[string]http.Handler, next http.Handler, w http.ResponseWriter, r *http.Request) {
	key, ok := cfg.Key(r)
	if !ok {
		next.ServeHTTP(w, r)
		return
	}
	if made, ok := madeAt(key); ok {
		if time.Until(made) > cfg.AheadMax {
			refuse(w, http.StatusBadRequest, "", fmt.Sprintf("the time in the idempotency key is more than %v ahead", cfg.AheadMax))
			return
		}
		if from := h.tables[0].From; made.Before(from) { // it may have been executed in another region
			refuse(w, http.StatusBadRequest, "", fmt.Sprintf("the time in the idempotency key is before %s: where it was at home, and whether its request was executed, is not known any more", from.UTC().Format(time.RFC3339)))
			return
		}
	}
	home, version := h.Home(key)
	if home == cfg.Here {
		next.ServeHTTP(w, r)
		return
	}
	// The forwarding region has other tables, or the client made the header up: a second hop could
	// start a loop.
	if from := r.Header.Get(ForwardedHeader); from != "" {
		refuse(w, http.StatusMisdirectedRequest, home, fmt.Sprintf("the request was forwarded already, and table %d of region %s has another home for its idempotency key", version, cfg.Here))
		return
	}
	if to, ok := proxies[home]; ok {
		to.ServeHTTP(w, r)
		return
	}
	refuse(w, http.StatusMisdirectedRequest, home, fmt.Sprintf("the idempotency key is at home in region %s, not in %s: send the request there, under the same key", home, cfg.Here))
}

func proxy(cfg Config, region string, to *url.URL) http.Handler {
	target := *to
	return &httputil.ReverseProxy{
		Transport: cfg.Transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&target)
			r.Out.URL.RawQuery = r.In.URL.RawQuery // Out's query lacks what could not be parsed, which would change the fingerprint
			r.SetXForwarded()
			r.Out.Header.Set(ForwardedHeader, cfg.Here)
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) {
			refuse(w, http.StatusBadGateway, region, fmt.Sprintf("region %s, where the idempotency key is at home, does not answer: try again with the same key", region))
		},
	}
}

// refuse answers with a problem of RFC 9457.
func refuse(w http.ResponseWriter, status int, home, detail string) {
	body, err := json.Marshal(struct {
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail"`
		Home   string `json:"home,omitempty"`
	}{http.StatusText(status), status, detail, home})
	if err != nil {
		panic(err) // strings and a number
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	if home != "" {
		w.Header().Set(HomeHeader, home)
	}
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}
