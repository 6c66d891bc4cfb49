package integration_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// maybe returns null, nothing, or some random bytes.
func maybe(random *rand.Rand) []byte {
	switch random.IntN(4) {
	case 0:
		return nil
	case 1:
		return []byte{}
	}
	b := make([]byte, 1+random.IntN(60))
	for i := range b {
		b[i] = byte(random.IntN(256))
	}
	return b
}

// Property: whatever is published, the record has key, value and headers byte for byte. Null and
// empty stay different, each header of a repeated name is there, and those of one name are in their
// order. Row O36 of guarantees.md.
func TestEveryRecordIsItsRow(t *testing.T) {
	t.Parallel()
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 3)
	random := rand.New(rand.NewPCG(36, 36))
	sent := map[string]outbox.Message{}
	var all []outbox.Message
	for range 500 {
		m := outbox.Message{ID: uuid.Must(uuid.NewV7()), Topic: topic, Key: maybe(random), Payload: maybe(random)}
		for range random.IntN(6) {
			m.Headers = append(m.Headers, outbox.Header{Name: string(rune('a' + random.IntN(3))), Value: maybe(random)})
		}
		sent[m.ID.String()] = m
		all = append(all, m)
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return outbox.Publish(ctx, tx, all...) }))
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(ctx)
	require.NoError(t, err)

	records := kafkatest.ReadAll(t, topic)
	require.Len(t, records, len(all))
	for _, record := range records {
		var own []outbox.Header
		var id string
		for _, h := range record.Headers {
			switch h.Key {
			case outbox.HeaderMessageID:
				id = string(h.Value)
			case outbox.HeaderOccurredAt:
			default:
				own = append(own, outbox.Header{Name: h.Key, Value: h.Value})
			}
		}
		m, known := sent[id]
		require.True(t, known, "published once: %s", id)
		delete(sent, id)
		same := func(what string, want, got []byte) {
			assert.True(t, bytes.Equal(want, got) && (want == nil) == (got == nil), "%s of %s: %#v became %#v", what, id, want, got)
		}
		same("key", m.Key, record.Key)
		same("value", m.Payload, record.Value)
		// The order across names is not kept.
		byName := func(a, b outbox.Header) int { return int(a.Name[0]) - int(b.Name[0]) }
		slices.SortStableFunc(m.Headers, byName)
		slices.SortStableFunc(own, byName)
		require.Len(t, own, len(m.Headers), id)
		for i, h := range m.Headers {
			assert.Equal(t, h.Name, own[i].Name)
			same("header "+h.Name, h.Value, own[i].Value)
		}
	}
}

// Property: a row that waited for a month is neither refused nor deleted by a topic that keeps a
// day and takes no older timestamps: its record has the time of publishing, and a header has the
// row's. Row O35 of guarantees.md.
func TestOldRowIsKeptByTheTopic(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	topic := kafkatest.Topic(t, 1, "retention.ms", "86400000", "message.timestamp.before.max.ms", "3600000")
	old := time.Now().Add(-30 * 24 * time.Hour).UTC().Truncate(time.Microsecond)
	_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload, created_at) VALUES ($1, 'k', 'old', $2)`, topic, old)
	require.NoError(t, err)
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(ctx)
	require.NoError(t, err)
	records := kafkatest.ReadAll(t, topic)
	require.Len(t, records, 1)
	assert.WithinDuration(t, time.Now(), records[0].Timestamp, time.Hour)
	assert.Contains(t, records[0].Headers, kgo.RecordHeader{Key: outbox.HeaderOccurredAt, Value: []byte(old.Format("2006-01-02T15:04:05.000000Z"))})
	assert.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_dead`))
}

// Property: a row of plain SQL whose record is exactly as large as the topic takes is published,
// and one that is a byte larger holds its key, unseen by Kafka: no other row fails with it, in the
// same page or batch. Row O11 of guarantees.md.
func TestRecordAtTheLimitOfTheTopic(t *testing.T) {
	t.Parallel()
	const limit = 5000
	ctx, pool, topic := t.Context(), pgtest.Pool(t), kafkatest.Topic(t, 1, "max.message.bytes", "5000")
	fits := limit - (&outbox.Message{Key: []byte("k0")}).RecordBytes()
	for key, size := range []int{fits, fits + 1, 1, fits} {
		_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, convert_to('k' || $2::int, 'UTF8'), convert_to(repeat('x', $3), 'UTF8'))`, topic, key, size)
		require.NoError(t, err)
	}
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, relay.Config{})
	require.NoError(t, err)
	_, err = r.Drain(ctx)
	require.NoError(t, err)
	var sizes []int
	for _, record := range kafkatest.ReadAll(t, topic) {
		sizes = append(sizes, len(record.Value))
	}
	assert.Equal(t, []int{fits, 1, fits}, sizes)
	assert.Equal(t, 1, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE reason = 'too_large' AND key = 'k1' AND state = 'held'`))
}
