package integration_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/servers"
)

// place is a record as a reader that shares no code with the relay saw it.
type place struct {
	partition int32
	offset    int64
	id        string // its message-id
}

// endHeader is on the last record of each partition. It shows a reader that it has seen everything.
const endHeader = "end-of-test"

// writeEnds puts a last record into each partition. A reader of committed records gets it once no
// transaction is open before it.
func writeEnds(t *testing.T, brokers []string, topic string) {
	t.Helper()
	client := kafkatest.ClientAt(t, brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	for partition := range partitionsOf(t, brokers, topic) {
		end := &kgo.Record{Topic: topic, Partition: partition, Headers: []kgo.RecordHeader{{Key: endHeader}}}
		require.NoError(t, client.ProduceSync(t.Context(), end).FirstErr())
	}
}

// partitionsOf returns how many offsets each partition has: up to its end, and up to the first open
// transaction.
func partitionsOf(t *testing.T, brokers []string, topic string) map[int32]struct{ end, stable int64 } {
	t.Helper()
	admin := kadm.NewClient(kafkatest.ClientAt(t, brokers))
	ends, err := admin.ListEndOffsets(t.Context(), topic)
	require.NoError(t, err)
	stable, err := admin.ListCommittedOffsets(t.Context(), topic)
	require.NoError(t, err)
	require.NoError(t, ends.Error())
	require.NoError(t, stable.Error())
	found := map[int32]struct{ end, stable int64 }{}
	for partition, end := range ends[topic] {
		found[partition] = struct{ end, stable int64 }{end.Offset, stable[topic][partition].Offset}
	}
	return found
}

// readSarama reads each partition up to its last record with a client that is not the relay's.
func readSarama(t *testing.T, brokers []string, topic string, level sarama.IsolationLevel) []place {
	t.Helper()
	config := sarama.NewConfig()
	config.Consumer.IsolationLevel = level
	config.Consumer.Return.Errors = true
	reader, err := sarama.NewConsumer(brokers, config)
	require.NoError(t, err)
	defer func() { require.NoError(t, reader.Close()) }()
	partitions, err := reader.Partitions(topic)
	require.NoError(t, err)
	var found []place
	for _, partition := range partitions {
		found = append(found, readPartition(t, reader, topic, partition)...)
	}
	return found
}

func readPartition(t *testing.T, reader sarama.Consumer, topic string, partition int32) (found []place) {
	t.Helper()
	records, err := reader.ConsumePartition(topic, partition, sarama.OffsetOldest)
	require.NoError(t, err)
	defer func() { require.NoError(t, records.Close()) }()
	limit := time.After(2 * time.Minute)
	for {
		select {
		case record := <-records.Messages():
			headers := map[string]string{}
			for _, h := range record.Headers {
				headers[string(h.Key)] = string(h.Value)
			}
			if _, end := headers[endHeader]; end {
				return found
			}
			found = append(found, place{partition, record.Offset, headers["message-id"]})
		case err := <-records.Errors():
			t.Fatalf("read partition %d of %s: %v", partition, topic, err)
		case <-limit:
			t.Fatalf("read partition %d of %s: %d records within two minutes, and not its end", partition, topic, len(found))
		}
	}
}

var consoleLine = regexp.MustCompile(`(?m)^Partition:(\d+)\tOffset:(\d+)\t(\S*)$`)

var consoleID = regexp.MustCompile(`(?:^|,)message-id:([0-9a-f-]{36})(?:,|$)`)

// readConsole reads so many rows, and what ends the partitions, with Kafka's own console consumer,
// in the broker's container. Rows that came twice push others out.
func readConsole(t *testing.T, kafka *servers.Kafka, topic, level string, rows int) []place {
	t.Helper()
	partitions := partitionsOf(t, kafka.Brokers, topic)
	output, err := kafka.Exec(t.Context(), "/opt/kafka/bin/kafka-console-consumer.sh", "--bootstrap-server", "localhost:9094",
		"--topic", topic, "--from-beginning", "--isolation-level", level, "--timeout-ms", "60000",
		"--max-messages", strconv.Itoa(rows+len(partitions)),
		"--formatter-property", "print.partition=true", "--formatter-property", "print.offset=true",
		"--formatter-property", "print.headers=true", "--formatter-property", "print.value=false")
	require.NoError(t, err)
	var found []place
	ends := 0
	for _, line := range consoleLine.FindAllSubmatch(output, -1) {
		if string(line[3]) == endHeader+":null" {
			ends++
			continue
		}
		partition, err := strconv.ParseInt(string(line[1]), 10, 32)
		require.NoError(t, err)
		offset, err := strconv.ParseInt(string(line[2]), 10, 64)
		require.NoError(t, err)
		id := consoleID.FindSubmatch(line[3])
		require.NotNil(t, id, "no message-id in %s", line[0])
		found = append(found, place{int32(partition), offset, string(id[1])})
	}
	require.Len(t, partitions, ends, "the console consumer did not get to the end:\n%.2000s", output)
	return found
}

// readForeign has every reader that is there for this Kafka read what is committed, and requires
// that they agree.
func readForeign(t *testing.T, kafka *servers.Kafka, topic string) []place {
	t.Helper()
	found := readSarama(t, kafka.Brokers, topic, sarama.ReadCommitted)
	if kafka.Kind != servers.KindContainer {
		t.Logf("read_committed: %d records by sarama; there is no container with Kafka's console consumer", len(found))
		return found
	}
	console := readConsole(t, kafka, topic, "read_committed", len(found))
	t.Logf("read_committed: %d records by sarama, %d by kafka-console-consumer.sh", len(found), len(console))
	require.ElementsMatch(t, console, found)
	return found
}

// requireRowsOnce requires that a reader saw each committed row of the outbox once, by its ID and
// by its place, and nothing else.
func requireRowsOnce(t *testing.T, pool *pgxpool.Pool, topic string, found []place) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT id::text FROM effectonce.outbox WHERE topic = $1`, topic)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, ids)
	missing := map[string]bool{}
	for _, id := range ids {
		missing[id] = true
	}
	byID, byOffset := map[string]place{}, map[string]place{}
	var doubled, strange []string
	for _, p := range found {
		where := fmt.Sprintf("%d/%d", p.partition, p.offset)
		first, again := byID[p.id]
		if again {
			doubled = append(doubled, fmt.Sprintf("%s at %s and at %d/%d", p.id, where, first.partition, first.offset))
		} else if !missing[p.id] {
			strange = append(strange, p.id+" at "+where)
		}
		byID[p.id], byOffset[where] = p, p
		delete(missing, p.id)
	}
	require.Empty(t, doubled, "INVARIANT: rows seen twice")
	require.Empty(t, strange, "INVARIANT: records of no row")
	require.Empty(t, slices.Collect(maps.Keys(missing)), "INVARIANT: rows never seen")
	require.Len(t, byOffset, len(ids), "one offset for each row")
}

// transactionVersion is the cluster's transaction.version: from 2 on (KIP-890) each transaction has
// a producer epoch of its own, and brokers refuse what comes too late for its transaction.
func transactionVersion(t *testing.T, brokers []string) int16 {
	t.Helper()
	client := kafkatest.ClientAt(t, brokers)
	request := kmsg.NewPtrApiVersionsRequest()
	request.ClientSoftwareName, request.ClientSoftwareVersion = "effectonce-test", "1"
	response, err := request.RequestWith(t.Context(), client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.ErrorCode))
	for _, feature := range response.FinalizedFeatures {
		if feature.Name == "transaction.version" {
			return feature.MaxVersionLevel
		}
	}
	return 0
}
