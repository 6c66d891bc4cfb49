package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// Property: no open transaction of the cluster delays a row that is committed: not one of the same
// database with a transaction ID, nor of another database, nor a prepared one, nor one whose
// savepoint was rolled back, nor a snapshot, nor a writer that is idle with rows of its own. The
// rows of the latter are published, in order, when it ends. Rows O4, O38 of guarantees.md.
func TestOpenTransactionsDelayNoRow(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Cluster(t, map[string]string{"max_prepared_transactions": "5"}) // no other test's transaction ends in it
	pgtest.Migrate(t, cluster.URL)
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, cluster.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	must(t, pool, `CREATE DATABASE another`)
	session := func(database, sql string) *pgx.Conn {
		config := pool.Config().ConnConfig
		config.Database = database
		conn, err := pgx.ConnectConfig(ctx, config)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.PgConn().Conn().Close() })
		_, err = conn.Exec(ctx, sql) // without arguments: several statements
		require.NoError(t, err)
		return conn
	}
	here := pool.Config().ConnConfig.Database
	topic := kafkatest.Topic(t, 1)
	row := func(payload string) string {
		return fmt.Sprintf(`INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('%s', 'k', '%s')`, topic, payload)
	}
	relays := map[string]*relay.Relay{}
	for _, name := range []string{"least", "exactly"} {
		relays[name] = newRelay(t, pool, relay.Config{Name: name, ExactlyOnce: name == "exactly", ProgressTopic: kafkatest.UnusedTopic(t)})
	}
	commits := func(while string) {
		insert(t, pool, topic, "k", while)
		for name, r := range relays {
			require.EqualValues(t, 1, drain(t, r), "%s, beside %s", name, while)
		}
	}
	commits("nothing")
	var ends []*pgx.Conn
	for _, open := range []struct{ what, database, sql string }{
		{"a transaction ID", here, `BEGIN; SELECT pg_current_xact_id()`},
		{"a transaction of another database", "another", `BEGIN; CREATE TABLE busy (n int)`},
		{"a savepoint that was rolled back", here, `BEGIN; SAVEPOINT s; ` + row("never") + `; ROLLBACK TO SAVEPOINT s`},
		{"a snapshot", here, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM effectonce.outbox`},
		{"a prepared transaction", here, `BEGIN; ` + row("prepared") + `; PREPARE TRANSACTION 'here'`},
		{"a prepared transaction of another database", "another", `BEGIN; CREATE TABLE prepared (n int); PREPARE TRANSACTION 'there'`},
		{"an idle writer", here, `BEGIN; ` + row("idle writer")},
	} {
		ends = append(ends, session(open.database, open.sql))
		for range 2 { // the second is read by a tick that knows the bystander as open
			commits(open.what)
		}
	}
	_, err = ends[len(ends)-1].Exec(ctx, `COMMIT`)
	require.NoError(t, err)
	for name, r := range relays {
		require.EqualValues(t, 1, drain(t, r), name)
	}
	session(here, `COMMIT PREPARED 'here'`)
	session("another", `ROLLBACK PREPARED 'there'`)
	for name, r := range relays {
		require.EqualValues(t, 1, drain(t, r), name)
	}
	for _, end := range ends {
		_, err := end.Exec(ctx, `ROLLBACK`) // with a warning where nothing is open
		require.NoError(t, err)
	}
	for name, r := range relays {
		require.Zero(t, drain(t, r), name)
	}
	late := map[string]int{}
	for _, v := range values(t, topic) {
		late[v]++
	}
	require.Equal(t, 2, late["prepared"], "once by each relay")
	require.Equal(t, 2, late["idle writer"])
	require.Zero(t, late["never"])
}

// Property: a lease is a row, and no session's lock: the server ends all sessions of a holder that
// is cut off from it, and no other replica gets the shard before the lease is over by the database's
// clock. Then the rows are published in order. Row O14 of guarantees.md.
func TestLeaseOutlivesItsSessions(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic, network := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1), &cut{}
		config := pool.Config()
		config.ConnConfig.RuntimeParams["application_name"] = "holder"
		config.ConnConfig.DialFunc = network.dial
		starts(t, newRelay(t, pgtest.PoolOf(t, config), relay.Config{ExactlyOnce: exactly, Owner: "holder", Lease: 10 * time.Minute}))
		insert(t, pool, topic, "k", "before")
		await(t, "it publishes", func() bool { return len(values(t, topic)) == 1 })
		require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database WHERE l.locktype = 'advisory' AND d.datname = current_database()`))

		network.away.Store(true)
		const sessions = `FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'holder'`
		must(t, pool, `SELECT pg_terminate_backend(pid) `+sessions)
		await(t, "it has no session", func() bool { return one[int](t, pool, `SELECT count(*) `+sessions) == 0 })
		insert(t, pool, topic, "k", "after")
		another := newRelay(t, pool, relay.Config{ExactlyOnce: exactly, Owner: "another"})
		_, err := another.Drain(ctx)
		require.ErrorIs(t, err, relay.ErrLeaseHeld)
		require.Equal(t, []string{"before"}, values(t, topic))

		must(t, pool, `UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp()`)
		drain(t, another)
		require.Equal(t, []string{"before", "after"}, distinctInOrder(values(t, topic)))
		network.away.Store(false)
		insert(t, pool, topic, "k", "last")
		await(t, "the first one takes part again", func() bool { return strings.HasPrefix(holder(t, pool), "holder ") })
		await(t, "all is published", func() bool { return len(distinctInOrder(values(t, topic))) == 3 })
	})
}

// distinctInOrder are the first occurrences: what was in flight when the sessions ended comes twice.
func distinctInOrder(list []string) (found []string) {
	for _, v := range list {
		if !slices.Contains(found, v) {
			found = append(found, v)
		}
	}
	return found
}
