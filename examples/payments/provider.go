package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/google/uuid"
)

// provider simulates a payment provider: it charges once for each idempotency key, and returns the
// first result when a request is repeated.
type provider struct {
	server *http.Server
	url    string

	mu      sync.Mutex
	asked   map[string]int    // by customer
	charges map[string]charge // by key
}

type charge struct {
	Request  request
	Name     string
	Declined bool
}

// creditMax is the largest charge that is not declined.
const creditMax = 100_000

func startProvider(ctx context.Context) (*provider, error) {
	p := &provider{asked: map[string]int{}, charges: map[string]charge{}}
	var err error
	p.server, p.url, err = listen(ctx, p)
	return p, err
}

// listen serves on loopback until the server is closed.
func listen(ctx context.Context, handler http.Handler) (*http.Server, string, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, "", fmt.Errorf("listen: %w", err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = server.Serve(listener) }()
	return server, "http://" + listener.Addr().String(), nil
}

const bodyMax = 64 << 10

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var asked request
	key := r.Header.Get("Idempotency-Key")
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, bodyMax)).Decode(&asked); err != nil || key == "" {
		http.Error(w, "want a charge and an Idempotency-Key", http.StatusBadRequest)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked[asked.Customer]++
	done, known := p.charges[key]
	switch {
	case !known:
		done = charge{Request: asked, Name: fmt.Sprintf("ch_%d", len(p.charges)+1), Declined: asked.Cents > creditMax}
		p.charges[key] = done
	case done.Request != asked:
		http.Error(w, "the key was used for another charge", http.StatusUnprocessableEntity)
		return
	}
	if done.Declined {
		w.WriteHeader(http.StatusPaymentRequired)
	}
	_, _ = io.WriteString(w, done.Name)
}

// count returns how often a customer's charges were asked for, and how many were made.
func (p *provider) count(customer string) (asked, charged int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.charges {
		if c.Request.Customer == customer && !c.Declined {
			charged++
		}
	}
	return p.asked[customer], charged
}

// providerClient is the API's client of the provider.
type providerClient struct {
	url    string
	client *http.Client
}

var errDeclined = errors.New("the charge is declined")

// charge requests a charge under a key. An unknown result is an error: the call is retried later.
func (c *providerClient) charge(ctx context.Context, key uuid.UUID, r request) (string, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	ask, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	ask.Header.Set("Idempotency-Key", key.String())
	answer, err := c.client.Do(ask)
	if err != nil {
		return "", fmt.Errorf("call the provider: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	name, err := io.ReadAll(io.LimitReader(answer.Body, bodyMax))
	switch {
	case err != nil:
		return "", fmt.Errorf("read the provider's response: %w", err)
	case answer.StatusCode == http.StatusPaymentRequired:
		return "", errDeclined
	case answer.StatusCode != http.StatusOK:
		return "", fmt.Errorf("the provider returned %s", answer.Status)
	}
	return string(name), nil
}
