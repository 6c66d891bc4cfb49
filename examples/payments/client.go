package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// outcome of an order, as its client sees it.
type outcome struct {
	killed, requests, status int
	replayed                 bool
	body                     string
}

// requestsMax bounds the requests of a client for one order.
const requestsMax = 300

// order is a client: it creates a key, and sends its request under that key until it gets a
// response. The first API process dies at the given point.
func (s *site) order(ctx context.Context, death string) (o outcome, err error) {
	return s.ask(ctx, death, idempotency.NewKey(), request{Customer: s.customerOf(death), Cents: 4200})
}

func (s *site) ask(ctx context.Context, death, key string, r request) (o outcome, err error) {
	body, err := json.Marshal(r)
	if err != nil {
		return o, err
	}
	child, err := s.startAPI(ctx, death)
	if err != nil {
		return o, err
	}
	defer func() { child.stop() }()
	for o.requests < requestsMax {
		o.requests++
		wait, err := child.post(ctx, key, body, &o)
		switch {
		case err != nil && ctx.Err() != nil:
			return o, ctx.Err()
		case err != nil: // the API died: another replica replaces it
			child.stop()
			o.killed++
			if child, err = s.startAPI(ctx, ""); err != nil {
				return o, err
			}
		case wait == 0:
			return o, nil
		case !pause(ctx, wait):
			return o, ctx.Err()
		}
	}
	return o, fmt.Errorf("no answer after %d requests; the last was %d %s", o.requests, o.status, o.body)
}

// child is an API process.
type child struct {
	cmd   *exec.Cmd
	stdin io.Closer
	url   string
	http  *http.Client
}

// startAPI starts this program again, as the API.
func (s *site) startAPI(ctx context.Context, death string) (*child, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{cmd: exec.CommandContext(ctx, program), http: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}} //nolint:gosec // this program itself
	c.cmd.Env = append(os.Environ(), envDatabase+"="+s.DatabaseURL, envProvider+"="+s.provider.url, envBank+"="+s.bank.url, envTopic+"="+s.Topic, envDeath+"="+death)
	c.cmd.Stderr = os.Stderr
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the API: %w", err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		c.stop()
		return nil, errors.New("the API ended before it listened")
	}
	c.url = strings.TrimSpace(line)
	return c, nil
}

// stop ends the process, if it has not ended.
func (c *child) stop() {
	if c == nil {
		return
	}
	_ = c.stdin.Close()
	_ = c.cmd.Wait()
}

// post sends the request once. It returns how long to wait before the next attempt; 0: the response
// is final.
func (c *child) post(ctx context.Context, key string, body []byte, o *outcome) (time.Duration, error) {
	ask, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/orders", bytes.NewReader(body)) //nolint:gosec // the address of its own server
	if err != nil {
		return 0, err
	}
	ask.Header.Set("Idempotency-Key", key)
	answer, err := c.http.Do(ask) //nolint:gosec // as above
	if err != nil {
		return 0, err
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err
	}
	o.status, o.body, o.replayed = answer.StatusCode, string(text), answer.Header.Get("Idempotent-Replayed") != ""
	switch answer.StatusCode {
	case http.StatusConflict, http.StatusServiceUnavailable: // in progress, or in doubt until the bank's records are read
		return 100 * time.Millisecond, nil // Retry-After says a second; this client is impatient
	}
	return 0, nil
}

// pause waits, or returns false when ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
