package doctor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

const (
	registerSQL = "INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window) VALUES ($1, $2, $3, $4)"
	positionSQL = `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, record_time, updated_at)
		SELECT $1, $2, $3, 7, at, at FROM (SELECT clock_timestamp() - $4::interval AS at) t`
	parkedSQL = `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state, parked_at)
		SELECT id, gen_random_uuid(), $2, $3, $4, convert_to(nullif($5, ''), 'UTF8'), $6, 'e', CASE $6 WHEN 'behind' THEN 'behind' ELSE 'parked' END,
			clock_timestamp() - interval '1 minute' * $4::bigint FROM effectonce.consumers WHERE name = $1`
)

// Each consumer is reported with what is halted and what is parked, and either is not well; how
// much may be parked is the caller's choice. With one relay alone they are left out.
func TestStatusReportsConsumers(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, registerSQL, "billing/orders", "billing", []string{"orders"}, "7 days")
	exec(t, conn, registerSQL, "billing/payments", "billing", []string{"payments"}, "7 days")
	exec(t, conn, positionSQL, "billing", "orders", 0, "0")
	exec(t, conn, positionSQL, "billing", "payments", 0, "0")
	assert.True(t, readStatus(t, conn, pipeline.StatusOptions{}).Well)
	for offset, row := range [][2]string{{"a", "failed"}, {"a", "behind"}, {"b", "failed"}, {"", "permanent"}} {
		exec(t, conn, parkedSQL, "billing/orders", "orders", 0, offset+1, row[0], row[1])
	}
	exec(t, conn, `UPDATE effectonce.consumer_positions SET trouble = E'message blocks\x1b its partition\nsecond line', owner = 'host-1',
		trouble_since = clock_timestamp() - interval '90 s' WHERE topic = 'payments'`)
	status := readStatus(t, conn, pipeline.StatusOptions{ParkedMax: 3})
	assert.False(t, status.Well)
	require.Len(t, status.Problems, 2)
	all := strings.Join(status.Problems, "\n")
	assert.Contains(t, all, `consumer "billing/orders": 4 messages parked, 2 keys held, the oldest for 4m: see "outbox-relay parked list"`)
	assert.Regexp(t, `(?m)^consumer "billing/payments": payments/0 halted for 1m3\ds: message blocks\\x1b its partition; second line$`, all)
	orders, payments := status.Consuming[0], status.Consuming[1]
	assert.Equal(t, []any{"billing/orders", int64(1), int64(2)}, []any{orders.Name, orders.Partitions, orders.HeldKeys})
	assert.Equal(t, map[string]int64{"failed": 2, "behind": 1, "permanent": 1}, orders.Parked)
	assert.Empty(t, orders.Trouble, "another topic of the same group")
	assert.Empty(t, payments.Parked)
	require.Len(t, payments.Trouble, 1)
	assert.Equal(t, "host-1", payments.Trouble[0].Owner)
	assert.Len(t, readStatus(t, conn, pipeline.StatusOptions{ParkedMax: 4}).Problems, 1)
	assert.False(t, readStatus(t, conn, pipeline.StatusOptions{Relay: "default"}).Well, "OUTBOX_RELAY, as run has it, hides no consumer")
}

func consumers(t *testing.T, conn *pgx.Conn) []doctor.Finding {
	t.Helper()
	found := doctor.Consumers(t.Context(), conn, kadm.NewClient(kafkatest.Client(t)), "effectonce")
	for _, f := range found {
		says(t, f, f.Severity, "")
	}
	return found
}

// Row C29 of guarantees.md: a dedup window that is shorter than what Kafka keeps is a warning; a
// longer one, and one that never ends, is fine.
func TestWindowsAreComparedWithRetention(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	require.Contains(t, only(t, consumers(t, conn)).Message, "none is registered")
	week := kafkatest.Topic(t, 1, "retention.ms", "604800000")
	ever := kafkatest.Topic(t, 1, "retention.ms", "-1")
	compacted := kafkatest.Topic(t, 1, "cleanup.policy", "compact")
	bounded := kafkatest.Topic(t, 1, "retention.ms", "604800000", "retention.bytes", "1073741824")
	for _, c := range []struct {
		name, topic string
		window      any
		warns       string // empty: fine
	}{
		{"equal", week, "7 days", ""},
		{"longer", week, "8 days", ""},
		{"shorter", week, "167 hours", "topic " + week + " keeps messages for 168h, its dedup window is 167h"},
		{"never deleted", ever, "3650 days", "keeps messages forever"},
		{"only compacted", compacted, "30 days", "keeps messages forever"},
		{"forever", ever, nil, ""},
		{"bytes", bounded, "1 day", "keeps messages for 168h (at most 1073741824 bytes of a partition: retention.bytes, which does not limit the time)"},
	} {
		exec(t, conn, "DELETE FROM effectonce.consumers")
		exec(t, conn, registerSQL, c.name, "g", []string{c.topic}, c.window)
		f := only(t, consumers(t, conn))
		assert.Equal(t, "consumer "+c.name, f.Check)
		if c.warns == "" {
			assert.Equal(t, doctor.OK, f.Severity, "%+v", f)
			continue
		}
		says(t, f, doctor.Warn, c.warns)
		assert.Equal(t, "set Window of this consumer to more than the retention, or Forever", f.Remedy)
	}
}

// Property: doctor and status name a topic that a consumer asks for and Kafka does not have; the
// doctor with both remedies. A consumer of topics that exist is well. If no broker answers, the
// status is as it was, with a note.
func TestMisspeltTopicsAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	topic, misspelt := kafkatest.Topic(t, 1, "retention.ms", "1000"), kafkatest.UnusedTopic(t)
	exec(t, conn, registerSQL, "right", "g", []string{topic}, "1 minute")
	exec(t, conn, registerSQL, "wrong", "g", []string{topic, misspelt}, "1 minute")
	found := slices.DeleteFunc(consumers(t, conn), func(f doctor.Finding) bool { return f.Severity == doctor.OK })
	says(t, only(t, about(found, "consumer wrong")), doctor.Warn, "topic "+misspelt+" does not exist: was it deleted, or is its name misspelt?",
		"correct Topics of this consumer", "--create --topic "+misspelt)
	require.Len(t, found, 1)

	status := readStatus(t, conn, pipeline.StatusOptions{Missing: func(context.Context, []string) ([]string, error) {
		return []string{misspelt}, nil
	}})
	assert.True(t, status.Well)
	assert.Equal(t, []string{`consumer "wrong": topic ` + misspelt + ` does not exist: was it deleted, or is its name misspelt?`}, status.Notes)
	assert.Equal(t, [][]string{{}, {misspelt}}, [][]string{status.Consuming[0].MissingTopics, status.Consuming[1].MissingTopics})
	status = readStatus(t, conn, pipeline.StatusOptions{Missing: func(context.Context, []string) ([]string, error) {
		return nil, errors.New("no broker answers")
	}})
	assert.True(t, status.Well)
	assert.Equal(t, "no broker answers", status.KafkaError)
	assert.Equal(t, []string{"unknown whether the topics of consumers exist: no broker answers"}, status.Notes)
	assert.Empty(t, readStatus(t, conn, pipeline.StatusOptions{}).Notes)
}

// Property: partitions that do not move are a problem; paused topics and orders that are not carried
// out are notes, and the status is well with them. To the doctor these are a failure and warnings.
func TestWhatKeepsConsumersIsFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	check := func() []doctor.Finding { return doctor.Pipeline(t.Context(), conn, "effectonce", 5*time.Minute) }
	require.Contains(t, only(t, check()).Message, "0 consumers")
	exec(t, conn, registerSQL, "billing/orders", "it's billing", []string{"orders"}, "7 days")
	exec(t, conn, "UPDATE effectonce.consumers SET id_rule = 'standard'")
	exec(t, conn, positionSQL, "it's billing", "orders", 0, "0")
	require.Equal(t, doctor.OK, only(t, check()).Severity)
	require.Empty(t, readStatus(t, conn, pipeline.StatusOptions{}).Notes)

	exec(t, conn, "INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why) VALUES ('it''s billing', 'orders', 'ana', E'INC-12\x1b[0m')")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET resume_at = -1, owner = 'host-1', released = false")
	status := readStatus(t, conn, pipeline.StatusOptions{})
	assert.True(t, status.Well)
	require.Len(t, status.Notes, 2)
	assert.Regexp(t, `^topic orders is paused for group it's billing since \S+Z by ana \(INC-12\\x1b\[0m\): to end the pause, run "outbox-relay consumer resume --group 'it'\\''s billing' --topic orders"$`, status.Notes[0])
	assert.Equal(t, "orders/0 of group it's billing: an operator requested to resume at latest, which is not done yet (position 7, held by host-1)", status.Notes[1])
	assert.Equal(t, "standard", status.Consuming[0].IDRule)

	exec(t, conn, "UPDATE effectonce.consumer_positions SET trouble = 'offset out of range'")
	found := check()
	require.Len(t, found, 3)
	says(t, found[0], doctor.Fail, `consumer "billing/orders": orders/0 halted for `)
	says(t, found[1], doctor.Warn, "topic orders is paused for group it's billing")
	says(t, found[2], doctor.Warn, "requested to resume at latest")
}

// Messages that are parked for a partition which Kafka does not have can wait forever: that is
// reported.
func TestParkedMessagesWithoutPartitionAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	topic, gone := kafkatest.Topic(t, 1), kafkatest.UnusedTopic(t)
	exec(t, conn, registerSQL, "n", "g", []string{topic}, nil)
	exec(t, conn, parkedSQL, "n", topic, 0, 1, "a", "failed")
	exec(t, conn, parkedSQL, "n", topic, 1, 2, "a", "failed")
	exec(t, conn, parkedSQL, "n", gone, 0, 3, "a", "failed")
	said := ""
	for _, f := range about(consumers(t, conn), "parked") {
		assert.Equal(t, doctor.Warn, f.Severity)
		said += f.Message + "\n"
	}
	assert.Contains(t, said, "1 message of "+topic+"/1 parked")
	assert.Contains(t, said, "1 message of "+gone+"/0 parked")
	assert.NotContains(t, said, topic+"/0")
}

// Row C29 of guarantees.md: what keeps claims beyond every window is named with its cause. That a
// group is gone for good is not the doctor's to say.
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
	retention := func() (messages, remedies string, n int) {
		for _, f := range about(consumers(t, conn), "retention") {
			assert.Equal(t, doctor.Warn, f.Severity)
			messages, remedies, n = messages+f.Message+"\n", remedies+f.Remedy+"\n", n+1
		}
		return messages, remedies, n
	}
	messages, _, _ := retention()
	require.Empty(t, messages, "younger than the longest window")

	exec(t, conn, "UPDATE effectonce.consumer_positions SET record_time = record_time - interval '3 days'")
	exec(t, conn, positionSQL, live, gone, 0, "3 days")
	member := kafkatest.Client(t, kgo.ConsumerGroup(live), kgo.ConsumeTopics(topic))
	require.NoError(t, member.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Value: []byte("v")}).FirstErr())
	require.NoError(t, member.PollFetches(t.Context()).Err0())
	messages, remedies, n := retention()
	require.Equal(t, 3, n)
	assert.Regexp(t, `(?m)^group it's gone has no member, and 1 of its positions of topic \S+ are 3d1h behind`, messages)
	for _, want := range []string{"outbox-relay status", "create the topic again", "start a consumer of the group"} {
		assert.Contains(t, remedies, want)
	}
	exec(t, conn, "DELETE FROM effectonce.consumer_positions WHERE consumer_group = 'it''s gone'")
	exec(t, conn, "UPDATE effectonce.consumer_positions SET caught_up_at = clock_timestamp() WHERE topic = $1", topic)
	_, _, n = retention()
	require.Equal(t, 1, n, "an idle partition passes time, too")
}

// anHourLater lets the doctor's own session see a clock that is an hour ahead: what is open now is
// old then.
func anHourLater(t *testing.T, address string) *pgx.Conn {
	t.Helper()
	conn := connect(t, address)
	exec(t, conn, `CREATE SCHEMA IF NOT EXISTS skewed;
		CREATE OR REPLACE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql RETURN pg_catalog.clock_timestamp() + interval '1 hour'`)
	exec(t, conn, "SET search_path = skewed, pg_catalog")
	return conn
}

// Rows O4 and O20 of guarantees.md: a transaction that is open for long, and one that was prepared
// and forgotten, are warnings. The remedy ends the first; how the second has to end is its
// coordinator's to say. A cluster of its own: transactions of other tests would be seen.
func TestLongTransactionsAreFound(t *testing.T) {
	t.Parallel()
	cluster := pgtest.Cluster(t, map[string]string{"max_prepared_transactions": "5", "autovacuum": "off"})
	pgtest.Migrate(t, cluster.URL)
	later := anHourLater(t, cluster.URL)
	require.Equal(t, doctor.OK, only(t, doctor.OpenTransactions(t.Context(), later)).Severity)

	writer, reader := connect(t, cluster.URL), connect(t, cluster.URL)
	exec(t, writer, "BEGIN; SET LOCAL application_name = 'month-end'; SELECT pg_current_xact_id()")
	exec(t, reader, "BEGIN ISOLATION LEVEL REPEATABLE READ")
	exec(t, reader, "SELECT 1 FROM effectonce.outbox")
	exec(t, connect(t, cluster.URL), "BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'it''s forgotten'")
	assert.Equal(t, doctor.OK, only(t, doctor.OpenTransactions(t.Context(), connect(t, cluster.URL))).Severity, "they are young")

	found := doctor.OpenTransactions(t.Context(), later)
	require.Len(t, found, 3)
	for i, text := range []string{"month-end", "has held a snapshot", "prepared transaction it's forgotten"} {
		says(t, found[i], doctor.Warn, text)
		statement, _, _ := strings.Cut(found[i].Remedy, ";") // without the remark behind it
		exec(t, connect(t, cluster.URL), statement)
	}
	exec(t, connect(t, cluster.URL), "ROLLBACK PREPARED 'it''s forgotten'")
	testwait.True(t, "no transaction is open", func() bool { return doctor.OpenTransactions(t.Context(), later)[0].Severity == doctor.OK })
}

// A replication slot that no process reads keeps WAL indefinitely; one whose reader is far behind
// keeps dead rows. Both are named. The remedy does not drop the slot, since its reader would miss
// what was written.
func TestReplicationSlotsAreFound(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.EmptyDatabase(t))
	check := func() []doctor.Finding { return doctor.ReplicationSlots(t.Context(), conn) }
	slots := func(active bool, age int) {
		exec(t, conn, fmt.Sprintf(`CREATE SCHEMA IF NOT EXISTS seen; CREATE OR REPLACE VIEW seen.pg_replication_slots AS
			SELECT 'it_is'::name AS slot_name, %t AS active, '3'::xid AS xmin, NULL::xid AS catalog_xmin, NULL::pg_lsn AS restart_lsn, false AS temporary;
			CREATE OR REPLACE FUNCTION seen.age(xid) RETURNS int LANGUAGE sql RETURN %d`, active, age))
	}
	slots(true, 10000000)
	exec(t, conn, "SET search_path = seen, pg_catalog")
	require.Equal(t, doctor.OK, only(t, check()).Severity)
	slots(true, 10000001)
	assert.Contains(t, only(t, check()).Message, "replication slot it_is is 10000001 transactions behind")
	slots(false, 1)
	says(t, only(t, check()), doctor.Warn, "no process reads replication slot it_is")
}
