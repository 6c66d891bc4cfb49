package httpkey_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/httpkey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// BenchmarkHandler compares an HTTP handler that books an order in a transaction of its own with
// the same one behind the middleware, and with replays, over 32 connections of clients and of the
// database: one of two statements, and one of eight. Clients, handler and database share the
// machine.
func BenchmarkHandler(b *testing.B) {
	cluster := pgtest.Cluster(b, map[string]string{"fsync": "on", "synchronous_commit": "on"}) // as in production
	pgtest.Migrate(b, cluster.URL)
	config, err := pgxpool.ParseConfig(cluster.URL)
	require.NoError(b, err)
	config.MaxConns = 32
	pool := pgtest.PoolOf(b, config)
	_, err = pool.Exec(b.Context(), `CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer bigint NOT NULL, line int NOT NULL)`)
	require.NoError(b, err)
	once, err := httpkey.New(pool, func(*http.Request) (string, error) { return "shop", nil }, httpkey.Config{
		Operation: idempotency.Config{Operation: "orders"},
	})
	require.NoError(b, err)
	for _, statements := range []int{2, 8} {
		book := func(ctx context.Context, tx pgx.Tx, r *http.Request) error {
			customer, err := strconv.ParseInt(r.URL.Query().Get("customer"), 10, 64)
			for line := range statements {
				_, execErr := tx.Exec(ctx, `INSERT INTO orders (customer, line) VALUES ($1, $2)`, customer, line)
				err = errors.Join(err, execErr)
			}
			return err
		}
		answer := func(w http.ResponseWriter, err error) {
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			_, _ = io.WriteString(w, `{"status":"booked","note":"`+strings.Repeat("x", 200)+`"}`)
		}
		plain := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx := r.Context()
			answer(w, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return book(ctx, tx, r) }))
		})
		keyed := once.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			answer(w, book(r.Context(), httpkey.Tx(r), r))
		}))
		for _, way := range []struct {
			name    string
			handler http.Handler
			key     func() string
		}{
			{"without", plain, idempotency.NewKey},
			{"once", keyed, idempotency.NewKey},
			{"replay", keyed, func() string { return "replayed-" + strconv.Itoa(statements) }},
		} {
			server := httptest.NewServer(way.handler)
			b.Cleanup(server.Close)
			client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32}}
			b.Cleanup(client.CloseIdleConnections)
			b.Run(way.name+"/"+strconv.Itoa(statements), func(b *testing.B) {
				b.SetParallelism(16)
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						order(b, client, server.URL, way.key())
					}
				})
			})
		}
	}
}

func order(b *testing.B, client *http.Client, url, key string) {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), http.MethodPost, url+"/orders?customer=7", strings.NewReader(`{"lines":[{"sku":"a-1","count":2}],"currency":"EUR"}`))
	require.NoError(b, err)
	request.Header.Set("Idempotency-Key", key)
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	require.NoError(b, err)
	_, err = io.Copy(io.Discard, response.Body)
	require.NoError(b, errors.Join(err, response.Body.Close()))
	require.Equal(b, http.StatusCreated, response.StatusCode)
}
