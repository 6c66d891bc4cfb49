package relay_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// relayAt is newRelay for a cluster of the test's own.
func relayAt(t *testing.T, pool *pgxpool.Pool, fake *kfake.Cluster, cfg relay.Config, more ...kgo.Opt) *relay.Relay {
	t.Helper()
	cfg.Lease = cmp.Or(cfg.Lease, time.Minute)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	opts := []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.MetadataMinAge(10 * time.Millisecond)}
	r, err := relay.New(pool, append(opts, more...), cfg)
	require.NoError(t, err)
	return r
}

// runAt lets it run until the test ends.
func runAt(t *testing.T, pool *pgxpool.Pool, fake *kfake.Cluster, cfg relay.Config) {
	t.Helper()
	cfg.Lease = cmp.Or(cfg.Lease, 30*time.Second)
	starts(t, relayAt(t, pool, fake, cfg))
}

// incompressible returns a text of n bytes.
func incompressible(n int) string {
	raw := make([]byte, n)
	_, _ = rand.Read(raw)
	return base64.StdEncoding.EncodeToString(raw)[:n]
}

func keyedAt(t *testing.T, fake *kfake.Cluster, topic, key string) []string {
	t.Helper()
	found := []string{}
	for _, record := range kafkatest.ReadAllAt(t, fake.ListenAddrs(), topic) {
		if string(record.Key) == key {
			found = append(found, string(record.Value))
		}
	}
	return found
}

func deadReasons(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return one[[]string](t, pool, `SELECT coalesce(array_agg(reason ORDER BY seq), '{}') FROM effectonce.outbox_dead`)
}

// rights is a cluster in which everybody may do everything, except what is denied.
func rights(t *testing.T, opts ...kfake.Opt) (fake *kfake.Cluster, deny func(topic string, operations ...kadm.ACLOperation) (allow func())) {
	t.Helper()
	all := func(of kmsg.ACLResourceType, name string) kfake.ACL {
		return kfake.ACL{Resource: of, Name: name, Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: kmsg.ACLOperationAll, Allow: true}
	}
	fake = kafkatest.Fake(t, append(opts, kfake.NumBrokers(1), kfake.EnableACLs(), kfake.User("PLAIN", "ANONYMOUS", "none",
		all(kmsg.ACLResourceTypeTopic, "*"), all(kmsg.ACLResourceTypeTransactionalId, "*"), all(kmsg.ACLResourceTypeGroup, "*"), all(kmsg.ACLResourceTypeCluster, "kafka-cluster")))...)
	admin := kadm.NewClient(kafkatest.ClientAt(t, fake.ListenAddrs()))
	return fake, func(topic string, operations ...kadm.ACLOperation) func() {
		t.Helper()
		builder := kadm.NewACLs().ResourcePatternType(kadm.ACLPatternLiteral).Topics(topic).Deny("User:ANONYMOUS").DenyHosts("*").Operations(operations...)
		created, err := admin.CreateACLs(t.Context(), builder)
		require.NoError(t, err)
		for _, c := range created {
			require.NoError(t, c.Err)
		}
		return func() {
			t.Helper()
			deleted, err := admin.DeleteACLs(t.Context(), builder)
			require.NoError(t, err)
			require.NotEmpty(t, deleted)
		}
	}
}

// Property: rows of a topic that the relay may not describe, or not write to, wait in their order
// and stop no other topic; when the right is back they are published by themselves, before later
// ones. The log says it once when it begins and once when it ends.
func TestTopicThatIsNotAllowedWaits(t *testing.T) {
	t.Parallel()
	operations := map[string]kadm.ACLOperation{"describe": kadm.OpDescribe, "write": kadm.OpWrite}
	eachBoth(t, operations, func(t *testing.T, operation kadm.ACLOperation, exactly bool) {
		t.Helper()
		pool := pgtest.Pool(t)
		fake, deny := rights(t, kfake.SeedTopics(1, "orders", "secret"))
		allow := deny("secret", operation)
		var said lockedBuffer
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly, Logger: slog.New(slog.NewTextHandler(&said, nil))})
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('secret', 'k', '1'), ('orders', 'k', 'flows'), ('secret', 'k', '2'), ('secret', 'l', '3')`)
		testwait.True(t, "other topics flow", func() bool { return slices.Contains(valuesAt(t, fake, "orders"), "flows") })
		testwait.True(t, "they wait", func() bool { return dead(t, pool) == 3 })
		require.Equal(t, []string{"not_authorized", "behind", "not_authorized"}, deadReasons(t, pool))
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead WHERE reason = 'not_authorized' LIMIT 1`), "grant")
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('secret', 'k', '4'), ('secret', 'm', '5')`)
		testwait.True(t, "they wait", func() bool { return dead(t, pool) == 5 })
		allow()
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('secret', 'k', '6')`)
		testwait.True(t, "they are published", func() bool { return dead(t, pool) == 0 && len(valuesAt(t, fake, "secret")) >= 6 })
		require.Equal(t, []string{"1", "2", "4", "6"}, keyedAt(t, fake, "secret", "k"))
		const again = "Kafka lets the relay use the topic again"
		testwait.True(t, "it says so", func() bool { return strings.Contains(said.String(), again) })
		require.Contains(t, said.String(), "Kafka does not let the relay use a topic")
		require.NotContains(t, said.String(), "cannot be published", "not for each row")
	})
}

// Property: the same if the brokers refuse to let the relay write, and do not report that in the
// topic's rights: those before Kafka 2.3, which do not report rights, and those that report wrong
// ones.
func TestTopicThatIsOnlyRefusedWaits(t *testing.T) {
	longtest.Only(t, "it waits until topics are asked for again")
	t.Parallel()
	brokers := map[string][]kfake.Opt{"silent": {kfake.MaxVersions(kversion.V2_2_0())}, "wrong": nil}
	eachBoth(t, brokers, func(t *testing.T, opts []kfake.Opt, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, append(opts, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders", "secret"))...)
		refused := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "secret", Err: kerr.TopicAuthorizationFailed, Count: -1})
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('secret', 'k', '1'), ('orders', 'k', 'flows'), ('secret', 'k', '2'), ('secret', 'l', '3')`)
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly})
		testwait.True(t, "other topics flow", func() bool { return slices.Contains(valuesAt(t, fake, "orders"), "flows") })
		testwait.True(t, "they wait", func() bool { return dead(t, pool) == 3 })
		require.Equal(t, []string{"not_authorized", "behind", "not_authorized"}, deadReasons(t, pool))
		tried := refused.Hits()
		testwait.True(t, "it is tried again", func() bool { return refused.Hits() > tried })
		becomes(t, pool, "they wait again", `SELECT count(*) >= 2 FROM effectonce.outbox_dead WHERE state = 'held'`)
		refused.Remove()
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('secret', 'k', '4')`)
		testwait.True(t, "they are published", func() bool { return dead(t, pool) == 0 && len(valuesAt(t, fake, "secret")) >= 4 })
		require.Equal(t, []string{"1", "2", "4"}, keyedAt(t, fake, "secret", "k"))
	})
}

// Property: a topic that Kafka cannot speak about for the moment stops no other for longer than a
// moment, and loses no row and no order.
func TestTopicThatIsUnclearWaits(t *testing.T) {
	t.Parallel()
	for why, exactly := range map[*kerr.Error]bool{kerr.LeaderNotAvailable: false, kerr.InvalidTopicException: true} {
		t.Run(why.Message, func(t *testing.T) {
			t.Parallel()
			pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "orders", "unclear"))
			unclear := fake.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: "unclear", Err: why, Count: -1})
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('unclear', 'k', '1'), ('orders', 'k', 'flows'), ('unclear', 'k', '2')`)
			runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly})
			testwait.True(t, "other topics flow", func() bool { return slices.Contains(valuesAt(t, fake, "orders"), "flows") })
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('unclear', 'k', '3')`)
			unclear.Remove()
			testwait.True(t, "they are published", func() bool { return dead(t, pool) == 0 && len(valuesAt(t, fake, "unclear")) >= 3 })
			require.Equal(t, []string{"1", "2", "3"}, keyedAt(t, fake, "unclear", "k"))
		})
	}
}

// Property: a topic that is deleted while its rows fill what may be in flight stops the others only until
// the client finds that out, some seconds. Row O12 of guarantees.md.
func TestDeletedTopicReleasesTheFlight(t *testing.T) {
	longtest.Only(t, "the time is the property")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "gone", "other"))
		var held atomic.Int64
		var deleted atomic.Bool
		onProduce(fake, func(records []byte) error {
			if deleted.Load() || !bytes.Contains(records, []byte("held")) {
				return nil
			}
			held.Add(1)
			return kerr.NotLeaderForPartition
		})
		// With the options that the relay has by default.
		r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...), kgo.ProducerBatchCompression(kgo.NoCompression())},
			relay.Config{ExactlyOnce: exactly, Lease: time.Minute, InFlightBytesMax: 64 << 10})
		require.NoError(t, err)
		starts(t, r)
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload) SELECT 'gone', 'k', convert_to('held' || repeat(md5(n::text), 100), 'UTF8') FROM generate_series(1, 100) n`)
		testwait.True(t, "they are under way", func() bool { return held.Load() > 3 })
		_, err = kafkaAdmin(t, fake).DeleteTopics(t.Context(), "gone")
		require.NoError(t, err)
		deleted.Store(true)
		begun := time.Now()
		insert(t, pool, "other", "k", "1")
		testwait.True(t, "the other topic flows", func() bool { return len(valuesAt(t, fake, "other")) == 1 })
		require.Less(t, time.Since(begun), 10*time.Second)
	})
}

func kafkaAdmin(t *testing.T, fake *kfake.Cluster) *kadm.Client {
	t.Helper()
	return kadm.NewClient(kafkatest.ClientAt(t, fake.ListenAddrs()))
}

// Property: the database bounds what a publisher inserts, also if it comes compressed from a table
// of the publisher's own, and outbox.Publish checks the bounds before.
func TestRowsAreBounded(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	must(t, pool, `CREATE TABLE source (payload bytea, key bytea, headers jsonb);
		INSERT INTO source VALUES (convert_to(repeat('x', 100000001), 'UTF8'), convert_to(repeat('x', 1048577), 'UTF8'), jsonb_build_object('h', repeat('x', 9000000)))`)
	require.Less(t, one[int](t, pool, `SELECT pg_column_size(headers) FROM source`), 2<<20, "the test's own premise")
	for _, columns := range []string{"payload", "key", "headers"} {
		_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, `+columns+`) SELECT 't', `+columns+` FROM source`)
		require.ErrorContains(t, err, "outbox_row_is_out_of_bounds", columns)
		_, err = pool.Exec(t.Context(), `INSERT INTO effectonce.outbox_scheduled (due_at, topic, `+columns+`) SELECT now(), 't', `+columns+` FROM source`)
		require.ErrorContains(t, err, "outbox_scheduled_row_is_out_of_bounds", columns)
	}
	large, err := outbox.New(outbox.Config{RecordBytesMax: 100_000_000})
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
	err = large.Publish(t.Context(), tx, outbox.Message{Topic: "t", Key: make([]byte, 1<<20+1), Headers: []outbox.Header{{Name: "h", Value: make([]byte, 1<<20)}}})
	require.ErrorIs(t, err, outbox.ErrInvalid)
	require.ErrorContains(t, err, "Key has 1048577 bytes: want at most 1048576")
	require.ErrorContains(t, err, "Headers take 1048587 bytes: want at most 1048576")
	require.NoError(t, large.Publish(t.Context(), tx, outbox.Message{Topic: "t", Key: make([]byte, 1<<20), Headers: []outbox.Header{{Name: "h", Value: make([]byte, 1<<20-11)}}}))
}

// countedConn counts what a server sends.
type countedConn struct {
	net.Conn
	read *atomic.Int64
}

func (c countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Add(int64(n))
	return n, err
}

// Property: large rows behind small ones are read once: a page is cut by bytes on the server. Order
// and values are kept, also where small and large rows alternate, with and without keys, and where
// a single row is larger than a page. Row O47 of guarantees.md.
func TestLargeRowsAreReadOnce(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "10000000")
	var read atomic.Int64
	config := pool.Config()
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return countedConn{conn, &read}, err
	}
	counted := pgtest.PoolOf(t, config)
	must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload)
		SELECT $1, CASE WHEN n % 3 > 0 THEN 'k'::bytea END, convert_to(n || '-' || repeat('x', CASE WHEN n <= 3000 THEN 10
			WHEN n % 50 = 0 THEN 3000000 WHEN n % 5 = 0 THEN 5 ELSE 100000 END), 'UTF8') FROM generate_series(1, 3250) AS n`, topic)
	want := one[int64](t, pool, `SELECT sum(octet_length(payload) + 100) FROM effectonce.outbox`)

	drain(t, newRelay(t, counted, relay.Config{InFlightBytesMax: 8 << 20, RecordBytesMax: 4 << 20}))
	got := values(t, topic)
	require.Len(t, got, 3250)
	for i, value := range got {
		number, _, _ := strings.Cut(value, "-")
		require.Equal(t, fmt.Sprint(i+1), number)
	}
	t.Logf("%d bytes of rows, %d bytes read", want, read.Load())
	require.Less(t, float64(read.Load()), 1.3*float64(want))
}

// Property: headers whose text is much longer than what is stored are refused: the relay would read
// up to a gigabyte, or fail, for a row of a few kilobytes.
func TestHeadersThatInflateAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	headers := `{"a":[` + strings.TrimSuffix(strings.Repeat("1e131071,", 100), ",") + `]}` // of 131,072 digits each
	for _, sql := range []string{
		`INSERT INTO effectonce.outbox (topic, headers) VALUES ('t', $1::text::jsonb)`,
		`INSERT INTO effectonce.outbox_scheduled (due_at, topic, headers) VALUES (now(), 't', $1::text::jsonb)`,
	} {
		_, err := pool.Exec(t.Context(), sql, headers)
		require.ErrorContains(t, err, "row_is_out_of_bounds")
	}
}

// Property: headers that Publish accepts are accepted by the tables, as they are and compressed,
// now and for later, and in another cluster, whatever bytes they are of.
func TestHeadersThatPublishAcceptsFit(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	large, err := outbox.New(outbox.Config{RecordBytesMax: 100_000_000})
	require.NoError(t, err)
	for i, value := range []string{"\x01", "\xff", "ü"} {
		n := (1<<20 - 20) / len(value)
		msg := outbox.Message{ID: uuid.New(), Topic: "t", Headers: []outbox.Header{{Name: "h", Value: []byte(strings.Repeat(value, n))}}}
		later := msg
		later.DeliverAt = time.Unix(1000, 0)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return large.Publish(ctx, tx, msg, later) }), "%d", i)
	}
	moved, err := newRelay(t, pool, relay.Config{}).PromotePage(ctx, 100)
	require.NoError(t, err)
	require.Equal(t, 3, moved)
	must(t, pool, `UPDATE effectonce.outbox SET txid = pg_current_xact_id()`)
	require.Equal(t, 6, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`))
}
