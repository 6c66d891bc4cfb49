package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
)

// bank simulates a bank without idempotency keys: it pays on each request. Its records identify
// payments by their reference.
type bank struct {
	server *http.Server
	url    string

	mu        sync.Mutex
	transfers []transfer
}

// hangUp is the prefix of customer names whose transfers are made but get no response.
const hangUp = "hang-up"

type transfer struct {
	Reference string
	Request   request
}

func startBank(ctx context.Context) (*bank, error) {
	b := &bank{}
	var err error
	b.server, b.url, err = listen(ctx, b)
	return b, err
}

func (b *bank) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reference := r.URL.Query().Get("reference")
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.Method == http.MethodGet {
		found := []transfer{}
		for _, t := range b.transfers {
			if t.Reference == reference {
				found = append(found, t)
			}
		}
		_ = json.NewEncoder(w).Encode(found)
		return
	}
	var asked request
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, bodyMax)).Decode(&asked); err != nil {
		http.Error(w, "want a transfer", http.StatusBadRequest)
		return
	}
	b.transfers = append(b.transfers, transfer{reference, asked})
	if strings.HasPrefix(asked.Customer, hangUp) {
		panic(http.ErrAbortHandler) // the connection closes without a response
	}
	w.WriteHeader(http.StatusCreated)
}

// count returns how many transfers were made for a customer's orders.
func (b *bank) count(customer string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.transfers {
		if t.Request.Customer == customer {
			n++
		}
	}
	return n
}

// bankClient is the API's client of the bank.
type bankClient struct {
	url    string
	client *http.Client
}

// newBankClient returns a client that sends each request once. A plain http.Client resends a
// request that has an Idempotency-Key if the bank closes a connection that was used before, and the
// bank would then pay twice. The client has no Timeout, because that would hide that a request was
// not sent: FlowConfig.CallMax bounds the call. While the bank refuses connections, no order is in
// doubt.
func newBankClient(address string) *bankClient {
	return &bankClient{address, &http.Client{Transport: keyclient.Single(http.DefaultTransport)}}
}

func (c *bankClient) transfer(ctx context.Context, reference uuid.UUID, r request) error {
	body, err := json.Marshal(r)
	if err != nil {
		return idempotency.NotDone(err)
	}
	answer, err := c.ask(ctx, http.MethodPost, reference, body)
	if err != nil {
		return err // the transfer may have been made, unless Single reports that nothing was sent
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusCreated {
		return fmt.Errorf("the bank returned %s", answer.Status)
	}
	return nil
}

// reconcile reads the bank's records about a transfer that got no response.
func (c *bankClient) reconcile(ctx context.Context, undecided idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
	answer, err := c.ask(ctx, http.MethodGet, undecided.Key.ChildID(undecided.Phase), nil)
	if err != nil {
		return idempotency.Unknown(), err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK { // proves nothing about the transfer, whatever the body
		return idempotency.Unknown(), fmt.Errorf("the bank's records returned %s", answer.Status)
	}
	var found []transfer
	if err := json.NewDecoder(answer.Body).Decode(&found); err != nil {
		return idempotency.Unknown(), fmt.Errorf("read the bank's records: %w", err)
	}
	if len(found) == 0 {
		return idempotency.DidNotHappen(), nil // so the transfer is requested
	}
	return idempotency.Happened(paid(undecided.Key, undecided.State)), nil
}

func (c *bankClient) ask(ctx context.Context, method string, reference uuid.UUID, body []byte) (*http.Response, error) {
	address := c.url + "/transfers?" + url.Values{"reference": {reference.String()}}.Encode()
	r, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(body)) //nolint:gosec // the address of its own server
	if err != nil {
		return nil, idempotency.NotDone(err)
	}
	return c.client.Do(r) //nolint:gosec // as above
}
