package integration_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
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

	"github.com/effectonce/effectonce/internal/crashpoint"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: a relay that is frozen in the middle of a transaction, and never wakes, holds up
// readers of committed records no longer than until its successor takes the shard and fences it,
// well before the transaction would time out; records of the aborted transaction are there for
// readers of uncommitted records only. When it wakes after all, also if it still takes the lease
// for its own, it publishes nothing, and its progress is refused by the brokers, or by the database
// where the brokers had taken it before. Rows O8, O13, O30 of guarantees.md.
func TestFrozenInATransactionIsFencedAndHarmlessWhenItWakes(t *testing.T) {
	longtest.Only(t, "twenty seconds for processes that are frozen")
	t.Parallel()
	for _, point := range []string{crashpoint.RelayProduced, crashpoint.RelayAcknowledged, crashpoint.RelayCommitted} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			either(t, "hears of its loss", "trusts its lease", func(t *testing.T, trusts bool) {
				t.Helper()
				freezeTransaction(t, point, trusts)
			})
		})
	}
}

func freezeTransaction(t *testing.T, point string, trusts bool) {
	t.Helper()
	ctx, kafka := t.Context(), kafkatest.Kafka(t)
	t.Logf("transaction.version %d", transactionVersion(t, kafka.Brokers))
	// A cluster of its own, because a transaction is held open.
	c := child{Role: "relay", URL: pgtest.Cluster(t, nil).URL, Brokers: kafka.Brokers, Lease: time.Second, ExactlyOnce: true}
	pgtest.Migrate(t, c.URL)
	pool := openWorkload(t, c.URL)
	topic := kafkatest.Topic(t, 1)
	writers{goroutines: 4, transactions: 80, keys: 5, topic: topic, seed: 1}.run(ctx, t, pool)
	asleep := c
	if asleep.FreezeAt = point; trusts {
		asleep.Lease = time.Minute
	}
	zombie := start(t, asleep)
	eventually(t, "the relay freezes", func() (bool, any) { return frozen(zombie), zombie.log })
	hanging := partitionsOf(t, kafka.Brokers, topic)[0]
	if point != crashpoint.RelayCommitted {
		require.Zero(t, hanging.stable)
	}
	if point != crashpoint.RelayProduced {
		require.Positive(t, hanging.end, "the transaction has records")
	}
	if trusts { // as if the database's clock had moved: the zombie hears nothing of it
		_, err := pool.Exec(ctx, `UPDATE effectonce.outbox_progress SET lease_until = NULL`)
		require.NoError(t, err)
		_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_replicas SET alive_until = '-infinity'`)
		require.NoError(t, err)
	}
	heir := start(t, c)
	// Less than the transaction's 30 s: the successor ends it, not the broker.
	eventually(t, "the last stable offset moves", func() (bool, any) {
		now := partitionsOf(t, kafka.Brokers, topic)[0]
		return now.stable == now.end && (point == crashpoint.RelayCommitted || now.stable > hanging.stable), now
	})
	writers{goroutines: 4, transactions: 80, keys: 5, topic: topic, seed: 2}.run(ctx, t, pool)
	requirePublished(t, pool, topic)
	rows := count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox`)
	const published = `SELECT sum(published) FROM effectonce.outbox_progress_now`
	require.Equal(t, rows, count(ctx, t, pool, published))
	before := partitionsOf(t, kafka.Brokers, topic)

	wake(t, pool, zombie, trusts && point != crashpoint.RelayCommitted)
	require.Equal(t, before, partitionsOf(t, kafka.Brokers, topic))
	require.Equal(t, rows, count(ctx, t, pool, published))
	require.NoError(t, zombie.terminate())
	require.NoError(t, heir.terminate())
	require.Equal(t, rows, count(ctx, t, pool, published))
	writeEnds(t, kafka.Brokers, topic)
	requireRowsOnce(t, pool, topic, readSarama(t, kafka.Brokers, topic, sarama.ReadCommitted))
	all := len(readSarama(t, kafka.Brokers, topic, sarama.ReadUncommitted))
	t.Logf("%d rows; a reader of uncommitted records sees %d more, of the aborted transaction", rows, all-rows)
	if point == crashpoint.RelayAcknowledged {
		require.Equal(t, rows+int(hanging.end), all)
	}
}

// wake returns when the zombie has noticed. With fenced, the brokers must be the ones to report it:
// the database is kept from reporting it before.
func wake(t *testing.T, pool *pgxpool.Pool, zombie *process, fenced bool) {
	t.Helper()
	hears := func(what string, texts ...string) {
		eventually(t, what, func() (bool, any) {
			said := zombie.log.String()
			return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(said, text) }), said
		})
	}
	if !fenced {
		zombie.signal(syscall.SIGCONT)
		hears("the zombie starts over", "relay interrupted")
		return
	}
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), `SELECT FROM effectonce.outbox_replicas WHERE alive_until = '-infinity' FOR UPDATE`)
	require.NoError(t, err)
	zombie.signal(syscall.SIGCONT)
	hears("the brokers answer the zombie", childAnswered)
	require.NoError(t, tx.Rollback(t.Context()))
	hears("the zombie is fenced", kerr.ProducerFenced.Message, kerr.InvalidProducerEpoch.Message)
}

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
