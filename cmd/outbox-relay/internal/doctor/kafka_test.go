package doctor_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const insertSQL = "INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, convert_to(repeat('x', $2), 'UTF8'))"

func topics(t *testing.T, conn *pgx.Conn) []doctor.Finding {
	t.Helper()
	return doctor.Topics(t.Context(), conn, kadm.NewClient(kafkatest.Client(t)), "effectonce", "")
}

// Every topic that a waiting or a dead row names is checked, and what would stop a row is a failure
// before the relay reaches the row.
func TestTopicsOfRowsAreChecked(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	require.Contains(t, only(t, topics(t, conn)).Message, "no waiting or dead row")

	fits := kafkatest.Topic(t, 2)
	small := kafkatest.Topic(t, 1, "max.message.bytes", "10000")
	tight := kafkatest.Topic(t, 1, "max.message.bytes", "10000")
	strict := kafkatest.Topic(t, 1, "min.insync.replicas", "9")
	exec(t, conn, insertSQL, fits, 100)
	exec(t, conn, insertSQL, small, 20)
	exec(t, conn, insertSQL, tight, 9900)
	exec(t, conn, insertSQL, strict, 1)
	exec(t, conn, insertSQL, "never-created", 1)
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		VALUES ('default', 1, gen_random_uuid(), 'never-created-either', '{}', now(), 'unknown_topic', 'e', 'held')`)

	findings := topics(t, conn)
	require.False(t, doctor.Well(findings))
	for _, f := range findings {
		says(t, f, f.Severity, "")
	}
	for _, missing := range []string{"never-created", "never-created-either"} {
		f := only(t, about(findings, "topic "+missing))
		says(t, f, doctor.Fail, "does not exist")
		brokers, err := kadm.NewClient(kafkatest.Client(t)).BrokerMetadata(t.Context())
		require.NoError(t, err)
		replicas := min(len(brokers.Brokers), 3)
		assert.Contains(t, f.Remedy, fmt.Sprintf("--replication-factor %d --config min.insync.replicas=%d", replicas, max(replicas-1, 1)), "the cluster takes it")
	}
	// There may be one broker only, and then there is a warning about replicas beside the others.
	of := func(topic string, severity doctor.Severity) (text string) {
		for _, f := range about(findings, "topic "+topic) {
			if f.Severity == severity {
				text += f.Message + "\n"
			}
		}
		return text
	}
	assert.Empty(t, of(fits, doctor.Fail))
	assert.NotContains(t, of(fits, doctor.Warn), "max.message.bytes")
	assert.Contains(t, of(small, doctor.Warn), "max.message.bytes is 10000")
	assert.Empty(t, of(small, doctor.Fail))
	assert.Contains(t, of(tight, doctor.Fail), "max.message.bytes is 10000, the largest waiting row makes a record of about 10")
	assert.Contains(t, of(strict, doctor.Fail), "min.insync.replicas is 9")
	assert.Contains(t, about(findings, "topic "+small)[0].Remedy, "--entity-name "+small+" --add-config max.message.bytes=1048588")

	// A topic is of no interest once its rows are published.
	exec(t, conn, "DELETE FROM effectonce.outbox_dead")
	exec(t, conn, "INSERT INTO effectonce.outbox_ticks (tick, snapshot, seq_last) VALUES (1, pg_current_snapshot(), 0)")
	exec(t, conn, "INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('default', 0)")
	exec(t, conn, "INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick) VALUES ('default', 0, 1, 0, 1)")
	require.True(t, doctor.Well(topics(t, conn)))
}

// How many replicas have to have a record is compared with how many there are: one is too few to
// keep it, all of them too many to stay up.
func TestReplicasInSyncAreJudged(t *testing.T) {
	t.Parallel()
	fake := kafkatest.Fake(t, kfake.NumBrokers(3))
	conn := connect(t, pgtest.Database(t))
	admin := kadm.NewClient(kafkatest.ClientAt(t, fake.ListenAddrs()))
	for name, c := range map[string]struct {
		inSync   string
		severity doctor.Severity
		text     string
	}{
		"one":   {"1", doctor.Warn, "min.insync.replicas is 1: although the relay waits for all in-sync replicas"},
		"two":   {"2", doctor.OK, "1 partition, 3 replicas"},
		"three": {"3", doctor.Warn, "min.insync.replicas is 3, as many as it has replicas"},
		"four":  {"4", doctor.Fail, "min.insync.replicas is 4, but it has 3 replicas"},
	} {
		created, err := admin.CreateTopic(t.Context(), 1, 3, map[string]*string{"min.insync.replicas": &c.inSync}, name)
		require.NoError(t, err)
		require.NoError(t, created.Err)
		exec(t, conn, insertSQL, name, 1)
		says(t, only(t, about(doctor.Topics(t.Context(), conn, admin, "effectonce", ""), "topic "+name)), c.severity, c.text)
	}
}

// A record that the relay cannot publish, whatever the topic takes, is found before.
func TestSizesAreCompared(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	huge := kafkatest.Topic(t, 1, "max.message.bytes", "200000000")
	exec(t, conn, "ALTER TABLE effectonce.outbox DROP CONSTRAINT outbox_row_is_out_of_bounds") // as where the row is older than schema version 8
	exec(t, conn, insertSQL, huge, 91_000_000)
	says(t, about(topics(t, conn), "topic "+huge)[0], doctor.Fail, "the relay publishes none above 90000000")
}

// A broker whose advertised address leads nowhere is the classic trap: the seed answers, producing
// does not work. If no broker answers, that is reported with the addresses that were tried.
func TestBrokersAway(t *testing.T) {
	t.Parallel()
	nowhere := kadm.NewClient(kafkatest.ClientAt(t, []string{"127.0.0.1:1"}, kgo.RequestRetries(0)))
	says(t, only(t, doctor.Brokers(t.Context(), nowhere, "127.0.0.1:1")), doctor.Fail, "127.0.0.1:1", "--brokers")

	fake := kafkatest.Fake(t)
	host, portText, found := strings.Cut(fake.ListenAddrs()[0], ":")
	require.True(t, found)
	port, err := strconv.ParseInt(portText, 10, 32)
	require.NoError(t, err)
	fake.ControlKey(int16(kmsg.Metadata), func(req kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		answer := req.ResponseKind().(*kmsg.MetadataResponse)
		answer.Brokers = []kmsg.MetadataResponseBroker{{NodeID: 0, Host: host, Port: int32(port)}, {NodeID: 7, Host: "127.0.0.1", Port: 1}}
		return answer, nil, true
	})
	lost := kadm.NewClient(kafkatest.ClientAt(t, fake.ListenAddrs(), kgo.RequestRetries(0)))
	says(t, only(t, doctor.Brokers(t.Context(), lost, "seed")), doctor.Fail, "broker 7 does not answer at 127.0.0.1:1", "advertised.listeners")
}

// A topic that may not be described, or not be written to, is a finding about that topic: the
// others are still checked.
func TestTopicsThatAreNotAllowed(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	all := func(of kmsg.ACLResourceType, name string, operation kmsg.ACLOperation, allow bool) kfake.ACL {
		return kfake.ACL{Resource: of, Name: name, Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: operation, Allow: allow}
	}
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "open", "secret", "read-only", "closed-settings"), kfake.EnableACLs(), kfake.User("PLAIN", "ANONYMOUS", "none",
		all(kmsg.ACLResourceTypeTopic, "*", kmsg.ACLOperationAll, true), all(kmsg.ACLResourceTypeCluster, "kafka-cluster", kmsg.ACLOperationAll, true),
		all(kmsg.ACLResourceTypeTopic, "secret", kmsg.ACLOperationDescribe, false), all(kmsg.ACLResourceTypeTopic, "read-only", kmsg.ACLOperationWrite, false),
		all(kmsg.ACLResourceTypeTopic, "closed-settings", kmsg.ACLOperationDescribeConfigs, false)))
	for _, topic := range []string{"open", "secret", "read-only", "closed-settings"} {
		exec(t, conn, insertSQL, topic, 1)
	}
	findings := doctor.Topics(t.Context(), conn, kadm.NewClient(kafkatest.ClientAt(t, fake.ListenAddrs())), "effectonce", "")
	for topic, want := range map[string]struct {
		severity doctor.Severity
		remedy   string
	}{
		"open": {doctor.Warn, "three replicas"}, "secret": {doctor.Fail, "grant DESCRIBE and WRITE"},
		"read-only": {doctor.Fail, "grant WRITE"}, "closed-settings": {doctor.Warn, "grant DESCRIBE_CONFIGS"},
	} {
		f := about(findings, "topic "+topic)
		require.NotEmpty(t, f, topic)
		says(t, f[0], want.severity, "", want.remedy)
	}
}

// With a prefix, the topics of Kafka count.
func TestTopicsBehindAPrefixAreChecked(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	name := kafkatest.UnusedTopic(t)
	kafkatest.CreateTopic(t, "p-"+name, 1)
	exec(t, conn, insertSQL, name, 1)
	found := doctor.Topics(t.Context(), conn, kadm.NewClient(kafkatest.Client(t)), "effectonce", "p-")
	require.Empty(t, about(found, "topic "+name))
	require.NotEqual(t, doctor.Fail, only(t, about(found, "topic p-"+name)).Severity)
}

// Property: a progress topic that was made by hand, and does not fit, is named with what changes it; one
// that a relay makes passes. Row O44 of
// guarantees.md.
func TestProgressTopicIsJudged(t *testing.T) {
	t.Parallel()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1))
	admin := kadm.NewClient(kafkatest.ClientAt(t, fake.ListenAddrs()))
	for name, c := range map[string]struct {
		partitions int32
		policy     string
		severity   doctor.Severity
		message    string
	}{
		"now":        {1, "compact", doctor.OK, "one partition, compacted"},
		"deleted":    {1, "delete", doctor.Warn, "not compacted"},
		"partitions": {2, "compact", doctor.Fail, "2 partitions"},
	} {
		_, err := admin.CreateTopic(t.Context(), c.partitions, 1, map[string]*string{"cleanup.policy": &c.policy}, name)
		require.NoError(t, err)
		says(t, only(t, doctor.ProgressTopic(t.Context(), admin, name)), c.severity, c.message)
	}
	assert.Empty(t, doctor.ProgressTopic(t.Context(), admin, "not-there"))
}

// Messages for later that no relay moves when they are due are a problem as soon as they are older
// than rows may be; those that are not due are only counted.
func TestOverdueMessagesAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	opts := pipeline.StatusOptions{AgeMax: 2 * time.Minute}
	exec(t, conn, "INSERT INTO effectonce.outbox_scheduled (due_at, topic) VALUES (clock_timestamp() + interval '1 hour', 't'), (clock_timestamp() - interval '30 s', 't')")
	status := readStatus(t, conn, opts)
	assert.True(t, status.Well, status.Problems)
	assert.Equal(t, []int64{2, 1}, []int64{status.Scheduled.Count, status.Scheduled.Overdue})
	exec(t, conn, "UPDATE effectonce.outbox_scheduled SET due_at = due_at - interval '2 minutes'")
	status = readStatus(t, conn, opts)
	assert.False(t, status.Well)
	assert.Contains(t, status.Problems[0], "messages for later: 1 due and not in the outbox, the oldest for longer than 2m")
	exec(t, conn, "UPDATE effectonce.outbox_scheduled SET refused = 'why' WHERE due_at < clock_timestamp()")
	status = readStatus(t, conn, opts)
	assert.Len(t, status.Problems, 1)
	assert.Contains(t, status.Problems[0], "messages for later: 1 refused by the outbox")
}

// A shard that no replica ever took has published nothing: its rows wait, whatever the others did,
// and dead rows are counted once, in their shard.
func TestShardsThatWereNeverLeasedCount(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "INSERT INTO effectonce.outbox (topic, key) SELECT 't', convert_to(n::text, 'UTF8') FROM generate_series(1, 100) n")
	var odd int64
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox WHERE shard % 2 = 1").Scan(&odd))
	exec(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('default', 2)")
	exec(t, conn, "INSERT INTO effectonce.outbox_ticks (snapshot, seq_last) VALUES (pg_current_snapshot(), 100)")
	exec(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, shards, epoch, lease_until) VALUES ('default', 0, 2, 1, clock_timestamp() + interval '1 minute')`)
	exec(t, conn, `INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick) VALUES ('default', 0, 1, 1, 1)`)
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
		SELECT 'default', o.seq, o.id, o.topic, o.key, '{}', now(), 'refused', 'e', 'held' FROM effectonce.outbox o`)
	status := readStatus(t, conn, pipeline.StatusOptions{})
	for shard, want := range [][]int64{{0, 100 - odd}, {odd, odd}} {
		assert.Equal(t, want, []int64{status.Relays[shard].Waiting, status.Relays[shard].Dead["refused"]}, shard)
	}
	assert.Contains(t, strings.Join(status.Problems, "\n"), `relay "default", shard 1: rows wait and no replica ever took it`)
}
