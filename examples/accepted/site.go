package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/examples/startup"
	"github.com/effectonce/effectonce/relay"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, os.Getenv("DATABASE_URL")); err != nil {
		fmt.Fprintln(os.Stderr, "accepted:", err)
		os.Exit(1)
	}
}

// run sends a request twice under one key, and asks for its status, before and after the consumer has
// done it.
func run(ctx context.Context, out io.Writer, databaseURL string) error {
	s, err := startup.Open(ctx, "accepted", databaseURL, tables, 1)
	if err != nil {
		return err
	}
	defer s.Close(ctx)
	api, err := newAPI(s.Pool, s.Topic)
	if err != nil {
		return err
	}
	relays, err := relay.New(s.Pool, s.Kafka(), relay.Config{Schema: schema})
	if err != nil {
		return err
	}
	worker, err := consumer.New(s.Pool, s.Kafka(), consumer.Each(work), consumer.Config{Schema: schema, Group: s.Topic, Topics: []string{s.Topic}})
	if err != nil {
		return err
	}
	working, stop := context.WithCancel(ctx)
	group, working := errgroup.WithContext(working)
	group.Go(func() error { return relays.Run(working) })
	group.Go(func() error { return worker.Run(working) })
	send := func(method, path string) *httptest.ResponseRecorder {
		r, w := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader("a large report")), httptest.NewRecorder()
		r.Header.Set("Idempotency-Key", s.Topic)
		api.ServeHTTP(w, r)
		_, _ = fmt.Fprintln(out, method, w.Code, w.Header().Get("Idempotent-Replayed"), w.Body)
		return w
	}
	location := send(http.MethodPost, "/jobs").Header().Get("Location")
	again := send(http.MethodPost, "/jobs").Header().Get("Location")
	send(http.MethodGet, location)
	err = s.Handled(ctx, 1)
	send(http.MethodGet, location)
	stop()
	if location != again {
		err = errors.Join(err, fmt.Errorf("the retry got location %s, the request %s", again, location))
	}
	return errors.Join(err, group.Wait())
}
