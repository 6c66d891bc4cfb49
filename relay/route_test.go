package relay_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: each row goes where the first matching rule sends it, with the prefix. A dropped row is
// counted and logged, holds nothing up and is not published.
func TestRowsGoWhereRulesSendThem(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "eu.orders", "eu.vip", "eu.acme.events", "eu.plain"))
		var said bytes.Buffer
		dropped := map[string]int{}
		cfg := relay.Config{
			ExactlyOnce: exactly, Logger: slog.New(slog.NewTextHandler(&said, nil)),
			Hooks: relay.Hooks{Dropped: func(topic string) { dropped[topic]++ }},
			Routes: relay.Routes{Prefix: "eu.", Rules: []relay.Rule{
				{Topic: "orders", Header: "test", Value: "true|1", Drop: true},
				{Topic: "orders", Header: "tier", Value: "gold", To: "vip"},
				{Topic: `(\w+)\.events`, To: "$1.events"},
				{Topic: "noise.*", Drop: true},
				{Topic: "orders"},
				{Topic: "orders", To: "never"},
			}},
		}
		for _, row := range [][2]string{
			{"orders", `{}`},
			{"orders", `{"tier": "gold"}`},
			{"orders", `{"test": true, "tier": "gold"}`},
			{"orders", `{"tier": ["silver", "gold"]}`},
			{"orders", `{"tier": "golden"}`},
			{"acme.events", `{}`},
			{"plain", `{}`},
			{"noise-1", `{}`},
			{"noise-1", `{}`},
		} {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ($1, 'k', convert_to($1 || $2, 'UTF8'), $2::jsonb)`, row[0], row[1])
		}
		r := relayAt(t, pool, fake, cfg)
		require.EqualValues(t, 6, drain(t, r))
		require.Zero(t, drain(t, r), "progress is behind all of them")
		require.Zero(t, dead(t, pool))
		for topic, want := range map[string][]string{
			"eu.orders": {`orders{}`, `orders{"tier": "golden"}`}, "eu.vip": {`orders{"tier": "gold"}`, `orders{"tier": ["silver", "gold"]}`},
			"eu.acme.events": {`acme.events{}`}, "eu.plain": {`plain{}`},
		} {
			require.Equal(t, want, valuesAt(t, fake, topic), topic)
		}
		require.Equal(t, map[string]int{"orders": 1, "noise-1": 2}, dropped)
		require.Equal(t, 2, strings.Count(said.String(), "a rule drops rows"), "once for each topic")
	})
}

// Property: names that people use are those of the outbox, with dead rows, pauses and what waits
// for a topic in Kafka; a row that waits goes where rules send it then, also to nowhere, and what
// is behind it follows.
func TestRoutedRowsWait(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "eu.orders"))
		rules := []relay.Rule{{Topic: "orders", Header: "tier", Value: "gold", To: "vip"}, {Topic: "orders", Header: "tier", Value: "lead", To: "lead"}}
		cfg := relay.Config{ExactlyOnce: exactly, Routes: relay.Routes{Prefix: "eu.", Rules: rules}}
		put := func(key, value, tier string) {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', convert_to($1, 'UTF8'), convert_to($2, 'UTF8'), jsonb_build_object('tier', $3::text))`, key, value, tier)
		}
		put("a", "a1", "gold")
		put("b", "b1", "lead")
		put("c", "c1", "none")
		put("a", "a2", "none")
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		r := relayAt(t, pool, fake, cfg)
		go func() { done <- r.Run(ctx) }()
		testwait.True(t, "one flows, the others wait", func() bool { return len(valuesAt(t, fake, "eu.orders")) == 1 && dead(t, pool) == 3 })
		require.Equal(t, []string{"unknown_topic", "unknown_topic", "behind"}, deadReasons(t, pool))
		require.Contains(t, one[string](t, pool, `SELECT error FROM effectonce.outbox_dead WHERE convert_from(payload, 'UTF8') = 'a1'`), `"eu.vip" does not exist`)
		createAt(t, fake, "eu.vip")
		testwait.True(t, "what waits for that topic follows, with what is behind", func() bool { return dead(t, pool) == 1 && len(valuesAt(t, fake, "eu.orders")) == 2 })
		require.Equal(t, []string{"a1"}, valuesAt(t, fake, "eu.vip"))
		require.Equal(t, []string{"c1", "a2"}, valuesAt(t, fake, "eu.orders"))
		stop()
		require.NoError(t, <-done)

		put("b", "b2", "none")
		cfg.Routes.Rules = []relay.Rule{{Topic: "orders", Header: "tier", Value: "lead", Drop: true}}
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry'`)
		drain(t, relayAt(t, pool, fake, cfg))
		require.Zero(t, dead(t, pool))
		require.Equal(t, []string{"c1", "a2", "b2"}, valuesAt(t, fake, "eu.orders"))
	})
}

func createAt(t *testing.T, fake *kfake.Cluster, topic string) {
	t.Helper()
	_, err := kafkaAdmin(t, fake).CreateTopic(t.Context(), 1, 1, nil, topic)
	require.NoError(t, err)
}

// Property: rules and rates that cannot work are refused at the start, all at once, with the field
// and the bound.
func TestRoutesAreChecked(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := relay.New(pool, nil, relay.Config{
		Routes: relay.Routes{Prefix: "a/", Rules: []relay.Rule{
			{Topic: "(", To: "b"},
			{Header: "h", Value: "[", To: "b"},
			{Value: "v", To: "b"},
			{Topic: "a", To: "b", Drop: true},
			{Drop: true},
			{Topic: "(a)", To: "$2"},
			{Topic: "(?P<n>a)", To: "${m}"},
			{Topic: "(a)", To: "$1b"},
			{Topic: "a", To: "b c"},
			{Topic: strings.Repeat("a", 2000), To: "b"},
		}},
	})
	require.Error(t, err)
	for _, problem := range []string{
		`Routes.Prefix "a/"`, `Rules[0]: Topic "("`, `Rules[1]: Value "["`, `Rules[2]: Value without Header`, `Rules[3]: Drop and To "b"`, `Rules[4]: Drop of all rows`,
		`Rules[5]: To "$2": Topic "(a)" has no group "2"`, `Rules[6]: To "${m}"`, `Rules[7]: To "$1b": Topic "(a)" has no group "1b"; write ${1} before letters and digits`,
		`Rules[8]: To "b c"`, `Rules[9]: Topic has 2000 bytes: want at most 1000`,
	} {
		require.ErrorContains(t, err, problem)
	}
	_, err = relay.New(pool, nil, relay.Config{Routes: relay.Routes{Prefix: "eu.", Rules: []relay.Rule{{Topic: `(?P<team>\w+)-(.*)`, To: "${team}.$2"}}}})
	require.NoError(t, err)
}

// Property: the form of the command line is read as it is documented, and what is not of that form
// is refused.
func TestParseRule(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]relay.Rule{
		`topic=a\.(.*);to=b.$1`:                     {Topic: `a\.(.*)`, To: "b.$1"},
		`topic=a; header=tenant; value=x=y|z; drop`: {Topic: "a", Header: "tenant", Value: "x=y|z", Drop: true},
		`header=h;keep`:                             {Header: "h"},
	} {
		rule, err := relay.ParseRule(text)
		require.NoError(t, err, text)
		require.Equal(t, want, rule)
	}
	for _, text := range []string{"", "topic=a", "topic=a;to=", "topic=a;drop;keep", "topic=a;drop=1", "name=a;drop", "topic=a;to=b;;"} {
		_, err := relay.ParseRule(text)
		require.Error(t, err, text)
	}
}

// Property: a row that asks for a partition which was just added is published, by a relay that knew
// the topic before.
func TestAddedPartitionIsSeen(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(2, "orders"))
		buried := atomic.Int64{}
		runAt(t, pool, fake, relay.Config{ExactlyOnce: exactly, Hooks: relay.Hooks{Dead: func(string, relay.Reason) { buried.Add(1) }}})
		insert(t, pool, "orders", "k", "1")
		testwait.True(t, "it knows the topic", func() bool { return len(valuesAt(t, fake, "orders")) == 1 })
		_, err := kafkaAdmin(t, fake).CreatePartitions(t.Context(), 3, "orders")
		require.NoError(t, err)
		// Time for another question, which nothing shows: the relay does not ask more often.
		require.True(t, pause.For(t.Context(), 200*time.Millisecond))
		must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', 'l', '2', '{"effectonce-partition": "4"}')`)
		testwait.True(t, "it is published", func() bool { return slices.Contains(valuesAt(t, fake, "orders"), "2") })
		require.Zero(t, buried.Load())
	})
}

// Property: a row that asks for a partition gets it, by Go and by plain SQL, without the header in
// its record; one that asks for what the topic does not have, or for no number, is dead of it; all
// others go where they would have gone.
func TestRowsChooseTheirPartition(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(4, "orders"))
		three := int32(3)
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			return outbox.Publish(t.Context(), tx,
				outbox.Message{Topic: "orders", Key: []byte("go"), Payload: []byte("3"), Partition: &three, Headers: []outbox.Header{{Name: "a", Value: []byte("b")}}},
				outbox.Message{Topic: "orders", Key: []byte("plain"), Payload: []byte("k")})
		}))
		for i := range 12 {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', 'one key', convert_to($1, 'UTF8'), jsonb_build_object('effectonce-partition', $2::int))`, fmt.Sprint(i%4), i%4)
		}
		for key, headers := range map[string]string{
			"over": `{"effectonce-partition": 4}`, "text": `{"effectonce-partition": "two"}`, "twice": `{"effectonce-partition": [1, 2]}`, "negative": `{"effectonce-partition": -1}`,
		} {
			must(t, pool, `INSERT INTO effectonce.outbox (topic, key, payload, headers) VALUES ('orders', convert_to($1, 'UTF8'), 'bad', $2::jsonb)`, key, headers)
		}
		r := relayAt(t, pool, fake, relay.Config{ExactlyOnce: exactly})
		require.EqualValues(t, 14, drain(t, r))
		require.Equal(t, []string{"bad_partition", "bad_partition", "bad_partition", "bad_partition"}, deadReasons(t, pool))
		records := kafkatest.ReadAllAt(t, fake.ListenAddrs(), "orders")
		require.Len(t, records, 14)
		for _, record := range records {
			if value := string(record.Value); value != "k" {
				require.Equal(t, value, fmt.Sprint(record.Partition))
			}
			require.Empty(t, header(record, outbox.HeaderPartition))
		}
		require.True(t, slices.ContainsFunc(records, func(r *kgo.Record) bool {
			return string(r.Key) == "go" && slices.Equal(header(r, "a"), []string{"b"})
		}), "other headers stay")

		insert(t, pool, "orders", "over", "behind")
		drain(t, r)
		require.Equal(t, 5, dead(t, pool), "it holds its key")
		_, err := kafkaAdmin(t, fake).CreatePartitions(t.Context(), 1, "orders")
		require.NoError(t, err)
		must(t, pool, `UPDATE effectonce.outbox_dead SET state = 'retry' WHERE key = 'over' AND state = 'held'`)
		testwait.True(t, "added partitions are seen, by the client, too", func() bool {
			_, _ = r.Drain(t.Context())
			return dead(t, pool) == 3
		})
		require.Equal(t, []string{"behind", "bad"}, keyedAt(t, fake, "orders", "over"), "of different partitions")
	})
}
