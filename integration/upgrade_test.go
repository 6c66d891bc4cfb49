package integration_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// previousRelease is the last commit with schema version 4.
const previousRelease, previousVersion = "d9ff45ebb53974b91d24d8082bf6dcc50eb90894", 4

const (
	oldRelease = "old"
	newRelease = "new"
)

// upgrade is a database and a topic that programs of two releases share, see testdata/upgrade.
type upgrade struct {
	binaries map[string]string // by release
	url      string
	pool     *pgxpool.Pool
	brokers  []string
	order    int // of the consumers: 0 by partition, 1 by key, 2 unordered
}

// upgradeTables: faults say what happens to messages of a key with the old release, calls are
// foreign calls.
const upgradeTables = workload + `
CREATE TABLE faults (key text PRIMARY KEY, fault text NOT NULL);
CREATE TABLE calls (n bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL, version int NOT NULL, release text NOT NULL, call uuid NOT NULL);
CREATE TABLE runs (n bigint GENERATED ALWAYS AS IDENTITY, elsewhere boolean NOT NULL, error text NOT NULL)`

// Property: programs of the previous release that run when the schema is migrated lose nothing,
// double nothing and call nothing twice under two keys, beside programs of this one and replaced by
// them. Row S14 of guarantees.md.
func TestUpgradeFromThePreviousRelease(t *testing.T) {
	longtest.Only(t, "it builds an earlier release")
	t.Parallel()
	binaries := map[string]string{oldRelease: buildPrevious(t), newRelease: build(t, ".", "./testdata/upgrade")}
	run := func(name string, order int, test func(*testing.T, upgrade)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := upgrade{binaries: binaries, url: pgtest.EmptyDatabase(t), brokers: kafkatest.Brokers(t), order: order}
			u.pool = open(t, u.url)
			u.exec(t, upgradeTables)
			u.migrate(t, oldRelease, previousVersion)
			test(t, u)
		})
	}
	run("the previous release forgets no claims any more", 0, testPreviousReleaseForgetsNothing)
	for order, name := range []string{"by partition", "by key", "unordered"} {
		if name != "unordered" { // which has no order of effects
			run("two releases side by side, "+name, order, testReleasesSideBySide)
		}
		run("foreign calls, killed before the migration, "+name, order, testCallsBeforeTheMigration)
		run("foreign calls, killed after the migration, "+name, order, testCallsAfterTheMigration)
	}
}

// buildPrevious builds testdata/upgrade in the tree of the previous release.
func buildPrevious(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "git", "-C", "..", "archive", "--format=tar", previousRelease).Output()
	if err != nil {
		// An archive of the sources, or a shallow clone, has no history to build. A whole clone has
		// the commit.
		if shallow, gitErr := exec.CommandContext(t.Context(), "git", "-C", "..", "rev-parse", "--is-shallow-repository").Output(); gitErr == nil {
			require.Equal(t, "true", strings.TrimSpace(string(shallow)), "this clone is whole, and commit %s is not in it: %v", previousRelease, err)
		}
		t.Skipf("LOUD SKIP: the tests of upgrades need a clone with commit %s: %v", previousRelease, err)
	}
	tree := t.TempDir()
	for files := tar.NewReader(bytes.NewReader(out)); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if header.Typeflag == tar.TypeReg {
			content, err := io.ReadAll(files)
			require.NoError(t, err)
			writeFile(t, filepath.Join(tree, filepath.FromSlash(header.Name)), content)
		}
	}
	source, err := os.ReadFile("testdata/upgrade/main.go")
	require.NoError(t, err)
	writeFile(t, filepath.Join(tree, "upgrade", "main.go"), source)
	return build(t, tree, "./upgrade")
}

func writeFile(t *testing.T, path string, content []byte) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, content, 0o600))
}

func build(t *testing.T, dir, path string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "upgrade")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", binary, path)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return binary
}

func (u upgrade) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := u.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// start runs a program of a release until the test ends.
func (u upgrade) start(t *testing.T, release, role, topic string) *process {
	t.Helper()
	spec, err := json.Marshal(map[string]any{
		"Role": role, "Release": release, "URL": u.url, "Brokers": u.brokers, "Topic": topic, "SessionTimeout": sessionTimeout, "Order": u.order,
	})
	require.NoError(t, err)
	cmd := exec.Command(u.binaries[release])
	cmd.Env = append(os.Environ(), "EFFECTONCE_UPGRADE="+string(spec))
	return started(t, cmd, release+" "+role)
}

// migrate brings the tables with a release, whose version this has to be.
func (u upgrade) migrate(t *testing.T, release string, version int) {
	t.Helper()
	u.migrated(t, u.start(t, release, "migrate", ""), version)
}

func (u upgrade) migrated(t *testing.T, p *process, version int) {
	t.Helper()
	<-p.done
	require.NoError(t, p.err, p.log)
	state, err := migrations.Status(t.Context(), u.pool, migrations.Options{})
	require.NoError(t, err)
	require.Equal(t, version, state.Current)
}

func latestVersion(t *testing.T) int {
	t.Helper()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	require.Greater(t, len(all), previousVersion)
	return len(all)
}

// by counts the effects that a process had.
func (u upgrade) by(ctx context.Context, t *testing.T, p *process) int {
	t.Helper()
	return count(ctx, t, u.pool, fmt.Sprintf(`SELECT count(*) FROM effects WHERE worker = %d`, p.cmd.Process.Pid))
}

// Property: a consumer of the previous release continues while the schema is migrated and after it.
// A consumer of this release joins its group and takes over when it ends. Every message has its
// effect once, in the order of its key, though all messages are redelivered.
func testReleasesSideBySide(t *testing.T, u upgrade) {
	t.Helper()
	ctx := t.Context()
	topic := kafkatest.TopicAt(t, u.brokers, 6)
	older := u.start(t, oldRelease, "consume", topic)
	produce := func(round string) { producedAt(t, u.brokers, u.pool, topic, round, 12, 10, 5) }
	produce("before")
	allHandled(ctx, t, u.pool, 30*time.Second)

	migration := u.start(t, newRelease, "migrate", "")
	for n := 0; !migration.ended(); n++ {
		produce(fmt.Sprintf("meanwhile %d ", n))
	}
	u.migrated(t, migration, latestVersion(t))
	had := u.by(ctx, t, older)
	produce("after")
	handled(ctx, t, u.pool, 30*time.Second)
	require.Greater(t, u.by(ctx, t, older), had, "the previous release goes on")

	newer := u.start(t, newRelease, "consume", topic)
	again := kafkatest.ReadAll(t, topic)
	both := func() (bool, any) {
		old, young := u.by(ctx, t, older), u.by(ctx, t, newer)
		produce(fmt.Sprintf("beside %d ", old+young))
		allHandled(ctx, t, u.pool, 30*time.Second)
		old, young = u.by(ctx, t, older)-old, u.by(ctx, t, newer)-young
		return old > 0 && young > 0, fmt.Sprintf("%d by the previous release, %d by this one", old, young)
	}
	eventually(t, 2*time.Minute, "both releases have effects", both)
	duplicates(t, u.brokers, again)
	produce("behind duplicates")
	handled(ctx, t, u.pool, 30*time.Second)
	require.NoError(t, older.terminate(), "it had no trouble")
	require.NotContains(t, older.log.String(), "level=ERROR")
	duplicates(t, u.brokers, again)
	produce("alone")
	handled(ctx, t, u.pool, 30*time.Second)
	require.NoError(t, newer.terminate())
	require.NotContains(t, newer.log.String(), "level=ERROR")
	require.Zero(t, count(ctx, t, u.pool, `SELECT count(*) FROM effectonce.parked_messages`))
	require.ErrorContains(t, u.refused(t, topic), "exit status 1")
}

// refused starts a program of the previous release once more: it does not know which newer schemas
// it works with.
func (u upgrade) refused(t *testing.T, topic string) error {
	t.Helper()
	p := u.start(t, oldRelease, "consume", topic)
	<-p.done
	require.Contains(t, p.log.String(), "database schema is too new")
	return p.err
}

// duplicates produces records again, each to its partition.
func duplicates(t *testing.T, brokers []string, records []*kgo.Record) {
	t.Helper()
	client := kafkatest.ClientAt(t, brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	var again []*kgo.Record
	for _, r := range records {
		again = append(again, &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value, Headers: r.Headers, Timestamp: r.Timestamp})
	}
	require.NoError(t, client.ProduceSync(t.Context(), again...).FirstErr())
}

// charge produces a message to a partition, and with it, so that they share a batch, others before
// it. It says what happens to it with the previous release.
func (u upgrade) charge(t *testing.T, topic string, partition int32, key, fault string, before ...string) {
	t.Helper()
	u.fault(t, key, fault)
	var records []*kgo.Record
	for _, key := range append(before, key) {
		body, err := json.Marshal(event{key, 1})
		require.NoError(t, err)
		u.exec(t, `INSERT INTO versions VALUES ($1, 1)`, key)
		records = append(records, &kgo.Record{
			Topic: topic, Partition: partition, Key: []byte(key), Value: body,
			Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte("charge " + key)}},
		})
	}
	client := kafkatest.ClientAt(t, u.brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(100*time.Millisecond))
	require.NoError(t, client.ProduceSync(t.Context(), records...).FirstErr())
}

// later are the keys behind a message that hangs. Each goes to one of four workers, by chance: not
// all to that which hangs.
const later = 12

// hang has the previous release call for messages and wait for the answer: of one, whose batch has
// another one before it, and of later ones where the partition has several workers. It returns
// which are sure to be called again.
func (u upgrade) hang(t *testing.T, topic string, partition int32) (again []string) {
	t.Helper()
	const first, killed = "rolled back with a batch", "killed in the call"
	u.charge(t, topic, partition, killed, "hang", first)
	u.called(t, killed, 1, 1)
	u.called(t, first, 1, 1)
	if u.order == 0 {
		return []string{killed, first}
	}
	for n := range later {
		u.charge(t, topic, partition, fmt.Sprint("killed in a later call ", n), "hang")
	}
	var behind string
	eventually(t, 30*time.Second, "a call of another worker", func() (bool, any) {
		err := u.pool.QueryRow(t.Context(), `SELECT coalesce(min(key), '') FROM calls WHERE key LIKE 'killed in a later call %'`).Scan(&behind)
		require.NoError(t, err)
		return behind != "", behind
	})
	return []string{killed, behind}
}

func (u upgrade) fault(t *testing.T, key, fault string) {
	t.Helper()
	u.exec(t, `INSERT INTO faults VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET fault = excluded.fault`, key, fault)
}

// handBack is what the documentation says operators do with a parked message.
func (u upgrade) handBack(t *testing.T, key string) {
	t.Helper()
	tag, err := u.pool.Exec(t.Context(), `UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp(), released_at = NULL
		WHERE state = 'parked' AND convert_from(key, 'UTF8') = $1`, key)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
}

// called waits for so many calls for a message by the previous release, under so many keys.
func (u upgrade) called(t *testing.T, key string, calls, keys int) {
	t.Helper()
	eventually(t, 30*time.Second, "foreign calls for "+key, func() (bool, any) {
		var n, different int
		err := u.pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT call) FROM calls WHERE key = $1 AND release = 'old'`, key).Scan(&n, &different)
		require.NoError(t, err)
		return n >= calls && different == keys, fmt.Sprintf("%d calls, %d keys", n, different)
	})
}

func (u upgrade) parked(t *testing.T, key string) {
	t.Helper()
	eventually(t, 30*time.Second, key+" is parked", func() (bool, any) {
		var n int
		err := u.pool.QueryRow(t.Context(), `SELECT count(*) FROM effectonce.parked_messages WHERE state = 'parked' AND convert_from(key, 'UTF8') = $1`, key).Scan(&n)
		require.NoError(t, err)
		return n == 1, n
	})
}

// requireSameKeys: the foreign calls of this release have the keys of the last ones of the previous
// release.
func (u upgrade) requireSameKeys(t *testing.T, keys ...string) {
	t.Helper()
	within := func(release, key string) [][16]byte {
		rows, err := u.pool.Query(t.Context(), `SELECT call FROM calls WHERE release = $1 AND key = $2 ORDER BY n DESC`, release, key)
		require.NoError(t, err)
		calls, err := pgx.CollectRows(rows, pgx.RowTo[[16]byte])
		require.NoError(t, err)
		return calls
	}
	for _, key := range keys {
		t.Run(key, func(t *testing.T) {
			last, next := within(oldRelease, key), within(newRelease, key)
			require.NotEmpty(t, last)
			require.NotEmpty(t, next)
			for _, call := range next {
				require.Equal(t, last[0], call, "a call is made again under another key")
			}
		})
	}
}

// Property: a foreign call that a program of the previous release made before the migration is made
// again by this release under the same key: where the process was killed in the call, where the
// call failed, and where the message was parked or tried again since. A1.
func testCallsBeforeTheMigration(t *testing.T, u upgrade) {
	t.Helper()
	ctx := t.Context()
	topic := kafkatest.TopicAt(t, u.brokers, 4)
	older := u.start(t, oldRelease, "consume", topic)
	const fails, parked, retried = "failed", "parked", "parked, then tried again"
	u.charge(t, topic, 0, fails, "fail")
	u.charge(t, topic, 1, parked, "refuse")
	u.charge(t, topic, 2, retried, "refuse")
	u.called(t, fails, 1, 1)
	u.parked(t, parked)
	u.parked(t, retried)
	u.fault(t, retried, "fail")
	u.handBack(t, retried)
	u.called(t, retried, 3, 2) // the previous release has another key then
	hung := u.hang(t, topic, 3)

	migration := u.start(t, newRelease, "migrate", "")
	eventually(t, 30*time.Second, "the migration waits for the transaction of the call", func() (bool, any) {
		return bytes.Contains([]byte(migration.log.String()), []byte("migration waits for a lock")), migration.log
	})
	older.kill()
	u.migrated(t, migration, latestVersion(t))

	newer := u.start(t, newRelease, "consume", topic)
	u.handBack(t, parked)
	handled(ctx, t, u.pool, 60*time.Second)
	u.requireSameKeys(t, append(hung, fails, parked, retried)...)
	require.NoError(t, newer.terminate())
}

// Property: the same for what the previous release does after the migration, while it is still
// running. A1.
func testCallsAfterTheMigration(t *testing.T, u upgrade) {
	t.Helper()
	ctx := t.Context()
	topic := kafkatest.TopicAt(t, u.brokers, 4)
	older := u.start(t, oldRelease, "consume", topic)
	const fails, parked, retried = "failed", "parked", "parked before, killed in a retry"
	u.charge(t, topic, 2, retried, "refuse")
	u.parked(t, retried)
	u.migrate(t, newRelease, latestVersion(t))

	u.charge(t, topic, 0, fails, "fail")
	u.charge(t, topic, 1, parked, "refuse")
	u.called(t, fails, 1, 1)
	u.parked(t, parked)
	u.fault(t, retried, "hang")
	u.handBack(t, retried)
	u.called(t, retried, 2, 2)
	hung := u.hang(t, topic, 3)
	older.kill()

	newer := u.start(t, newRelease, "consume", topic)
	u.handBack(t, parked)
	handled(ctx, t, u.pool, 60*time.Second)
	u.requireSameKeys(t, append(hung, fails, parked, retried)...)
	require.NoError(t, newer.terminate())
}

// Property: a program of the previous release, which forgets claims without a note, forgets none
// from the migration on, and one that is running learns it by its lease.
func testPreviousReleaseForgetsNothing(t *testing.T, u upgrade) {
	t.Helper()
	ctx := t.Context()
	u.exec(t, `INSERT INTO effectonce.consumers (id, name, consumer_group, topics, dedup_window) OVERRIDING SYSTEM VALUE VALUES (1, 'shop', 'shop', '{orders}', interval '1 hour')`)
	claim := func() {
		u.exec(t, `INSERT INTO effectonce.processed_messages (message_id, consumer, processed_at)
			SELECT effectonce.uuid_floor(at), 1, at FROM generate_series(2, 40, 2) n CROSS JOIN LATERAL (SELECT clock_timestamp() - make_interval(days => n) AS at) a`)
	}
	claims := func() int { return count(ctx, t, u.pool, `SELECT count(*) FROM effectonce.processed_messages`) }
	runs := func() int { return count(ctx, t, u.pool, `SELECT count(*) FROM runs`) }
	claim()
	older := u.start(t, oldRelease, "maintain", "")
	eventually(t, 30*time.Second, "the previous release forgets claims", func() (bool, any) { return claims() == 0, claims() })

	u.migrate(t, newRelease, latestVersion(t))
	before := runs() + 1 // one may have begun before the migration
	eventually(t, 30*time.Second, "a run ends", func() (bool, any) { return runs() > before, runs() })
	claim()
	had := claims()
	before = runs()
	eventually(t, 30*time.Second, "more runs", func() (bool, any) { return runs() > before+5, runs() })
	require.Equal(t, had, claims())
	require.Equal(t, 20, had)
	require.Zero(t, count(ctx, t, u.pool, fmt.Sprintf(`SELECT count(*) FROM runs WHERE n > %d AND NOT elsewhere`, before)))
	require.NoError(t, older.terminate())
}
