package keyclient

import (
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// keepersMax bounds how many servers are remembered.
const keepersMax = 256

// keepers are servers that have shown that they honour keys.
type keepers struct {
	mu    sync.Mutex
	known map[string]bool
}

// server returns the server of an address: host, and host with port.
func server(address *url.URL) (host, withPort string) {
	host, port := strings.ToLower(address.Hostname()), address.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[address.Scheme]
	}
	return host, net.JoinHostPort(host, port)
}

// honours reports whether a server honours keys, as far as is known.
func (t *Transport) honours(address *url.URL) bool {
	host, withPort := server(address)
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	declared := func(entry string) bool { return entry == "*" || entry == host || entry == withPort }
	if slices.ContainsFunc(t.cfg.Honours, declared) {
		return true
	}
	t.shown.mu.Lock()
	defer t.shown.mu.Unlock()
	return t.shown.known[withPort]
}

// learn remembers a server whose response shows that it honours keys.
func (t *Transport) learn(r *http.Request, header string, response *http.Response) {
	if !replayed(response) && response.Header.Get(header) != r.Header.Get(header) {
		return
	}
	t.shown.mu.Lock()
	defer t.shown.mu.Unlock()
	if t.shown.known == nil {
		t.shown.known = map[string]bool{}
	}
	if _, withPort := server(r.URL); len(t.shown.known) < keepersMax {
		t.shown.known[withPort] = true
	}
}
