package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// everyWay are the ways to publish.
func everyWay(t *testing.T) map[string]func(context.Context, pgx.Tx) error {
	t.Helper()
	large := []byte(strings.Repeat("x", 9000)) // NOTIFY takes less than 8,000 bytes
	return map[string]func(context.Context, pgx.Tx) error{
		"publish": func(ctx context.Context, tx pgx.Tx) error {
			return outbox.Publish(ctx, tx, outbox.Message{Topic: "t", Payload: large})
		},
		"for later": func(ctx context.Context, tx pgx.Tx) error {
			return outbox.Publish(ctx, tx, outbox.Message{Topic: "t", Payload: large, DeliverAt: time.Now().Add(time.Hour)})
		},
		"queue": func(ctx context.Context, tx pgx.Tx) error {
			o, err := outbox.New(outbox.Config{})
			if err != nil {
				return err
			}
			batch := &pgx.Batch{}
			if err := o.Queue(ctx, batch, outbox.Message{Topic: "t", Payload: large}); err != nil {
				return err
			}
			return tx.SendBatch(ctx, batch).Close()
		},
		"plain SQL": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO effectonce.outbox (topic, payload) VALUES ('t', $1)`, large)
			return err
		},
	}
}

// Property: a transaction that publishes, in any way, sends no notification, and Notify sends one
// without a payload: no row is too large for NOTIFY. Row O18 of guarantees.md.
func TestNotificationsCarryNothing(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	listener := pgtest.Connect(t, pool.Config().ConnString())
	pgtest.Exec(t, listener, `LISTEN effectonce`)
	for way, publish := range everyWay(t) {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return publish(ctx, tx) }), way)
	}
	pgtest.Exec(t, pgtest.Connect(t, pool.Config().ConnString()), `SELECT pg_notify('effectonce', 'all that was published is committed')`)
	require.NoError(t, outbox.Notify(ctx, pool))
	for _, want := range []string{"all that was published is committed", ""} {
		got, err := listener.WaitForNotification(ctx) // they come in the order of their commits
		require.NoError(t, err)
		require.Equal(t, want, got.Payload)
		require.Equal(t, "effectonce", got.Channel)
	}
}

// Property: a transaction that publishes commits while another session hangs in the COMMIT of a
// NOTIFY, under the lock that PostgreSQL has for all of them. Only Notify itself waits. Row O17 of
// guarantees.md.
func TestPublishingTakesNoLockOfNotify(t *testing.T) {
	t.Parallel()
	// A commit that waits for a standby that does not exist keeps its locks. Only one session asks
	// for it.
	cluster := pgtest.Cluster(t, map[string]string{"synchronous_standby_names": "nobody", "synchronous_commit": "local"})
	pgtest.Migrate(t, cluster.URL)
	ctx, pool := t.Context(), newPool(t, cluster.URL)
	hangs := pgtest.Connect(t, cluster.URL)
	pgtest.Exec(t, hangs, `SET synchronous_commit = on`)
	ended := make(chan error, 1)
	go func() {
		_, err := hangs.Exec(ctx, `BEGIN; CREATE TABLE work (n int); NOTIFY another; COMMIT`)
		ended <- err
	}()
	look := pgtest.Connect(t, cluster.URL)
	require.Eventually(t, func() bool {
		var so bool
		err := look.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')`).Scan(&so)
		return err == nil && so
	}, waitMax, 5*time.Millisecond)

	limited, cancel := context.WithTimeout(ctx, waitMax)
	defer cancel()
	for way, publish := range everyWay(t) {
		require.NoError(t, pgx.BeginFunc(limited, pool, func(tx pgx.Tx) error { return publish(limited, tx) }), way)
	}
	notified := make(chan error, 1)
	go func() { notified <- outbox.Notify(limited, pool) }()
	pgtest.Blocked(t, look, hangs) // the test's own premise: a NOTIFY waits
	pgtest.Exec(t, look, `SELECT pg_cancel_backend($1)`, int32(hangs.PgConn().PID()))
	require.NoError(t, <-ended)
	require.NoError(t, <-notified)
}

// Property: while PostgreSQL's queue of notifications is full, because a listener is idle in a
// transaction, transactions that publish commit. Only Notify fails, with an error of its own. Row
// O19 of guarantees.md.
func TestFullNotifyQueueStopsNoTransaction(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	var version int
	require.NoError(t, pgtest.Pool(t).QueryRow(ctx, `SELECT current_setting('server_version_num')::int`).Scan(&version))
	if version < 170000 {
		t.Skip("LOUD SKIP: PostgreSQL below 17 has a queue of 8 GB, which cannot be made smaller")
	}
	cluster := pgtest.Cluster(t, map[string]string{"max_notify_queue_pages": "64"})
	pgtest.Migrate(t, cluster.URL)
	pool, listener := newPool(t, cluster.URL), pgtest.Connect(t, cluster.URL)
	pgtest.Exec(t, listener, `LISTEN another`)
	pgtest.Exec(t, listener, `BEGIN`)
	pgtest.Exec(t, listener, `SELECT 1`)
	var full *pgconn.PgError
	for n := 0; ; n++ {
		_, err := pool.Exec(ctx, `SELECT pg_notify('another', $1 || repeat('x', 7900))`, fmt.Sprint(n))
		if errors.As(err, &full) {
			break
		}
		require.NoError(t, err)
		require.Less(t, n, 10_000, "the queue does not become full")
	}
	require.Contains(t, full.Message, "NOTIFY queue")
	for range 70 { // a small notification may still fit into the last page
		if err := outbox.Notify(ctx, pool); err != nil {
			require.ErrorContains(t, err, "notify the relays")
			full = nil
			break
		}
	}
	require.Nil(t, full, "the test's own premise: Notify fails")
	for way, publish := range everyWay(t) {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return publish(ctx, tx) }), way)
	}
	require.Equal(t, 3, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox`))
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox_scheduled`))
}
