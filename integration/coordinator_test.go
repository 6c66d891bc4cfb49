package integration_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// transactionFaults are what brokers answer to the requests of a transaction while coordinators
// move, load, or have heard of another producer.
func transactionFaults(version int16) map[kmsg.Key][]*kerr.Error {
	moving := []*kerr.Error{kerr.NotCoordinator, kerr.CoordinatorLoadInProgress, kerr.CoordinatorNotAvailable, kerr.ConcurrentTransactions}
	fatal := []*kerr.Error{kerr.ProducerFenced, kerr.InvalidProducerEpoch, kerr.InvalidProducerIDMapping, kerr.InvalidTxnState, kerr.UnknownServerError}
	faults := map[kmsg.Key][]*kerr.Error{
		kmsg.InitProducerID: moving,
		kmsg.EndTxn:         append(append([]*kerr.Error{kerr.RequestTimedOut}, moving...), fatal...),
	}
	if version < 2 { // from 2 on brokers add the partitions of a produce request themselves
		faults[kmsg.AddPartitionsToTxn] = append(append([]*kerr.Error{}, moving...), kerr.ProducerFenced, kerr.InvalidProducerEpoch, kerr.InvalidProducerIDMapping)
	} else {
		faults[kmsg.Produce] = []*kerr.Error{kerr.ConcurrentTransactions, kerr.InvalidTxnState, kerr.InvalidProducerEpoch, kerr.NotEnoughReplicas, kerr.NotEnoughReplicasAfterAppend}
	}
	return faults
}

// Property: while the coordinators of transactions move from broker to broker, load, are not there
// or say that a transaction is still being ended, and when they refuse the producer for good in the
// middle of a transaction, a reader of committed records that is not the relay's client sees each
// row once. Both for brokers with a producer epoch for each transaction (KIP-890) and without. Rows
// O28, O30, O31 of guarantees.md.
//
// kfake is made to answer so; its coordinators move at each fault.
func TestMovingCoordinatorsLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	versions := map[int16][]kfake.Opt{2: nil, 0: {kfake.MaxVersions(kversion.V3_7_0())}}
	for version, opts := range versions {
		for key, answers := range transactionFaults(version) {
			t.Run(fmt.Sprintf("transaction.version %d/%s", version, key.Name()), func(t *testing.T) {
				t.Parallel()
				if version != 2 || key != kmsg.EndTxn {
					longtest.Only(t, "six of them; the ends of transactions are what matters most")
				}
				fake := kafkatest.Fake(t, append(opts, kfake.NumBrokers(3))...)
				require.Equal(t, version, transactionVersion(t, fake.ListenAddrs()), "the test's own premise")
				moveCoordinators(t, fake, key, answers)
			})
		}
	}
}

// moveCoordinators moves them before each of the answers to a request.
func moveCoordinators(t *testing.T, fake *kfake.Cluster, key kmsg.Key, answers []*kerr.Error) {
	t.Helper()
	readOnce(t, fake.ListenAddrs(), nil, func(write func()) {
		for _, answer := range answers {
			faults := []kfake.Fault{{Keys: []kmsg.Key{key}, Err: answer}}
			if key == kmsg.InitProducerID { // which a relay asks for when it has to start over
				faults = append(faults, kfake.Fault{Keys: []kmsg.Key{kmsg.EndTxn}, Err: kerr.ProducerFenced})
			}
			handle := fake.Fault(faults...)
			fake.RehashCoordinators()
			eventually(t, fmt.Sprintf("%s answers %s", key.Name(), answer.Message), func() (bool, any) {
				write()
				return handle.Hits() == len(faults), handle.Hits()
			})
			handle.Remove()
		}
	})
}

// readOnce has a relay publish what is written while it is disturbed, and reads it with another
// client.
func readOnce(t *testing.T, brokers []string, opts []kgo.Opt, disturb func(write func())) {
	t.Helper()
	ctx, pool := t.Context(), open(t, pgtest.Database(t))
	createWorkload(t, pool)
	topic := kafkatest.TopicAt(t, brokers, 3)
	r, err := relay.New(pool, append(opts, kgo.SeedBrokers(brokers...)), relay.Config{
		ExactlyOnce: true, Lease: 2 * time.Second, TransactionMax: 20 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	require.NoError(t, err)
	stop := runs(t, r)
	seed := uint64(0)
	disturb(func() {
		seed++
		writers{goroutines: 2, transactions: 4, keys: 5, topic: topic, seed: seed}.run(ctx, t, pool)
	})
	requirePublishedAt(t, brokers, pool, topic)
	stop()
	writeEnds(t, brokers, topic)
	found := readSarama(t, brokers, topic, sarama.ReadCommitted)
	requireRowsOnce(t, pool, topic, found)
	t.Logf("%d rows; a reader of uncommitted records sees %d more", len(found), len(readSarama(t, brokers, topic, sarama.ReadUncommitted))-len(found))
}

// Property: a commit that the brokers made, and whose answer never arrived, is no reason to publish
// its rows again, and is not taken for failed: a reader of committed records sees each row once.
// Rows O28, O30 of guarantees.md.
func TestLostAnswersToCommits(t *testing.T) {
	t.Parallel()
	for version, opts := range map[int16][]kfake.Opt{2: nil, 0: {kfake.MaxVersions(kversion.V3_7_0())}} {
		for name, client := range map[string][]kgo.Opt{"client asks again": nil, "client gives up": {kgo.RequestRetries(0)}} {
			t.Run(fmt.Sprintf("transaction.version %d/%s", version, name), func(t *testing.T) {
				t.Parallel()
				if version != 2 || client == nil {
					longtest.Only(t, "four of them; one is enough")
				}
				fake := kafkatest.Fake(t, append(opts, kfake.NumBrokers(1))...)
				require.Equal(t, version, transactionVersion(t, fake.ListenAddrs()), "the test's own premise")
				loseAnswers(t, fake.ListenAddrs(), client)
			})
		}
	}
}

func loseAnswers(t *testing.T, brokers []string, client []kgo.Opt) {
	t.Helper()
	var left, lost atomic.Int64 // answers to lose
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, address)
		return &deafConn{Conn: conn, left: &left, lost: &lost}, err
	}
	readOnce(t, brokers, append(client, kgo.Dialer(dial)), func(write func()) {
		for n := int64(1); n <= 3; n++ {
			left.Store(1)
			eventually(t, "the answer to a commit is lost", func() (bool, any) {
				write()
				return lost.Load() >= n, lost.Load()
			})
		}
	})
}

// deafConn breaks when the answer to a commit arrives, as long as there are answers left to lose.
type deafConn struct {
	net.Conn

	left, lost *atomic.Int64
	deaf       atomic.Bool
}

// Write sees requests as the client writes them: length, then key.
func (c *deafConn) Write(request []byte) (int, error) {
	if len(request) > 6 && int16(binary.BigEndian.Uint16(request[4:])) == int16(kmsg.EndTxn) && c.left.Add(-1) >= 0 {
		c.deaf.Store(true)
	}
	return c.Conn.Write(request)
}

func (c *deafConn) Read(answer []byte) (int, error) {
	n, err := c.Conn.Read(answer)
	if err == nil && c.deaf.Load() {
		c.lost.Add(1)
		return 0, errors.Join(io.ErrUnexpectedEOF, c.Close())
	}
	return n, err
}
