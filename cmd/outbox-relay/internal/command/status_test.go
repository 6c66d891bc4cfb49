package command_test

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/command"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

const insertTwo = "INSERT INTO effectonce.outbox (topic) VALUES ('t'), ('t')"

// The exit status and both forms of output say the same, and what is tolerated is well.
func TestStatusSaysWhatWaits(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.Regexp(t, `well\n$`, runOn(t, address, "status", "--interval", "10ms").stdout)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic, created_at) SELECT 't', clock_timestamp() - interval '5 min' FROM generate_series(1, 2)")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() - interval '1 hour', 't')")
	execSQL(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, owner, lease_until, epoch)
		VALUES ('default', 0, E'host-\x1b[31m', clock_timestamp() + interval '1 hour', 3)`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, published) VALUES ('default', 0, 1, 3, 70)`)
	_, err := conn.PgConn().Exec(t.Context(), parkSQL).ReadAll()
	require.NoError(t, err)
	r := runOn(t, address, "status", "--interval", "10ms")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^default +0 +2 +\S+ +0 +70 +0 +"host-\\x1b\[31m" +(1h|59m\d+s) +3$`, r.stdout)
	assert.Regexp(t, `(?m)^scheduled for later: 1, 1 of them overdue, the oldest for 1h[0m\ds]*$`, r.stdout)
	assert.NotRegexp(t, `(?m)^well$`, r.stdout)
	assert.Equal(t, false, runOn(t, address, "status", "--interval", "0s", "--json").object(t)["well"])
	assert.Equal(t, 1, runOn(t, address, "status", "--interval", "0s", "--parked-max", "6").code)
	assert.Equal(t, 1, runOn(t, address, "status", "--interval", "0s", "--age-max", "2h").code)
	assert.Zero(t, runOn(t, address, "status", "--interval", "0s", "--age-max", "2h", "--parked-max", "6").code)
	assert.Contains(t, runOn(t, address, "status", "--interval", "0s", "--relay", "other").stdout, `relay "other": rows wait and it never ran: start "outbox-relay run"`)
}

// A consumer that waits for a transaction of another program is not called slow: the transaction is
// named, and how to end it.
func TestStatusNamesAnOpenTransaction(t *testing.T) {
	t.Parallel()
	address, topic := pgtest.Database(t), kafkatest.Topic(t, 1)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('c', 'c', ARRAY[$1])", topic)
	execSQL(t, conn, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, record_time, owner, released) VALUES ('c', $1, 0, 0, now() - interval '1 h', 'o', false)`, topic)
	assert.Contains(t, runKafka(t, address, "status", "--interval", "0s").stdout, "is slow, hangs or died, or a transaction")
	other := kafkatest.Client(t, kgo.TransactionalID(topic))
	require.NoError(t, other.BeginTransaction())
	require.NoError(t, other.ProduceSync(t.Context(), &kgo.Record{Topic: topic}).FirstErr())
	r := runKafka(t, address, "status", "--interval", "0s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "a transaction is open from offset 0 on")
	assert.Contains(t, r.stdout, "abort --topic "+topic+" --partition 0 --start-offset 0")
	assert.NotContains(t, r.stdout, "is slow")
}

// Without the tables there is one line with the remedy.
func TestStatusWithoutSchema(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	r := runOn(t, address, "status")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "error: schema effectonce is not installed in this database: run \"outbox-relay migrate up\"\n", r.stderr)
	assert.Equal(t, r, runOn(t, address, "run", "--brokers", "127.0.0.1:1"))
}

// Property: a topic that neither exists nor has rows is not paused, unless that is forced; rows
// that wait anywhere are enough, and so is Kafka's word.
func TestPauseOfAnUnknownTopicIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, burySQL)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('in-outbox')")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES ('2999-01-01', 'in-scheduled')")
	r := runOn(t, address, "topics", "pause", "in-outbox", "misspelt", "--wait", "0s")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "topic misspelt has no rows; with --brokers Kafka is asked whether it exists: nothing was paused; --force pauses it anyway")
	assert.Contains(t, runOn(t, address, "topics", "pause", "in-outbox", "in-scheduled", "orders", "--wait", "0s").stdout, "3 topics paused")
	assert.Contains(t, runKafka(t, address, "topics", "pause", kafkatest.Topic(t, 1), "--wait", "0s").stdout, "1 topic paused")
}

// Property: a pause whose wait was interrupted is reported as such, and not as one that took too
// long.
func TestPauseIsInterrupted(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 1)")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until, obeys) VALUES ('default', 'a', 'infinity', '{}')")
	ctx, interrupt := context.WithCancel(t.Context())
	stdout, done := newOutput(), make(chan int, 1)
	go func() {
		done <- command.Execute(ctx, []string{"topics", "pause", "orders", "--force"}, alone(map[string]string{"DATABASE_URL": address}), stdout, newOutput())
	}()
	paused := func() (yes bool) {
		assert.NoError(t, conn.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM effectonce.outbox_paused)").Scan(&yes))
		return yes
	}
	testwait.True(t, "the pause is stored", paused)
	interrupt()
	assert.Equal(t, 1, testwait.Chan(t, "the command's end", done))
	assert.Contains(t, stdout.String(), "1 topic paused; the pause was not confirmed before the interruption: rows read before it may still be published")
}

// Property: the number of shards changes while no replica runs, and not before; the error names the
// replica. The change is recorded.
func TestShardsCommand(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.Contains(t, runOn(t, address, "shards", "2").stderr, "no relay of this name ever ran")
	execSQL(t, conn, `INSERT INTO effectonce.outbox_relays (relay) VALUES ('default')`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until) VALUES ('default', 'pod-1', 'infinity')`)
	r := runOn(t, address, "shards", "2")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "stop the relays first (pod-1)")
	execSQL(t, conn, `DELETE FROM effectonce.outbox_replicas`)
	assert.Equal(t, "relay default had 1 shard and has 2: start its replicas\n", runOn(t, address, "shards", "2", "--why", "load").stdout)
	assert.Equal(t, "relay default has 2 shards\n", runOn(t, address, "shards", "2").stdout)
	assert.Equal(t, map[string]any{"relay": "default", "before": 2.0, "shards": 4.0}, runOn(t, address, "shards", "4", "--json").object(t))
	assert.Regexp(t, `relay.shards +.*load`, runOn(t, address, "actions", "list").stdout)
}

// severities reads "doctor --json": what each check found worst.
func severities(t *testing.T, r result) map[string]string {
	t.Helper()
	worst := map[string]string{}
	failed := false
	for _, f := range r.object(t)["findings"].([]any) {
		finding := f.(map[string]any)
		check, severity := finding["check"].(string), finding["severity"].(string)
		if severity != "ok" {
			assert.NotEmpty(t, finding["remedy"], finding)
		}
		failed = failed || severity == "fail"
		if worst[check] != "fail" {
			worst[check] = severity
		}
	}
	assert.Equal(t, !failed, r.object(t)["well"])
	assert.Equal(t, failed, r.code == 1)
	return worst
}

// Every check runs where everything is there, and the topics of rows are among them.
func TestDoctorChecksEverything(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), "INSERT INTO effectonce.outbox (topic) VALUES ('never-created')")
	progress := kafkatest.Topic(t, 1, "cleanup.policy", "compact", "segment.bytes", "8388608", "delete.retention.ms", "600000")
	found := severities(t, runOn(t, address, "doctor", "--json", "--brokers", strings.Join(kafkatest.Brokers(t), ","), "--progress-topic", progress))
	delete(found, "durability") // the server that tests share does not sync
	assert.Equal(t, map[string]string{
		"database": "ok", "server": "ok", "writable": "ok", "transactions": "ok", "rights": "ok",
		"schema": "ok", "sequence": "ok", "definitions": "ok", "pooler": "ok", "replication": "ok", "status": "fail", "keys": "ok",
		"brokers": "ok", "topic never-created": "fail", "progress topic " + progress: "ok", "consumers": "ok",
	}, found)
	r := runOn(t, address, "doctor")
	assert.Empty(t, r.stderr)
	assert.Contains(t, r.stdout, "warn  brokers: ")
}

// What is missing stops only the checks that need it, and each says what to do.
func TestDoctorGoesOnWithWhatIsThere(t *testing.T) {
	t.Parallel()
	empty := severities(t, runOn(t, pgtest.EmptyDatabase(t), "doctor", "--json", "--timeout", "2s", "--brokers", "127.0.0.1:1"))
	assert.Equal(t, "fail", empty["schema"])
	assert.Equal(t, "fail", empty["brokers"])
	assert.NotContains(t, empty, "sequence")
	assert.NotContains(t, empty, "rights")

	away := severities(t, runOn(t, "postgres://u@127.0.0.1:1/d", "doctor", "--json", "--brokers", strings.Join(kafkatest.Brokers(t), ",")))
	assert.Equal(t, map[string]string{"database": "fail", "brokers": "ok"}, away)
}

// Property: a server that refuses TLS and then stays silent is reported as not answering in time:
// TLS is not the problem.
func TestDoctorNamesTheCauseOfSilence(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				request := make([]byte, 8)
				if _, err := io.ReadFull(conn, request); err == nil && request[7] == 0x2f { // SSLRequest
					_, _ = conn.Write([]byte("N"))
				}
				_, _ = io.Copy(io.Discard, conn)
			}()
		}
	}()
	r := runOn(t, "postgres://u@"+listener.Addr().String()+"/d?sslmode=prefer", "doctor", "--timeout", "300ms")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "no answer in time")
	assert.NotContains(t, r.stdout, "TLS")
}

// Property: a sequence that went back is not well in the status, a failure with the exact command
// for the doctor, described by repair --dry-run, which changes nothing, and repaired by repair,
// which is written down. Row O40 of guarantees.md.
func TestSequenceIsRepaired(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	r := runOn(t, address, "repair", "--dry-run")
	assert.Zero(t, r.code, r.stderr)
	assert.Equal(t, "nothing to repair: rows have numbers up to 0, ticks up to 0\n", r.stdout)
	assert.Contains(t, runOn(t, address, "doctor").stdout, "ok    status: ")
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic) SELECT 't' FROM generate_series(1, 7)`)
	execSQL(t, conn, `TRUNCATE effectonce.outbox RESTART IDENTITY`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, lease_until) VALUES ('default', 0, clock_timestamp() + interval '1 hour')`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, floor) VALUES ('default', 0, 1, 0, 7)`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox (topic) VALUES ('t')`)
	for _, name := range []string{"doctor", "status"} {
		r := runOn(t, address, name)
		assert.Equal(t, 1, r.code)
		assert.Contains(t, r.stdout, "the sequence of outbox.seq is at 1, and 7 was given before")
		assert.Contains(t, r.stdout, "outbox-relay repair")
	}
	r = runOn(t, address, "repair", "--dry-run")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stdout, "the sequence of rows is at 1, the largest known number is 7")
	r = runOn(t, address, "repair", "--by", "ana", "--why", "a copy")
	assert.Zero(t, r.code, r.stderr)
	assert.Contains(t, r.stdout, "repaired: 1 rows got new numbers; the sequence of rows was at 1 and is at 8")
	var seq int64
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT seq FROM effectonce.outbox`).Scan(&seq))
	assert.EqualValues(t, 8, seq)
	assert.Regexp(t, `\(ana\) +outbox.repair +.*a copy`, runOn(t, address, "actions", "list").stdout)
	assert.Equal(t, "nothing to repair\n", runOn(t, address, "repair").stdout)
	assert.NotContains(t, runOn(t, address, "doctor").stdout, "given before")
}

// A dry run says what a run then does; what holds claims back is named; two at a time do not work.
func TestPruneForgetsWhatNobodyNeeds(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	r := runOn(t, address, "prune", "--dry-run")
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "nothing may be forgotten yet\n", r.stdout)

	execSQL(t, conn, "INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window) VALUES ('c', 'g', '{t}', '3 days')")
	execSQL(t, conn, "INSERT INTO effectonce.processed_messages VALUES (effectonce.uuid_floor(clock_timestamp() - interval '6 days'), 1, 0)")
	execSQL(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('g', 't', 4)")
	assert.Contains(t, runOn(t, address, "prune").stdout, "for the position of")
	execSQL(t, conn, "DELETE FROM effectonce.consumer_positions")
	dry := runOn(t, address, "prune", "--dry-run", "--json").object(t)
	assert.Len(t, dry["truncated"], 1)
	assert.NotEmpty(t, dry["dropped"])
	assert.Regexp(t, `(?m)^would forget 1 day: processed_messages_\d{8}$`, runOn(t, address, "prune", "--dry-run").stdout)
	r = runOn(t, address, "prune")
	require.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^forgot 1 day: processed_messages_\d{8}$`, r.stdout)
	assert.Regexp(t, `(?m)^dropped \d days: processed_messages_\d{8}, `, r.stdout)
	assert.Regexp(t, `(?m)^claims up to .* may be forgotten, in whole days$`, r.stdout)
	assert.Nil(t, runOn(t, address, "prune", "--dry-run", "--json").object(t)["dropped"])
	execSQL(t, conn, "UPDATE effectonce.maintenance SET lease_until = clock_timestamp() + interval '1 minute'")
	r = runOn(t, address, "prune")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "another process is pruning\n", r.stdout)
}

// "bench consume --json" ends with one object on stdout that has what scripts look for, and people
// get a table; progress goes to stderr.
func TestBench(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	environment := map[string]string{
		"DATABASE_URL": pgtest.EmptyDatabase(t), "KAFKA_BROKERS": strings.Join(kafkatest.Brokers(t), ","),
	}
	r := run(t, environment, "bench", "consume", "--messages", "2000", "--rounds", "1", "--json")
	require.Zero(t, r.code, r.stderr)
	found := r.object(t)
	for _, key := range []string{"textbook", "no_dedup", "by_id", "by_position", "bytes_per_message", "wal_bytes_per_message", "seconds"} {
		assert.IsType(t, 0.0, found[key], key)
	}
	assert.Contains(t, found["postgres"], "PostgreSQL")
	assert.Contains(t, r.stderr, "round 1\n")
}
