package trace_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/trace"
	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

type site struct {
	*testing.T
	pool         *pgxpool.Pool
	topic, group string
	name         string
	aliases      map[string]string
}

func newSite(t *testing.T, partitions int) *site {
	t.Helper()
	topic := kafkatest.Topic(t, partitions)
	return &site{T: t, pool: pgtest.Pool(t), topic: topic, group: "g-" + topic}
}

func (s *site) exec(sql string, args ...any) {
	s.Helper()
	_, err := s.pool.Exec(s.Context(), sql, args...)
	require.NoError(s, err, sql)
}

func (s *site) options() []kgo.Opt { return []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(s)...)} }

// insert adds rows of seven keys, and one without a key.
func (s *site) insert(n int) {
	s.Helper()
	s.exec(`INSERT INTO effectonce.outbox (topic, key, payload) SELECT $1, nullif(n % 8, 0)::text::bytea, 'x' FROM generate_series(1, $2) n`, s.topic, n)
}

func (s *site) relay() *relay.Relay {
	s.Helper()
	r, err := relay.New(s.pool, s.options(), relay.Config{Lease: time.Minute})
	require.NoError(s, err)
	return r
}

func (s *site) drain() {
	s.Helper()
	_, err := s.relay().Drain(s.Context())
	require.NoError(s, err)
}

// start runs something until the function that it returns is called.
func (s *site) start(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(s.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	return func() {
		s.Helper()
		cancel()
		require.NoError(s, testwait.Chan(s, "the end", done))
	}
}

func (s *site) consumer(idHeaders ...string) *consumer.Consumer {
	s.Helper()
	nothing := consumer.Each(func(context.Context, pgx.Tx, *consumer.Message) error { return nil })
	c, err := consumer.New(s.pool, s.options(), nothing, consumer.Config{Group: s.group, Topics: []string{s.topic}, IDHeaders: idHeaders, Name: s.name, Aliases: s.aliases})
	require.NoError(s, err)
	return c
}

func (s *site) count(sql string) (n int) {
	s.Helper()
	require.NoError(s, s.pool.QueryRow(s.Context(), sql).Scan(&n))
	return n
}

func (s *site) consume(claims int, idHeaders ...string) {
	s.Helper()
	stop := s.start(s.consumer(idHeaders...).Run)
	testwait.True(s, "the claims", func() bool { return s.count("SELECT count(*) FROM effectonce.processed_messages") >= claims })
	stop()
}

func (s *site) verify(change func(*trace.VerifyOptions)) *trace.Report {
	s.Helper()
	opts := trace.VerifyOptions{Schema: "effectonce", Relay: "default", Examples: 3}
	if change != nil {
		change(&opts)
	}
	report, err := trace.Verify(s.Context(), s.pool, &trace.Kafka{Client: s.client(), Options: s.options()}, opts)
	require.NoError(s, err)
	return report
}

func (s *site) client() *kgo.Client { return kafkatest.Client(s) }

func (s *site) withGroup(o *trace.VerifyOptions) { o.Group = s.group }

// again produces the record of a row, as a relay does.
func (s *site) again(seq int) {
	s.Helper()
	var id string
	var key []byte
	require.NoError(s, s.pool.QueryRow(s.Context(), "SELECT id::text, key FROM effectonce.outbox WHERE seq = $1", seq).Scan(&id, &key))
	record := &kgo.Record{Topic: s.topic, Key: key, Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}}
	require.NoError(s, kafkatest.Client(s).ProduceSync(s.Context(), record).FirstErr())
}

// Property: claims are looked for under the IDs that the consumer's own rule gives: no message that it handled
// is called lost. A table that is locked hides nothing else.
func TestTheConsumersRuleCounts(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	for n := range 5 {
		headers := []kgo.RecordHeader{{Key: "message-id", Value: fmt.Append(nil, "m", n)}, {Key: "x", Value: fmt.Append(nil, "x", n)}}
		require.NoError(t, s.client().ProduceSync(t.Context(), &kgo.Record{Topic: s.topic, Headers: headers}).FirstErr())
	}
	s.consume(5, "x")
	s.drain()
	report := s.verify(func(o *trace.VerifyOptions) { o.Group, o.Topics = s.group, []string{s.topic} })
	assert.Equal(t, []int64{5, 0}, []int64{report.Claimed, report.Unclaimed.Count}, report)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE effectonce.parked_messages, effectonce.outbox_dead IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	for _, text := range []string{s.topic + "/0/3", "x3"} {
		x, err := trace.Explain(t.Context(), s.pool, &trace.Kafka{Client: s.client(), Options: s.options()}, trace.Question{Schema: "effectonce", Text: text, Since: time.Hour, ScanMax: 100})
		require.NoError(t, err)
		require.Len(t, x.Claims, 1, text)
		assert.Equal(t, "x3", x.Records[0].MessageID)
		assert.Contains(t, strings.Join(x.Problems, "\n"), "read parked messages: ERROR: canceling statement due to lock timeout")
	}
	require.NoError(t, tx.Rollback(t.Context()))
}

// Property: claims of a mirrored topic are looked for under what its consumer calls it.
func TestMirroredTopicsAreClaimedUnderTheirSource(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "billing"} { // Config.Name
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, 1)
			s.name, s.aliases = name, map[string]string{s.topic: "orders"}
			for n := range 5 {
				require.NoError(t, s.client().ProduceSync(t.Context(), &kgo.Record{Topic: s.topic, Headers: []kgo.RecordHeader{{Key: "message-id", Value: fmt.Append(nil, "m", n)}}}).FirstErr())
			}
			s.consume(5)
			s.drain()
			report := s.verify(func(o *trace.VerifyOptions) { o.Group, o.Topics = s.group, []string{s.topic} })
			assert.Equal(t, []int64{5, 0}, []int64{report.Claimed, report.Unclaimed.Count}, report)
			for _, text := range []string{s.topic + "/0/3", "m3"} {
				x, err := trace.Explain(t.Context(), s.pool, &trace.Kafka{Client: s.client(), Options: s.options()}, trace.Question{Schema: "effectonce", Text: text, Since: time.Hour, ScanMax: 100})
				require.NoError(t, err)
				require.Len(t, x.Claims, 1, text)
				require.Len(t, x.Records, 1, text)
			}
		})
	}
}

// everythingPublished moves progress past all rows, as if they were in the topic.
const everythingPublished = `WITH tick AS (INSERT INTO effectonce.outbox_ticks (snapshot, seq_last) SELECT pg_current_snapshot(), 1000000 RETURNING tick)
	, shard AS (INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('default', 0) ON CONFLICT DO NOTHING)
	INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick)
	SELECT 'default', 0, coalesce((SELECT max(n) FROM effectonce.outbox_advances WHERE relay = 'default' AND shard = 0), 0) + 1, 0, tick FROM tick`

// Property: what relay and consumer did is well, all of it was checked, and waiting rows are no
// fault of the topic.
func TestWhatWasPublishedIsWell(t *testing.T) {
	t.Parallel()
	s := newSite(t, 3)
	s.insert(5100) // more than a page
	s.drain()
	s.consume(5100)
	s.insert(3)
	r := s.verify(s.withGroup)
	assert.True(t, r.Well, "%+v", r)
	assert.Equal(t, []int64{5103, 5100, 5100, 5100, 0, 0, 0}, []int64{r.Rows, r.Published, r.Records, r.Claimed, r.Foreign, r.Expired, r.Moved})
	assert.Equal(t, []string{s.topic}, r.Topics)
}

// Property: a published row without a record, a record that is there twice, one behind a later row
// of its key, and a message that was passed without a claim are found, counted and named; nothing
// else is.
func TestEachFaultIsFound(t *testing.T) {
	t.Parallel()
	t.Run("missing", func(t *testing.T) {
		t.Parallel()
		s := newSite(t, 2)
		s.insert(20)
		s.drain()
		s.insert(5)
		s.exec(everythingPublished)
		r := s.verify(nil)
		assert.False(t, r.Well)
		assert.EqualValues(t, 5, r.Missing.Count)
		require.Len(t, r.Missing.Examples, 3)
		assert.Regexp(t, `^row 2\d \(id \S{36}\) is published, but not in topic `+s.topic+`$`, r.Missing.Examples[0])
		assert.Zero(t, r.Duplicates.Count+r.OutOfOrder.Count)
		for seq := 21; seq <= 25; seq++ {
			s.again(seq)
		}
		assert.True(t, s.verify(nil).Well)
	})
	t.Run("twice", func(t *testing.T) {
		t.Parallel()
		s := newSite(t, 2)
		s.insert(20)
		s.drain()
		s.again(3) // behind later rows of its key: only the first time counts for the order
		r := s.verify(nil)
		assert.False(t, r.Well)
		assert.EqualValues(t, 1, r.Duplicates.Count)
		assert.Contains(t, r.Duplicates.Examples[0], " and again at "+s.topic+"/")
		assert.Zero(t, r.Missing.Count+r.OutOfOrder.Count)
		assert.True(t, s.verify(func(o *trace.VerifyOptions) { o.DuplicatesAllowed = true }).Well)
	})
	t.Run("order", func(t *testing.T) {
		t.Parallel()
		s := newSite(t, 2)
		s.insert(24)
		for _, seq := range []int{1, 17, 9, 2, 10, 18, 24, 16, 8} { // 17 before 9; 24, 16 and 8 have no key
			s.again(seq)
		}
		r := s.verifyAfter(everythingPublished, "DELETE FROM effectonce.outbox WHERE seq NOT IN (1, 17, 9, 2, 10, 18, 24, 16, 8)")
		assert.False(t, r.Well)
		assert.EqualValues(t, 1, r.OutOfOrder.Count, r.OutOfOrder.Examples)
		assert.Regexp(t, `^row 9 at \S+/2 comes behind row 17 of the same key at \S+/1$`, r.OutOfOrder.Examples[0])
		assert.Zero(t, r.Missing.Count+r.Duplicates.Count)
	})
	t.Run("claim", func(t *testing.T) {
		t.Parallel()
		s := newSite(t, 1)
		s.insert(20)
		s.drain()
		s.consume(20)
		s.insert(2) // beyond the position
		s.drain()
		s.exec("DELETE FROM effectonce.processed_messages WHERE message_id IN (SELECT id FROM effectonce.outbox WHERE seq IN (4, 5))")
		assert.True(t, s.verify(nil).Well, "claims are looked at only of a group")
		r := s.verify(s.withGroup)
		assert.False(t, r.Well)
		assert.EqualValues(t, 2, r.Unclaimed.Count)
		assert.Contains(t, strings.Join(r.Unclaimed.Examples, "\n"), s.topic+"/0/3 is before the position of group "+s.group)
		assert.EqualValues(t, 20, r.Claimed)
		// A ledger's consumer claims elsewhere.
		s.exec(`INSERT INTO effectonce.processed_forever (message_id, consumer, fingerprint) SELECT id, 1, 0 FROM effectonce.outbox WHERE seq IN (4, 5)`)
		assert.True(t, s.verify(s.withGroup).Well)
		s.exec("DELETE FROM effectonce.processed_forever")
		s.exec("UPDATE effectonce.consumers SET dedup_window = '59 min'")
		r = s.verify(s.withGroup)
		assert.False(t, r.Well, "claims that may be forgotten by now")
		assert.Equal(t, []string{"no claims looked for: no record of " + s.topic + " is before the position of group " + s.group + ", carries an ID and is within the dedup window (less 1h: claims may just be forgotten)"}, r.Unchecked)
	})
}

func (s *site) verifyAfter(sql ...string) *trace.Report {
	s.Helper()
	for _, statement := range sql {
		s.exec(statement)
	}
	return s.verify(nil)
}

// Property: dead rows, rows that an operator discarded, rows that came twice under one ID, and rows
// whose records Kafka deleted are not missing.
func TestWhatIsNotThereWithGoodReason(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.insert(10)
	s.exec("INSERT INTO effectonce.outbox (topic) VALUES ($1)", kafkatest.UnusedTopic(t))
	s.drain()
	r := s.verify(nil)
	assert.True(t, r.Well, "%+v", r)
	assert.EqualValues(t, 10, r.Published)
	s.exec("UPDATE effectonce.outbox_dead SET state = 'discarded'")
	assert.True(t, s.verify(nil).Well)

	// The key of rows 1 and 9, published again: 9 at its old place comes before the second 1.
	s.exec("INSERT INTO effectonce.outbox (topic, key, id) SELECT topic, key, id FROM effectonce.outbox WHERE seq = 1")
	s.drain()
	r = s.verify(nil)
	assert.True(t, r.Well, "%+v", r)
	assert.Zero(t, r.Duplicates.Count)

	var offsets kadm.Offsets
	offsets.Add(kadm.Offset{Topic: s.topic, At: 6})
	deleted, err := kadm.NewClient(kafkatest.Client(t)).DeleteRecords(t.Context(), offsets)
	require.NoError(t, err)
	require.NoError(t, deleted.Error())
	s.insert(1)
	s.exec(everythingPublished)
	r = s.verify(nil)
	assert.EqualValues(t, 5, r.Expired, "of the six, row 1 is there under its later record: %+v", r)
	assert.EqualValues(t, 1, r.Missing.Count, "the row that was never published: %v", r.Missing.Examples)
}

// Property: only what is in the window, and in the requested topics, is checked.
func TestWindows(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	other := kafkatest.Topic(t, 1)
	s.exec("INSERT INTO effectonce.outbox (topic, created_at) VALUES ($1, now() - interval '2 hours'), ($1, now()), ($2, now())", s.topic, other)
	s.exec(everythingPublished)
	assert.EqualValues(t, 3, s.verify(nil).Missing.Count)
	r := s.verify(func(o *trace.VerifyOptions) { o.Since = time.Hour })
	assert.EqualValues(t, 2, r.Missing.Count)
	assert.NotNil(t, r.Since)
	r = s.verify(func(o *trace.VerifyOptions) { o.Topics = []string{other} })
	assert.EqualValues(t, 1, r.Missing.Count)
	assert.Equal(t, []string{other}, r.Topics)
	assert.EqualValues(t, 1, r.Rows)
}

// meanwhile does something right before and right after progress is read.
type meanwhile struct {
	*pgxpool.Pool
	happen func()
}

func (m meanwhile) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	switch {
	case strings.HasPrefix(sql, "-- pipeline.shards"), strings.HasPrefix(sql, "-- trace.outbox"):
		m.happen()
	}
	return m.Pool.Query(ctx, sql, args...)
}

// Property: progress is read before the end of any topic: what is published at the last moment
// before it is found, and what is published after it is no fault either.
func TestProgressIsReadFirst(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.drain()
	happened := 0
	db := meanwhile{s.pool, func() {
		happened++
		s.insert(5)
		s.drain()
	}}
	opts := trace.VerifyOptions{Schema: "effectonce", Relay: "default", Topics: []string{s.topic}, Examples: 3}
	r, err := trace.Verify(t.Context(), db, &trace.Kafka{Client: s.client(), Options: s.options()}, opts)
	require.NoError(t, err)
	assert.True(t, r.Well, "%+v", r)
	assert.Equal(t, 2, happened)
	assert.Equal(t, []int64{10, 5}, []int64{r.Rows, r.Published})
}

// Property: a run that checked nothing is not well, and reports what it did not check and why.
func TestNothingCheckedIsNotWell(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.drain()
	unchecked := func(change func(*trace.VerifyOptions)) []string {
		t.Helper()
		r := s.verify(change)
		assert.Equal(t, len(r.Unchecked) == 0, r.Well)
		return r.Unchecked
	}
	assert.Equal(t, []string{"no rows and no records: there was nothing to compare"}, unchecked(nil))
	missing := kafkatest.UnusedTopic(t)
	assert.Equal(t, []string{"topic " + missing + " does not exist: was it deleted, or is its name misspelt?", "no rows and no records of the last 1h: there was nothing to compare"},
		unchecked(func(o *trace.VerifyOptions) { o.Topics, o.Since = []string{missing}, time.Hour }))
	s.insert(4)
	s.drain()
	assert.Empty(t, unchecked(nil))
	s.consume(4)
	assert.Empty(t, unchecked(s.withGroup))
	other := kafkatest.Topic(t, 1)
	s.exec("INSERT INTO effectonce.outbox (topic) VALUES ($1)", other)
	s.drain()
	none := "no claims looked for: group " + s.group + " consumes none of the topics that rows name: give --topic"
	assert.Equal(t, []string{none}, unchecked(func(o *trace.VerifyOptions) { o.Group, o.Topics = s.group, []string{other} }))
	s.exec("UPDATE effectonce.consumer_positions SET next_offset = 0")
	passed := unchecked(s.withGroup)
	require.Len(t, passed, 1)
	assert.Contains(t, passed[0], "no record of "+s.topic+" is before the position of group "+s.group)

	s.exec("DELETE FROM effectonce.outbox")
	assert.Equal(t, []string{"no rows and no records: there was nothing to compare", none}, unchecked(s.withGroup))

	r := s.verify(func(o *trace.VerifyOptions) { o.Since = 30 * time.Second })
	assert.Equal(t, []string{"--since 30s is shorter than the 1m by which clocks may differ: records from up to that long before --since were read, but their rows were not"}, r.Notes)
}

// Property: rows whose records Kafka deleted are not missing after partitions were added, since
// they were in the partition of their time; nor are rows that asked for a partition. What is
// younger than what was deleted is missing.
func TestDeletedRecordsAfterPartitionsWereAdded(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.insert(16)
	s.drain()
	admin := kadm.NewClient(kafkatest.Client(t))
	deleteBefore := func(partition int32, offset int64) {
		t.Helper()
		var offsets kadm.Offsets
		offsets.Add(kadm.Offset{Topic: s.topic, Partition: partition, At: offset})
		deleted, err := admin.DeleteRecords(t.Context(), offsets)
		require.NoError(t, err)
		require.NoError(t, deleted.Error())
	}
	deleteBefore(0, 12)
	added, err := admin.CreatePartitions(t.Context(), 3, s.topic)
	require.NoError(t, err)
	require.NoError(t, added.Error())
	testwait.Equal(t, 4, "the new partitions can be used", func() int {
		starts, err := admin.ListStartOffsets(t.Context(), s.topic)
		require.NoError(t, err)
		return len(starts[s.topic])
	})
	s.insert(24) // by a client that knows of all partitions
	s.drain()
	r := s.verify(nil)
	assert.True(t, r.Well, "%v", r.Missing.Examples)
	assert.EqualValues(t, 12, r.Expired)

	// Keys of the partition that lost nothing since: a row of theirs that is not there is missing.
	s.insert(24)
	s.exec(everythingPublished)
	r = s.verify(nil)
	assert.EqualValues(t, 24, r.Missing.Count)
	assert.EqualValues(t, 12, r.Expired)

	asked := newSite(t, 2)
	asked.exec(`INSERT INTO effectonce.outbox (topic, key, payload, headers) SELECT $1, n::text::bytea, 'x', '{"effectonce-partition": "1"}' FROM generate_series(1, 8) n`, asked.topic)
	asked.drain()
	s = asked
	deleteBefore(1, 5)
	r = asked.verify(nil)
	assert.True(t, r.Well, "%v", r.Missing.Examples)
	assert.EqualValues(t, 5, r.Expired)
}
