package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/relay"
)

// expandSQL is what the migration of a next release may do while older programs run: new columns,
// in the middle of what they would read with an asterisk or write without names, and new tables.
const expandSQL = `DO $$
DECLARE
  known regclass;
BEGIN
  FOR known IN SELECT c.oid FROM pg_class c WHERE c.relnamespace = 'effectonce'::regnamespace AND c.relkind IN ('r', 'p')
    AND NOT c.relispartition AND c.relname NOT IN ('schema_version', 'schema_compatibility') LOOP
    EXECUTE format('ALTER TABLE %s ADD COLUMN of_the_next_release text NOT NULL DEFAULT %L, ADD COLUMN unknown bigint', known, 'new');
  END LOOP;
END
$$;
CREATE TABLE effectonce.of_the_next_release (relay text);
UPDATE effectonce.schema_version SET version = version + 1`

// Property: relays that run while the migration of a next release adds columns and tables continue
// in all that they do (publish, bury, release, change shards, recover from failures), lose nothing
// and publish nothing twice. A relay that starts then joins them, unless the schema does not work
// with it. A relay of the next release is refused before the migration. Row S14 of guarantees.md.
func TestRelaysRunOnThroughANextMigration(t *testing.T) {
	longtest.Only(t, "what must not be logged depends on time")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool := t.Context(), open(t, pgtest.Database(t))
		topic, missing, brokers := kafkatest.Topic(t, 2), kafkatest.UnusedTopic(t), kafkatest.Brokers(t)
		createWorkload(t, pool)
		cfg := relay.Config{ExactlyOnce: exactly, Shards: 2, Lease: time.Second}
		stops := []func(){running(t, pool, brokers, cfg), running(t, pool, brokers, cfg)}
		w := writers{goroutines: 3, transactions: 60, keys: 5, topic: topic, seed: 13}
		w.run(ctx, t, pool)
		requirePublished(t, pool, topic)
		execute := func(sql string, args ...any) {
			_, err := pool.Exec(ctx, sql, args...)
			require.NoError(t, err)
		}
		execute(expandSQL)
		stops = append(stops, running(t, pool, brokers, cfg)) // the schema is compatible

		execute(`INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', 'first'), ($1, 'k', 'second')`, missing)
		w.seed = 14
		w.run(ctx, t, pool)
		requirePublished(t, pool, topic)
		kafkatest.CreateTopic(t, missing, 1)
		execute(`INSERT INTO effectonce.outbox_scheduled (topic, key, payload, due_at) VALUES ($1, 'k', 'third', clock_timestamp())`, missing)
		for _, stop := range stops {
			stop()
		}
		_, err := relay.SetShards(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 3)
		require.NoError(t, err)
		running(t, pool, brokers, cfg)
		running(t, pool, brokers, cfg)
		w.seed = 15
		w.run(ctx, t, pool)
		// Leases are taken anew, under other epochs, as after any failure.
		execute(`UPDATE effectonce.outbox_progress SET epoch = epoch + 1, lease_until = NULL, owner = NULL`)
		w.seed = 16
		w.run(ctx, t, pool)
		requirePublished(t, pool, topic)
		eventually(t, "what waited is published", func() (bool, any) {
			got := distinct(t, missing)
			return len(got) == 3, got
		})
		require.Equal(t, []string{"first", "second", "third"}, distinct(t, missing))

		another, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(brokers...)}, cfg)
		require.NoError(t, err)
		execute(`UPDATE effectonce.schema_compatibility SET oldest = 1000`)
		require.ErrorIs(t, another.Run(ctx), migrations.ErrTooNew)
		execute(`UPDATE effectonce.schema_version SET version = version - 2`)
		require.ErrorIs(t, another.Run(ctx), migrations.ErrTooOld)
	})
}
