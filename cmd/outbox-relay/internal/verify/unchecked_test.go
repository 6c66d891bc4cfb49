package verify_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/verify"
	"github.com/effectonce/effectonce/internal/kafkatest"
)

// Property: a run that checked nothing is not well, and reports what it did not check and why.
func TestNothingCheckedIsNotWell(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.drain()
	unchecked := func(change func(*verify.Options)) []string {
		t.Helper()
		r := s.verify(change)
		assert.Equal(t, len(r.Unchecked) == 0, r.Well)
		return r.Unchecked
	}
	assert.Equal(t, []string{"no rows and no records: there was nothing to compare"}, unchecked(nil))
	missing := kafkatest.UnusedTopic(t)
	assert.Equal(t, []string{"topic " + missing + " does not exist: is its name misspelt?", "no rows and no records of the last 1h: there was nothing to compare"},
		unchecked(func(o *verify.Options) { o.Topics, o.Since = []string{missing}, time.Hour }))
	s.insert(4)
	s.drain()
	assert.Empty(t, unchecked(nil))
	s.consume(4)
	assert.Empty(t, unchecked(s.withGroup))
	other := kafkatest.Topic(t, 1)
	s.exec("INSERT INTO effectonce.outbox (topic) VALUES ($1)", other)
	s.drain()
	assert.Equal(t, []string{"no claims looked for: group " + s.group + " consumes none of these topics"},
		unchecked(func(o *verify.Options) { o.Group, o.Topics = s.group, []string{other} }))
	s.exec("UPDATE effectonce.consumer_positions SET next_offset = 0")
	assert.Equal(t, []string{"no claims looked for: group " + s.group + " has passed no record of " + s.topic}, unchecked(s.withGroup))

	s.exec("DELETE FROM effectonce.outbox")
	assert.Equal(t, []string{"no rows and no records: there was nothing to compare", "no claims looked for: no row names a topic to read: give --topic"}, unchecked(s.withGroup))

	r := s.verify(func(o *verify.Options) { o.Since = 30 * time.Second })
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
	kafkatest.AddPartitions(t, s.topic, 3)
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
