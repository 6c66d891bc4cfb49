package integration_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
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
	pool := open(t, d.URL)
	createWorkload(t, pool)
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
