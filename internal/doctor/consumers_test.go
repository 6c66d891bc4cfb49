package doctor_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/doctor"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const (
	registerSQL = "INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window) VALUES ($1, $2, $3, $4)"
	positionSQL = `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, record_time, updated_at)
		SELECT $1, $2, $3, 7, at, at FROM (SELECT clock_timestamp() - $4::interval AS at) t`
	parkedSQL = `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state, parked_at)
		SELECT id, gen_random_uuid(), $2, $3, $4, convert_to(nullif($5, ''), 'UTF8'), $6, 'e', CASE $6 WHEN 'behind' THEN 'behind' ELSE 'parked' END,
			clock_timestamp() - interval '1 minute' * $4::bigint FROM effectonce.consumers WHERE name = $1`
)

// Each consumer is reported with what stands still and what is parked, and either is not well; how much may
// be parked is the caller's choice. With one relay alone they are left out.
func TestStatusReportsConsumers(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, registerSQL, "billing/orders", "billing", []string{"orders"}, "7 days")
	exec(t, conn, registerSQL, "billing/payments", "billing", []string{"payments"}, "7 days")
	for partition := range 3 {
		exec(t, conn, positionSQL, "billing", "orders", partition, "0")
	}
	exec(t, conn, positionSQL, "billing", "payments", 0, "0")
	status := readStatus(t, conn, doctor.StatusOptions{})
	assert.True(t, status.Well)
	require.Len(t, status.Consuming, 2)
	assert.Equal(t, "billing/orders", status.Consuming[0].Name)
	assert.Equal(t, int64(3), status.Consuming[0].Partitions)
	assert.Equal(t, int64(1), status.Consuming[1].Partitions)

	for offset, row := range [][2]string{{"a", "failed"}, {"a", "behind"}, {"b", "failed"}, {"", "permanent"}} {
		exec(t, conn, parkedSQL, "billing/orders", "orders", 0, offset+1, row[0], row[1])
	}
	status = readStatus(t, conn, doctor.StatusOptions{ParkedMax: 3})
	require.Len(t, status.Problems, 1)
	assert.Equal(t, `consumer "billing/orders": 4 messages are parked and hold 2 keys, the oldest for 4m0s: see "outbox-relay parked list"`, status.Problems[0])
	orders := status.Consuming[0]
	assert.Equal(t, map[string]int64{"failed": 2, "behind": 1, "permanent": 1}, orders.Parked)
	assert.Equal(t, int64(2), orders.HeldKeys)
	assert.InDelta(t, 240, orders.OldestParkedSeconds, 30)
	assert.Empty(t, status.Consuming[1].Parked)
	assert.True(t, readStatus(t, conn, doctor.StatusOptions{ParkedMax: 4}).Well)
	assert.True(t, readStatus(t, conn, doctor.StatusOptions{Relay: "default"}).Well)

	exec(t, conn, `UPDATE effectonce.consumer_positions SET trouble = E'message blocks\x1b its partition\nsecond line', owner = 'host-1',
		trouble_since = clock_timestamp() - interval '90 s' WHERE topic = 'payments'`)
	status = readStatus(t, conn, doctor.StatusOptions{ParkedMax: 4})
	assert.False(t, status.Well)
	require.Len(t, status.Problems, 1)
	assert.Regexp(t, `^consumer "billing/payments": payments/0 stands still \(for 1m3\ds\): message blocks\\x1b its partition…$`, status.Problems[0])
	assert.Empty(t, status.Consuming[0].Trouble, "another topic of the same group")
	trouble := status.Consuming[1].Trouble
	require.Len(t, trouble, 1)
	assert.Equal(t, "host-1", trouble[0].Owner)
}

func consumers(t *testing.T, conn *pgx.Conn) []doctor.Finding {
	t.Helper()
	found := doctor.Consumers(t.Context(), conn, kadm.NewClient(kafkatest.Client(t)), "effectonce")
	for _, f := range found {
		if f.Severity != doctor.OK {
			assert.NotEmpty(t, f.Remedy, "%+v", f)
			harmless(t, f)
		}
	}
	return found
}

// Row C29: a dedup window that is shorter than what Kafka keeps is a warning; a longer one, and one that
// never ends, is fine.
func TestWindowsAreComparedWithRetention(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	require.Contains(t, only(t, consumers(t, conn)).Message, "none is registered")
	week := kafkatest.Topic(t, 1, "retention.ms", "604800000")
	ever := kafkatest.Topic(t, 1, "retention.ms", "-1")
	compacted := kafkatest.Topic(t, 1, "cleanup.policy", "compact")
	for _, c := range []struct {
		name, topic string
		window      any
		warns       string // empty: fine
	}{
		{"equal", week, "7 days", ""},
		{"longer", week, "8 days", ""},
		{"shorter", week, "167 hours", "topic " + week + " keeps messages for 168h0m0s, its dedup window is 167h0m0s"},
		{"never deleted", ever, "3650 days", "keeps messages for ever"},
		{"only compacted", compacted, "30 days", "keeps messages for ever"},
		{"for ever", ever, nil, ""},
		{"no such topic", kafkatest.UnusedTopic(t), "1 minute", ""},
	} {
		exec(t, conn, "DELETE FROM effectonce.consumers")
		exec(t, conn, registerSQL, c.name, "g", []string{c.topic}, c.window)
		f := only(t, consumers(t, conn))
		assert.Equal(t, "consumer "+c.name, f.Check)
		if c.warns == "" {
			assert.Equal(t, doctor.OK, f.Severity, "%+v", f)
			continue
		}
		assert.Equal(t, doctor.Warn, f.Severity, "%+v", f)
		assert.Contains(t, f.Message, c.warns)
		assert.Equal(t, "set Window of this consumer to more than the retention, or Forever", f.Remedy)
	}
}

// A limit of bytes bounds no time: the window is compared with retention.ms, and the limit is named.
func TestBytesOfRetentionAreNamed(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	topic := kafkatest.Topic(t, 1, "retention.ms", "604800000", "retention.bytes", "1073741824")
	exec(t, conn, registerSQL, "n", "g", []string{topic}, "1 day")
	f := only(t, consumers(t, conn))
	assert.Contains(t, f.Message, "keeps messages for 168h0m0s (at most 1073741824 bytes of a partition: retention.bytes, which bounds no time)")
	exec(t, conn, "UPDATE effectonce.consumers SET dedup_window = '8 days'")
	assert.Equal(t, doctor.OK, only(t, consumers(t, conn)).Severity)
}

// Messages that are parked for a partition which Kafka does not have can wait for ever: that is said.
func TestParkedMessagesWithoutPartitionAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	topic, gone := kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
	exec(t, conn, registerSQL, "n", "g", []string{topic}, nil)
	exec(t, conn, parkedSQL, "n", topic, 0, 1, "a", "failed")
	require.Equal(t, doctor.OK, only(t, consumers(t, conn)).Severity)
	exec(t, conn, parkedSQL, "n", topic, 1, 2, "a", "failed")
	exec(t, conn, parkedSQL, "n", gone, 0, 3, "a", "failed")
	var said []string
	for _, f := range consumers(t, conn) {
		if f.Check == "parked" {
			assert.Equal(t, doctor.Warn, f.Severity)
			said = append(said, f.Message)
		}
	}
	assert.Len(t, said, 2)
	assert.Contains(t, strings.Join(said, "\n"), "1 messages of "+topic+"/1 are parked")
	assert.Contains(t, strings.Join(said, "\n"), "1 messages of "+gone+"/0 are parked")
}

// Row C29: what keeps claims beyond every window is named with its cause. That a group is gone for good is not
// the doctor's to say.
func TestAbandonedPositionsAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	topic, gone := kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
	live := "live-" + topic
	exec(t, conn, registerSQL, "a", "it's gone", []string{topic}, "1 hour")
	exec(t, conn, registerSQL, "b", live, []string{topic, gone}, "2 hours")
	exec(t, conn, registerSQL, "c", "ledger", []string{topic}, nil)
	exec(t, conn, positionSQL, "it's gone", topic, 0, "119 minutes")
	exec(t, conn, positionSQL, "ledger", topic, 0, "90 days") // forgets nothing, so it keeps nothing
	exec(t, conn, positionSQL, live, topic, 0, "1 minute")
	retention := func() (found []doctor.Finding) {
		for _, f := range consumers(t, conn) {
			if f.Check == "retention" {
				assert.Equal(t, doctor.Warn, f.Severity)
				found = append(found, f)
			}
		}
		return found
	}
	require.Empty(t, retention(), "younger than the longest window")

	exec(t, conn, "UPDATE effectonce.consumer_positions SET record_time = record_time - interval '3 days'")
	exec(t, conn, positionSQL, live, gone, 0, "3 days")
	member := kafkatest.Client(t, kgo.ConsumerGroup(live), kgo.ConsumeTopics(topic))
	require.NoError(t, member.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Value: []byte("v")}).FirstErr())
	require.NoError(t, member.PollFetches(t.Context()).Err0())
	found := retention()
	require.Len(t, found, 3)
	assert.Regexp(t, `^group it's gone has no member, and 1 of its positions of topic \S+ are 73h59m0s behind`, found[0].Message)
	byMessage := map[string]string{}
	for _, f := range found[1:] {
		what, _, _ := strings.Cut(strings.TrimPrefix(f.Message, "group "+live+" "), " ")
		byMessage[what] = f.Remedy
	}
	assert.Contains(t, byMessage["is"], "outbox-relay status", "a live group is only slow")
	assert.Contains(t, byMessage["has"], "create the topic again")
	assert.Contains(t, found[0].Remedy, "start a consumer of the group")

	exec(t, conn, "DELETE FROM effectonce.consumer_positions WHERE consumer_group = 'it''s gone'")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET caught_up_at = clock_timestamp() WHERE topic = $1", topic)
	require.Len(t, retention(), 1, "an idle partition passes time, too")
}
