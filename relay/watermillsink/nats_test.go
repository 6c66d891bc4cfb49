package watermillsink_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
	"github.com/effectonce/effectonce/relay/watermillsink"
)

// natsCommand makes the test's binary a NATS server, which can be killed without killing the test.
const natsCommand = "nats-server"

// runNATS serves JetStream on the loopback address over a directory, says where, and ends with its
// standard input.
func runNATS(directory, port string) {
	number, err := strconv.Atoi(port)
	if err != nil {
		panic(err)
	}
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: number, JetStream: true, StoreDir: directory, SyncAlways: true, NoSigs: true, NoLog: true,
	})
	if err != nil {
		panic(err)
	}
	s.Start()
	if !s.ReadyForConnections(time.Minute) {
		panic("NATS does not start")
	}
	if _, err := fmt.Fprintln(os.Stdout, s.ClientURL()); err != nil {
		panic(err)
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // ends when the test's process does, however that ends
}

// natsServer is a NATS that is killed and started anew on the same directory and port.
type natsServer struct {
	directory, url string
	command        *exec.Cmd
	input          io.Closer
}

func startNATS(t *testing.T) *natsServer {
	t.Helper()
	s := &natsServer{directory: t.TempDir()}
	s.start(t, "-1") // any free port
	t.Cleanup(func() { s.kill(t) })
	return s
}

func (s *natsServer) start(t *testing.T, port string) {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	// It outlives the test's context until the cleanup.
	s.command = exec.CommandContext(context.WithoutCancel(t.Context()), program, natsCommand, s.directory, port)
	s.command.Stderr = os.Stderr
	s.input, err = s.command.StdinPipe()
	require.NoError(t, err)
	output, err := s.command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.command.Start())
	line, err := bufio.NewReader(output).ReadString('\n')
	require.NoError(t, err, "NATS does not start")
	s.url = strings.TrimSpace(line)
}

// kill ends the server as a crash does.
func (s *natsServer) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, s.command.Process.Kill())
	require.Error(t, s.command.Wait(), "it was killed")
}

func (s *natsServer) restart(t *testing.T) {
	t.Helper()
	address, err := url.Parse(s.url)
	require.NoError(t, err)
	s.start(t, address.Port())
}

func (s *natsServer) connect(t *testing.T) *nats.Conn {
	t.Helper()
	conn, err := nats.Connect(s.url, nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.ReconnectJitter(0, 0))
	require.NoError(t, err)
	t.Cleanup(func() {
		closed := conn.StatusChanged(nats.CLOSED)
		conn.Close()
		<-closed
	})
	return conn
}

// counting counts the messages that a publisher took.
type counting struct {
	message.Publisher

	took atomic.Int64
}

func (c *counting) Publish(topic string, messages ...*message.Message) error {
	err := c.Publisher.Publish(topic, messages...)
	if err == nil {
		c.took.Add(int64(len(messages)))
	}
	return err
}

// Property: NATS is killed and started anew while the relay runs: no row is lost, and the rows of a
// key are in order among first occurrences. Where JetStream knows the IDs, each row is there once.
func TestRowsReachJetStreamThatIsKilled(t *testing.T) {
	longtest.Only(t, "a broker that is killed while rows are published")
	t.Parallel()
	for name, tracked := range map[string]bool{"JetStream tracks IDs": true, "JetStream does not track IDs": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testRowsReachJetStreamThatIsKilled(t, tracked)
		})
	}
}

func testRowsReachJetStreamThatIsKilled(t *testing.T, tracked bool) {
	t.Helper()
	const rounds, keys, each = 3, 20, 15
	broker, pool := startNATS(t), pgtest.Pool(t)
	reading, err := jetstream.New(broker.connect(t))
	require.NoError(t, err)
	_, err = reading.CreateStream(t.Context(), jetstream.StreamConfig{Name: "orders", Subjects: []string{"orders.*"}})
	require.NoError(t, err)

	native, err := wmnats.NewPublisherWithNatsConn(broker.connect(t), wmnats.PublisherPublishConfig{
		Marshaler:         &wmnats.NATSMarshaler{},
		SubjectCalculator: wmnats.DefaultSubjectCalculator,
		JetStream:         wmnats.JetStreamConfig{TrackMsgId: tracked, ConnectOptions: []nats.JSOpt{nats.MaxWait(500 * time.Millisecond)}},
	}, nil)
	require.NoError(t, err)
	publisher := &counting{Publisher: native}
	troubles := make(chan error, 10_000)
	r := newRelay(t, pool, newSink(t, publisher, watermillsink.Config{Batch: 7}), relay.Config{
		Shards: 2, PageRowsMax: 50, Hooks: relay.Hooks{Interrupted: func(err error) { troubles <- err }},
	})
	stop := starts(t, r)

	some := func(from, to int) {
		for i := from; i < to; i++ {
			var messages []outbox.Message
			for key := range keys {
				messages = append(messages, outbox.Message{Topic: fmt.Sprint("orders.", key%3), Key: fmt.Append(nil, key), Payload: fmt.Appendf(nil, "%d %d", key, i)})
			}
			publish(t, pool, messages...)
		}
	}
	for round := range rounds {
		first, half := round*each, round*each+each/2
		if some(first, half); round == rounds-1 {
			some(half, first+each)
			break
		}
		middle := int64((first + each/4) * keys)
		testwait.True(t, `publisher.took.Load() > middle`, func() bool { return publisher.took.Load() > middle })
		broker.kill(t)
		some(half, first+each) // whatever was published before, there are rows now
		require.ErrorContains(t, testwait.Chan(t, "the relay notices that NATS is gone", troubles), "hand rows to the sink")
		broker.restart(t)
	}
	const all = rounds * keys * each
	testwait.True(t, `publisher.took.Load() >= all`, func() bool { return publisher.took.Load() >= all })
	stop()
	testwait.True(t, "the leases are free", func() bool {
		_, err := r.Drain(t.Context())
		return err == nil
	})

	next := make([]int, keys)
	seen := map[string]bool{}
	for _, m := range readStream(t, reading, "orders") {
		id := m.Headers().Get("message-id")
		require.Equal(t, id, m.Headers().Get("_watermill_message_uuid"))
		if tracked {
			require.False(t, seen[id], "twice")
			require.Equal(t, id, m.Headers().Get(nats.MsgIdHdr))
		}
		if seen[id] {
			continue
		}
		seen[id] = true
		var key, number int
		_, err := fmt.Sscan(string(m.Data()), &key, &number)
		require.NoError(t, err)
		require.Equal(t, strconv.Itoa(key), m.Headers().Get("partition_key"))
		require.Equal(t, next[key], number, "INVARIANT: order of key %d", key)
		next[key]++
	}
	require.Len(t, seen, all)
}

// readStream returns all messages of a stream in its order.
func readStream(t *testing.T, js jetstream.JetStream, name string) []jetstream.Msg {
	t.Helper()
	stream, err := js.Stream(t.Context(), name)
	require.NoError(t, err)
	info, err := stream.Info(t.Context())
	require.NoError(t, err)
	reader, err := stream.OrderedConsumer(t.Context(), jetstream.OrderedConsumerConfig{})
	require.NoError(t, err)
	batch, err := reader.Fetch(int(info.State.Msgs), jetstream.FetchMaxWait(30*time.Second))
	require.NoError(t, err)
	var found []jetstream.Msg
	for m := range batch.Messages() {
		found = append(found, m)
	}
	require.NoError(t, batch.Error())
	require.Len(t, found, int(info.State.Msgs))
	return found
}
