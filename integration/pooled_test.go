package integration_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Property: behind a PgBouncer in transaction mode, with fewer server connections than partitions,
// which are also reset and replaced as it goes, consumers and relays have their effects once and in
// order while they, and PgBouncer, are killed. They wait for connections, they do not deadlock.
func TestEffectsOnceThroughPgBouncer(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		mode, prepared string
		order          consumer.Order
	}{
		"described":                      {describeOnly, "0", consumer.OrderByPartition},
		"described, by key":              {describeOnly, "0", consumer.OrderByKey},
		"described, although prepared":   {describeOnly, "200", consumer.OrderByPartition},
		"prepared":                       {"default_query_exec_mode=cache_statement", "200", consumer.OrderByPartition},
		"prepared, more than are cached": {"default_query_exec_mode=cache_statement", "5", consumer.OrderByPartition},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			rounds := 2
			t.Parallel()
			if name != "described" {
				longtest.Only(t, "processes and a pooler that are killed, five times")
				rounds = 6
			}
			pooled(t, c.mode, c.prepared, child{Order: c.order}, rounds)
		})
	}
}

func pooled(t *testing.T, mode, prepared string, c child, rounds int) {
	t.Helper()
	ctx := t.Context()
	address := pgtest.Database(t)
	settings := []string{"default_pool_size = 2", "server_lifetime = 1", "server_idle_timeout = 1"}
	if !preparesStatements(t) {
		if prepared != "0" {
			t.Skip("LOUD SKIP, with REQUIRE_CONTAINERS=1 as well: this PgBouncer is older than 1.21, as Debian 12's is, and knows no prepared statements in transaction mode")
		}
	} else {
		settings = append(settings, "max_prepared_statements = "+prepared)
	}
	if prepared == "0" {
		settings = append(settings, "server_reset_query_always = 1") // DISCARD ALL after each transaction
	}
	p := newPooler(t, address, settings...)
	db := open(t, address)
	createWorkload(t, db)
	const versions = 100
	topic, forward := kafkatest.Topic(t, 4), kafkatest.Topic(t, 1)
	produced(t, db, topic, 8, versions, 20)
	c.Role, c.URL, c.Brokers = "consumer", p.url(mode), kafkatest.Brokers(t)
	c.Topic, c.Group, c.Forward = topic, topic, forward
	c.BatchMax, c.SessionTimeout, c.IdleTimeout, c.Lease = 10, sessionTimeout, 2*time.Second, 3*time.Second
	r := c
	r.Role = "relay"
	consumers, relays := []*process{start(t, c), start(t, c)}, []*process{start(t, r), start(t, r)}
	for round := range rounds {
		goOn := count(ctx, t, db, `SELECT count(*) FROM effects`) + 1
		eventually(t, "effects go on", func() (bool, any) {
			n := count(ctx, t, db, `SELECT count(*) FROM effects`)
			return n >= min(goOn, 8*versions), n
		})
		switch round % 3 {
		case 0:
			p.kill()
			p.start(t)
		case 1:
			consumers[0].kill()
			consumers = append(consumers[1:], start(t, c))
		case 2:
			relays[0].kill()
			relays = append(relays[1:], start(t, r))
		}
	}
	handled(ctx, t, db)
	for _, m := range consumers {
		require.NoError(t, m.terminate())
	}
	require.Zero(t, count(ctx, t, db, `SELECT count(*) FROM effectonce.parked_messages`))
	require.Equal(t, 8*versions, count(ctx, t, db, `SELECT count(DISTINCT id) FROM effectonce.outbox`))
	requirePublished(t, db, forward)
	for _, m := range relays {
		require.NoError(t, m.terminate())
	}
}

// preparesStatements reports whether PgBouncer knows max_prepared_statements.
func preparesStatements(t *testing.T) bool {
	t.Helper()
	var major, minor int
	_, err := fmt.Sscanf(poolerVersion(t, poolerBinary(t)), "%d.%d", &major, &minor)
	require.NoError(t, err)
	return major > 1 || minor >= 21
}

// Property: a consumer that sends named statements through a pooler that does not know them stops
// or waits, and says why; no message is parked for it, none is lost, and none has its effect twice
// once the setting is fixed.
func TestNamedStatementsBehindPgBouncerCostNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, db := consuming(t, child{}, 4)
	producedAt(t, c.Brokers, db, c.Topic, "k", 5, 40, 10)
	settings := []string{"default_pool_size = 2"}
	if preparesStatements(t) {
		settings = append(settings, "max_prepared_statements = 0")
	}
	p := newPooler(t, c.URL, settings...)
	c.URL = p.url()
	wrong := []*process{start(t, c), start(t, c)}
	eventually(t, "trouble", func() (bool, any) {
		said := wrong[0].log.String() + wrong[1].log.String()
		return strings.Contains(said, "prepared statement"), said
	})
	for _, m := range wrong {
		_ = m.terminate() // it may have ended with the error
	}
	require.Zero(t, count(ctx, t, db, `SELECT count(*) FROM effectonce.parked_messages`))
	c.URL = p.url(describeOnly)
	right := start(t, c)
	handled(ctx, t, db)
	require.NoError(t, right.terminate())
}

// Property: migrations that are run through a pooler all the same, by several processes at once,
// are never half done: each that fails is rolled back, and a run without the pooler finds or makes
// the whole schema.
func TestMigrationsThroughPgBouncerAreNeverHalfDone(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	p := newPooler(t, address, "default_pool_size = 3")
	var group errgroup.Group
	for range 6 {
		group.Go(func() error {
			conn, err := pgx.Connect(t.Context(), p.url(describeOnly))
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close(t.Context()) }()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_ = migrations.Up(ctx, conn, migrations.Options{}) // its lock may be held by others, too
			return nil
		})
	}
	require.NoError(t, group.Wait())
	p.kill() // with the locks that it kept
	pgtest.Migrate(t, address)
	require.NoError(t, migrations.Check(t.Context(), open(t, address), migrations.Options{}))
}
