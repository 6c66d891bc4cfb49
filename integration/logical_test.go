package integration_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/relay"
)

// emptySQL takes away what the migrations put into tables: the subscription brings it.
const emptySQL = `DO $$
DECLARE
  names text;
BEGIN
  SELECT string_agg(oid::regclass::text, ', ') INTO names FROM pg_class
  WHERE relkind IN ('r', 'p') AND relnamespace IN ('effectonce'::regnamespace, 'public'::regnamespace);
  EXECUTE 'TRUNCATE ' || names;
END
$$`

// sequencesSQL is run by the old server and makes the statements for the new one.
const sequencesSQL = `SELECT format('SELECT setval(%L, %s);', format('%I.%I', schemaname, sequencename), last_value) FROM pg_sequences WHERE last_value IS NOT NULL`

// Property: an upgrade by logical replication between two servers, as docs/how-to/upgrade.md
// describes it, loses no row that was written before, during or after it, and keeps the order of
// each key. That also holds if the sequences are forgotten, with rows in outbox_dead and published
// rows that were removed during the upgrade. Rows O22, O40 of guarantees.md.
func TestUpgradeByLogicalReplication(t *testing.T) {
	longtest.Only(t, "two clusters and a logical copy, several times")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		either(t, "sequences set", "sequences forgotten", func(t *testing.T, forgotten bool) {
			t.Helper()
			u := logicalCopy{child: child{Role: "relay", ExactlyOnce: exactly, Shards: 2, Lease: time.Second, Brokers: kafkatest.Brokers(t)}}
			u.prepare(t)
			u.copy(t)
			u.cutOver(t, forgotten)
		})
	})
}

// embedded starts a server that another one reaches at its address: containers have their own
// loopback.
func embedded(t *testing.T, parameters map[string]string) *servers.Postgres {
	t.Helper()
	p, err := servers.StartPostgres(t.Context(), servers.PostgresOptions{Own: true, Embedded: true, Parameters: parameters})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Stop(context.WithoutCancel(t.Context())) })
	return p
}

// logicalCopy is an upgrade from a server to another.
type logicalCopy struct {
	child
	from, to *pgxpool.Pool
	writers  writers
	missing  string // topic
	relay    *process
}

func (u *logicalCopy) prepare(t *testing.T) {
	t.Helper()
	old := embedded(t, map[string]string{"wal_level": "logical"})
	u.URL = old.URL
	pgtest.Migrate(t, u.URL)
	u.from = open(t, u.URL)
	createWorkload(t, u.from)
	u.missing = kafkatest.UnusedTopic(t)
	u.writers = writers{goroutines: 4, transactions: 200, keys: 6, topic: kafkatest.Topic(t, 2), seed: 5}
	u.relay = start(t, u.child)
	u.writers.run(t.Context(), t, u.from)
	u.insert(t, u.from, "held")
	requirePublished(t, u.from, u.writers.topic)
	eventually(t, "the floor moves", func() (bool, any) {
		u.insert(t, u.from, "behind")
		floor := count(t.Context(), t, u.from, `SELECT min(floor) FROM effectonce.outbox_progress_now`)
		return floor > 100, floor
	})
}

func (u *logicalCopy) insert(t *testing.T, pool *pgxpool.Pool, payload string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', $2)`, u.missing, []byte(payload))
	require.NoError(t, err)
}

// copy copies the database while the old one works.
func (u *logicalCopy) copy(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	next := embedded(t, nil)
	pgtest.Migrate(t, next.URL)
	u.to = open(t, next.URL)
	createWorkload(t, u.to)
	_, err := u.to.Exec(ctx, emptySQL)
	require.NoError(t, err)
	_, err = u.from.Exec(ctx, `CREATE PUBLICATION upgrade FOR ALL TABLES`)
	require.NoError(t, err)
	writing := make(chan error, 1)
	during := u.writers
	during.seed = 6
	go func() { writing <- during.write(ctx, u.from) }()
	_, err = u.to.Exec(ctx, fmt.Sprintf(`CREATE SUBSCRIPTION upgrade CONNECTION '%s' PUBLICATION upgrade`, u.URL))
	require.NoError(t, err)
	eventually(t, "all tables are copied", func() (bool, any) {
		n := count(ctx, t, u.to, `SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'`)
		return n == 0, n
	})
	require.NoError(t, <-writing)
	u.URL = next.URL
}

// cutOver stops what runs on the old server, waits until the new one has all of it, and starts
// there.
func (u *logicalCopy) cutOver(t *testing.T, forgotten bool) {
	t.Helper()
	ctx := t.Context()
	require.NoError(t, u.relay.terminate())
	u.writers.transactions, u.writers.seed = 40, 7
	u.writers.run(ctx, t, u.from) // rows that the old relay never saw
	var last string
	require.NoError(t, u.from.QueryRow(ctx, `SELECT pg_current_wal_lsn()::text`).Scan(&last))
	eventually(t, "the new server has what the old one has", func() (bool, any) {
		var there bool
		require.NoError(t, u.from.QueryRow(ctx, `SELECT coalesce(bool_and(replay_lsn >= $1::text::pg_lsn), false) FROM pg_stat_replication WHERE application_name = 'upgrade'`, last).Scan(&there))
		return there, last
	})
	rows, err := u.from.Query(ctx, sequencesSQL)
	require.NoError(t, err)
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	_, err = u.to.Exec(ctx, `DROP SUBSCRIPTION upgrade`)
	require.NoError(t, err)
	for _, statement := range statements {
		if !forgotten {
			_, err := u.to.Exec(ctx, statement)
			require.NoError(t, err)
		}
	}
	if forgotten {
		// Rows of before, unpublished, with the numbers that the sequence gives next, would refuse
		// writers: new rows go elsewhere.
		_, err := u.to.Exec(ctx, `SELECT setval('effectonce.outbox_slot', (coalesce(pg_sequence_last_value('effectonce.outbox_slot'), 0) + 1) % 4)`)
		require.NoError(t, err)
	}
	state, err := relay.ReadSequences(ctx, u.to, "")
	require.NoError(t, err)
	require.Equal(t, forgotten, state.Behind)
	u.writers.seed = 8
	u.writers.run(ctx, t, u.to)
	u.insert(t, u.to, "after")
	r := start(t, u.child)
	if forgotten {
		_, err := relay.Repair(ctx, u.to, relay.RepairOptions{Who: "ana", Why: "sequences were not copied"})
		require.NoError(t, err)
	}
	u.writers.seed = 9
	u.writers.run(ctx, t, u.to)
	requireKept(t, u.to, u.writers.topic)
	kafkatest.CreateTopic(t, u.missing, 1)
	eventually(t, "what waited is published", func() (bool, any) {
		got := distinct(t, u.missing)
		return len(got) == 3, got
	})
	require.Equal(t, []string{"held", "behind", "after"}, distinct(t, u.missing))
	eventually(t, "nothing waits", func() (bool, any) {
		n := count(ctx, t, u.to, `SELECT count(*) FROM effectonce.outbox_dead`)
		return n == 0, n
	})
	require.NoError(t, r.terminate())
	state, err = relay.ReadSequences(ctx, u.to, "")
	require.NoError(t, err)
	require.False(t, state.Behind)
}
