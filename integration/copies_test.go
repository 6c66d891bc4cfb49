package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
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

// pgPrograms runs PostgreSQL's own programs. They refuse a server that is newer than they are.
type pgPrograms struct {
	before []string // what comes before the name of a program: nothing, or how to run it in a container
	dir    string   // of the programs
}

const pgImage, pgMajor = "postgres:18", "18"

func newPgPrograms(t *testing.T) pgPrograms {
	t.Helper()
	for _, p := range []pgPrograms{
		{dir: os.Getenv("PG_PROGRAMS")},
		{},
		{dir: "/usr/lib/postgresql/" + pgMajor + "/bin/"},
		{before: []string{"docker", "run", "--rm", "--interactive", "--pull=never", "--network=host", pgImage}},
	} {
		cmd := p.command(t, "pg_dump", "--version")
		if out, err := cmd.Output(); err == nil && strings.Contains(string(out), ") "+pgMajor+".") {
			return p
		}
	}
	if os.Getenv("REQUIRE_CONTAINERS") == "1" {
		t.Fatal("REQUIRE_CONTAINERS=1, but there is no pg_dump of PostgreSQL " + pgMajor + ", not even in the image " + pgImage + ": name its directory in PG_PROGRAMS")
	}
	t.Skip("LOUD SKIP: there is no pg_dump of PostgreSQL " + pgMajor + " on this machine; PG_PROGRAMS names its directory")
	return pgPrograms{}
}

func (p pgPrograms) command(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	if p.dir != "" {
		name = strings.TrimSuffix(p.dir, "/") + "/" + name
	}
	all := append(append(p.before[:len(p.before):len(p.before)], name), args...)
	return exec.CommandContext(t.Context(), all[0], all[1:]...)
}

func (p pgPrograms) run(t *testing.T, input []byte, name string, args ...string) []byte {
	t.Helper()
	cmd := p.command(t, name, args...)
	var complaint bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(input), &complaint
	out, err := cmd.Output()
	require.NoError(t, err, complaint.String())
	return out
}

var (
	restrictLine = regexp.MustCompile(`^\\(un)?restrict `) // has a random word in it
	checkLine    = regexp.MustCompile(`^ +CONSTRAINT \w+ CHECK `)
	parentheses  = strings.NewReplacer("(", "", ")", "")
)

// lines are a whole database as SQL: tables, defaults, constraints, rights, rows, and where
// sequences are. PostgreSQL leaves out parentheses when it reads an expression again.
func (p pgPrograms) lines(t *testing.T, url string) (lines []string) {
	t.Helper()
	for line := range strings.Lines(string(p.run(t, nil, "pg_dump", "--dbname="+url))) {
		switch {
		case restrictLine.MatchString(line):
			continue
		case checkLine.MatchString(line):
			line = parentheses.Replace(line)
		}
		lines = append(lines, line)
	}
	return lines
}

func requireSameLines(t *testing.T, want, got []string) {
	t.Helper()
	for i := range min(len(want), len(got)) {
		require.Equal(t, want[i], got[i], "line %d", i+1)
	}
	require.Len(t, got, len(want))
	require.Greater(t, len(want), 1000)
}

// Property: a dump of PostgreSQL's own pg_dump, taken while a transaction is open and rows wait in
// every place where they can wait (several slots, unpublished, dead, of a paused topic, for later),
// can be restored by pg_restore into an empty database of another cluster, at once or the schema
// first. The database has the same schema, rows and sequences, and the relay continues there with
// all rows. Row O22 of guarantees.md.
func TestDumpOfPostgreSQLsOwn(t *testing.T) {
	longtest.Only(t, "pg_dump and pg_restore, several times")
	t.Parallel()
	programs := newPgPrograms(t)
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		for name, parts := range map[string][]string{"at once": {"--exit-on-error"}, "schema first": {"--schema-only", "--data-only"}} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				d := &dumped{programs: programs, child: child{Role: "relay", ExactlyOnce: exactly, Shards: 3, Lease: time.Second, Brokers: kafkatest.Brokers(t)}}
				d.prepare(t)
				archive := programs.run(t, nil, "pg_dump", "--format=custom", "--dbname="+d.URL)
				before := programs.lines(t, d.URL)
				next := pgtest.Cluster(t, nil)
				for _, part := range parts {
					programs.run(t, archive, "pg_restore", part, "--exit-on-error", "--no-owner", "--dbname="+next.URL)
				}
				requireSameLines(t, before, programs.lines(t, next.URL))
				d.URL = next.URL
				d.goOn(t, open(t, next.URL))
			})
		}
	})
}

// dumped is what waits in the database that is dumped.
type dumped struct {
	child
	programs               pgPrograms
	writers                writers
	paused, missing, later string // topics
	waiting                []string
	below                  []string // IDs of rows that are not to be published again
	before                 map[string]int
}

func (d *dumped) prepare(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	d.URL = pgtest.Cluster(t, nil).URL
	pgtest.Migrate(t, d.URL)
	pool := openWorkload(t, d.URL)
	topic := kafkatest.Topic(t, 2)
	d.paused, d.missing, d.later = kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t), kafkatest.Topic(t, 1)
	d.writers = writers{goroutines: 4, transactions: 200, keys: 6, topic: topic, seed: 5, pauses: true}
	d.writers.run(ctx, t, pool)
	r := start(t, d.child) // not before: the floor of a shard to which no key falls stays where its lease was taken
	requirePublished(t, pool, topic)
	_, err := relay.Pause(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, 0, d.paused)
	require.NoError(t, err)
	d.insert(t, pool, d.missing, "held")
	eventually(t, "the floor moves, a row is dead, one waits for its topic", func() (bool, any) {
		d.waiting = append(d.waiting, fmt.Sprint(len(d.waiting)))
		d.insert(t, pool, d.paused, d.waiting[len(d.waiting)-1]) //nolint:contextcheck // the test's
		floor := count(ctx, t, pool, `SELECT min(floor) FROM effectonce.outbox_progress_now`)
		reasons := count(ctx, t, pool, `SELECT count(DISTINCT reason) FROM effectonce.outbox_dead WHERE reason IN ('paused', 'unknown_topic')`)
		return floor > 100 && reasons == 2, []int{floor, reasons}
	})
	require.NoError(t, r.terminate())
	d.before = occurrences(t, topic)
	d.below = below(t, pool, topic, count(ctx, t, pool, `SELECT min(floor) FROM effectonce.outbox_progress_now`))

	_, err = pool.Exec(ctx, `SELECT setval('effectonce.outbox_slot', 2)`)
	require.NoError(t, err)
	d.writers.transactions, d.writers.seed = 80, 6
	d.writers.run(ctx, t, pool)
	d.waiting = append(d.waiting, "behind")
	d.insert(t, pool, d.paused, "behind")
	_, err = pool.Exec(ctx, `INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint) VALUES (effectonce.uuid_v7(), 1, 0)`)
	require.NoError(t, err)
	_, err = pool.Exec(ctx, `INSERT INTO effectonce.outbox_scheduled (topic, payload, due_at)
		VALUES ($1, 'soon', clock_timestamp() + interval '1 second'), ($1, 'far', clock_timestamp() + interval '1 day')`, d.later)
	require.NoError(t, err)
	require.Equal(t, 2, count(ctx, t, pool, `SELECT count(DISTINCT slot) FROM effectonce.outbox`), "the test's own premise")
	open, err := pool.Begin(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { _ = open.Rollback(ctx) }) // its row is not in the dump
	_, err = open.Exec(ctx, `INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, '{"key":"open","version":1}')`, topic)
	require.NoError(t, err)
}

func (d *dumped) insert(t *testing.T, pool *pgxpool.Pool, topic, payload string) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', $2)`, topic, []byte(payload))
	require.NoError(t, err)
}

// goOn runs the relay where the dump was restored.
func (d *dumped) goOn(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	ctx := t.Context()
	d.writers.seed = 7
	d.writers.run(ctx, t, pool)
	require.Equal(t, 2, count(ctx, t, pool, `SELECT slot FROM effectonce.outbox ORDER BY seq DESC LIMIT 1`), "the slot whose turn it was")
	r := start(t, d.child)
	d.writers.seed = 8
	d.writers.run(ctx, t, pool)
	requireKept(t, pool, d.writers.topic)
	requireNotPublishedAgain(t, d.writers.topic, d.below, d.before, d.ExactlyOnce)
	require.NotContains(t, distinct(t, d.paused), "behind", "it waits for the topic to be resumed")
	_, err := relay.Resume(ctx, pool, relay.Operator{Who: "ana", Why: "test"}, d.paused)
	require.NoError(t, err)
	kafkatest.CreateTopic(t, d.missing, 1)
	for topic, want := range map[string][]string{d.paused: d.waiting, d.missing: {"held"}, d.later: {"soon"}} {
		eventually(t, "what waited is published", func() (bool, any) {
			got := distinct(t, topic)
			return len(got) >= len(want), fmt.Sprint(got, " want ", want)
		})
		require.Equal(t, want, distinct(t, topic))
	}
	eventually(t, "nothing waits", func() (bool, any) {
		n := count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_dead`)
		return n == 0, n
	})
	require.NoError(t, r.terminate())
	require.Equal(t, 1, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_scheduled`))
}

// distinct lists the values of a topic with one partition, in the order of their first occurrences.
func distinct(t *testing.T, topic string) (values []string) {
	t.Helper()
	seen := map[string]bool{}
	for _, record := range kafkatest.ReadAll(t, topic) {
		if v := string(record.Value); !seen[v] {
			seen[v] = true
			values = append(values, v)
		}
	}
	return values
}

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
	u.from = openWorkload(t, u.URL)
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
	u.to = openWorkload(t, next.URL)
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
		_, err := relay.Repair(ctx, u.to, relay.Operator{Who: "ana", Why: "sequences were not copied"})
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
