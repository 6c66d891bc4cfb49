package integration_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
	"go.uber.org/goleak"

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
	ctx, pool := t.Context(), openWorkload(t, pgtest.Database(t))
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

// distance makes the time between two durable steps long enough for faults to hit it.
const distance = `{"name": "distance", "type": "latency", "stream": "downstream", "attributes": {"latency": 20, "jitter": 10}}`

// proxy is a Toxiproxy between a process and a server.
type proxy struct {
	*toxiproxy.Proxy

	server   *toxiproxy.ApiServer
	repaired bool // toxics were removed from it
}

// newProxy listens at an address.
func newProxy(server *toxiproxy.ApiServer, listen, upstream string) (*toxiproxy.Proxy, error) {
	p := toxiproxy.NewProxy(server, upstream, listen, upstream)
	if _, err := p.Toxics.AddToxicJson(strings.NewReader(distance)); err != nil {
		return nil, err
	}
	return p, p.Start()
}

// renew replaces a proxy from which toxics were removed, at the same address. Toxiproxy leaves a
// removed toxic in a connection that was closing just then, and the next toxics that are added to
// that connection end the program.
func (p *proxy) renew() (err error) {
	if !p.repaired {
		return nil
	}
	p.Stop()
	p.Proxy, err = newProxy(p.server, p.Listen, p.Upstream)
	p.repaired = false
	return err
}

// proxies are the ways of one process to its servers.
type proxies struct {
	postgres, kafka []*proxy
	url             string            // of the database, through its proxy
	through         map[string]string // from the address that a broker advertises to its proxy
}

func newProxies(t *testing.T, database string) *proxies {
	t.Helper()
	zerolog.SetGlobalLevel(zerolog.Disabled) // toxics write to standard error
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	between := func(address string) *proxy {
		inner, err := newProxy(server, "127.0.0.1:0", address)
		require.NoError(t, err)
		p := &proxy{Proxy: inner, server: server}
		t.Cleanup(func() { _ = inTime(func() error { p.Stop(); return nil }) })
		return p
	}
	u, err := url.Parse(database)
	require.NoError(t, err)
	p := &proxies{postgres: []*proxy{between(u.Host)}, through: map[string]string{}}
	u.Host = p.postgres[0].Listen
	p.url = u.String()
	brokers, err := kadm.NewClient(kafkatest.Client(t)).ListBrokers(t.Context())
	require.NoError(t, err)
	for _, b := range brokers {
		address := net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
		broker := between(address)
		p.kafka = append(p.kafka, broker)
		p.through[address] = broker.Listen
	}
	return p
}

// seeds are the brokers as the cluster calls them, so that no way leads past the proxies.
func (p *proxies) seeds() []string {
	var seeds []string
	for _, between := range p.kafka {
		seeds = append(seeds, between.Upstream)
	}
	return seeds
}

// dialer goes through proxies; an address without one is refused.
func dialer(through map[string]string) kgo.Opt {
	return kgo.Dialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		listen, ok := through[address]
		if !ok {
			return nil, fmt.Errorf("no proxy for the broker at %s", address)
		}
		var d net.Dialer
		return d.DialContext(ctx, network, listen)
	})
}

var errStuck = errors.New("toxiproxy is stuck")

// inTime gives up on Toxiproxy, which can wait forever for a connection that ends while its toxics
// change.
func inTime(change func() error) error {
	done := make(chan error, 1)
	go func() { done <- change() }()
	select {
	case err := <-done:
		return err
	case <-time.After(5 * time.Second):
		return errStuck
	}
}

// toxic changes what goes one way through each of the proxies, also on connections that are open.
func toxic(list []*proxy, kind, way, attributes string) error {
	return inTime(func() error {
		for _, p := range list {
			if err := p.renew(); err != nil {
				return err
			}
			text := fmt.Sprintf(`{"type": %q, "stream": %q, "attributes": %s}`, kind, way, attributes)
			if _, err := p.Toxics.AddToxicJson(strings.NewReader(text)); err != nil {
				return err
			}
		}
		return nil
	})
}

// refuse closes all connections and takes no new ones.
func refuse(list []*proxy) error {
	return inTime(func() error {
		for _, p := range list {
			p.Stop()
		}
		return nil
	})
}

// letThrough lets everything through again. Connections whose bytes were dropped are closed.
func letThrough(ctx context.Context, list []*proxy) error {
	return inTime(func() error {
		for _, p := range list {
			for _, present := range p.Toxics.GetToxicArray() {
				if name := present.(*toxics.ToxicWrapper).Name; name != "distance" {
					p.repaired = true
					if err := p.Toxics.RemoveToxic(ctx, name); err != nil {
						return err
					}
				}
			}
			if err := p.Start(); err != nil && !errors.Is(err, toxiproxy.ErrProxyAlreadyStarted) {
				return err
			}
		}
		return nil
	})
}

// leftByProxies are goroutines for bytes to peers that were killed: Toxiproxy never ends them.
func leftByProxies() []goleak.Option {
	const module = "github.com/Shopify/toxiproxy/v2"
	return []goleak.Option{
		goleak.IgnoreAnyFunction(module + ".(*ToxicLink).read"),
		goleak.IgnoreAnyFunction(module + ".(*ToxicLink).write"),
		goleak.IgnoreAnyFunction(module + ".(*ToxicCollection).RemoveToxic"), // see inTime; the others wait for it
		goleak.IgnoreAnyFunction(module + ".(*ToxicCollection).StartLink"),
		goleak.IgnoreAnyFunction(module + ".(*Proxy).freeBlocker"),
		goleak.IgnoreAnyFunction(module + ".stop"),
		goleak.IgnoreAnyFunction(module + "/toxics.(*ToxicStub).Run"),
		goleak.IgnoreAnyFunction(module + "/toxics.(*ToxicStub).InterruptToxic"),
	}
}
