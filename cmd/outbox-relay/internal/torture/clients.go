package torture

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/pause"
)

// clients send requests with idempotency keys to the services, each again and again, sometimes
// twice at a time, until they have a final answer.
type clients struct {
	services []string // URLs
	ledger   *ledger.Writer
	seed     uint64

	mu    sync.Mutex
	asked map[string]string // path by key
}

const clientCount = 6

// run sends new requests until ctx ends.
func (c *clients) run(ctx context.Context) error {
	var all errgroup.Group
	for n := range uint64(clientCount) {
		random := rand.New(rand.NewPCG(c.seed, n)) //nolint:gosec // a seed
		all.Go(func() error {
			for i := 0; ctx.Err() == nil; i++ {
				key := fmt.Sprintf("request-%d-%d", n, i)
				path := pick(random, worker.PathOrders, worker.PathCharged)
				c.mu.Lock()
				c.asked[key] = path
				c.mu.Unlock()
				if err := c.order(ctx, random, path, key); err != nil {
					return err
				}
				pause.For(ctx, time.Duration(random.IntN(60))*time.Millisecond)
			}
			return nil
		})
	}
	return all.Wait()
}

// order sends a request until it has a final answer, and then perhaps once more. It gives up when ctx
// has ended: finish asks again.
func (c *clients) order(ctx context.Context, random *rand.Rand, path, key string) error {
	if err := c.ledger.Write(ledger.Asked, key); err != nil {
		return err
	}
	again := oneIn(random, 4)
	for ctx.Err() == nil {
		copies := 1 + random.IntN(2)*random.IntN(2)
		answers := make(chan bool, copies)
		for range copies {
			service := pick(random, c.services...)
			go func() { answers <- c.send(context.WithoutCancel(ctx), service+path, key) }()
		}
		done := false
		for range copies {
			done = <-answers || done
		}
		if done && !again {
			return nil
		}
		again = again && !done
		pause.For(ctx, time.Duration(20+random.IntN(100))*time.Millisecond)
	}
	return nil
}

// finish asks for every key once more, until it has an answer: the services are well again.
func (c *clients) finish(ctx context.Context) {
	var all errgroup.Group
	all.SetLimit(8)
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, path := range c.asked {
		all.Go(func() error {
			for n := 0; ctx.Err() == nil && !c.send(ctx, c.services[n%len(c.services)]+path, key); n++ {
				pause.For(ctx, 200*time.Millisecond)
			}
			return nil
		})
	}
	_ = all.Wait() // a key without an answer is the judge's matter
}

// send reports whether the answer is final.
func (c *clients) send(ctx context.Context, url, key string) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader([]byte(`{}`)))
	if err != nil {
		return false
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode >= 500 || response.StatusCode == http.StatusConflict || response.StatusCode == http.StatusTooManyRequests {
		return false
	}
	order := strings.TrimSpace(string(body))
	if response.StatusCode != http.StatusCreated || order == "" {
		order = "-"
	}
	return c.ledger.Write(ledger.Request, key, response.StatusCode, order) == nil
}
