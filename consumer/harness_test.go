package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// harness is a database with a table of effects that has no unique constraint (a second effect must
// show), a topic, and a consumer of it.
type harness struct {
	t     *testing.T
	pool  *pgxpool.Pool
	topic string
	log   *logLines
	tune  func(*consumer.Consumer) // before it runs; nil: none

	effects int // that the test waited for, or saw, last
}

func newHarness(t *testing.T, partitions int) *harness {
	t.Helper()
	h := &harness{t: t, pool: pgtest.Pool(t), topic: kafkatest.Topic(t, partitions), log: &logLines{}}
	h.exec(`CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, message_id uuid, value text)`)
	t.Cleanup(h.requireEffects) // consumers, which start later, stop before
	return h
}

func (h *harness) exec(sql string) {
	h.t.Helper()
	_, err := h.pool.Exec(h.t.Context(), sql)
	require.NoError(h.t, err)
}

func (h *harness) number(sql string, args ...any) int {
	h.t.Helper()
	return pgtest.Count(h.t, h.pool, sql, args...)
}

// produce sends one record for each value, in order, to partition 0, with a new ID in the
// message-id header.
func (h *harness) produce(values ...string) []uuid.UUID {
	h.t.Helper()
	ids := make([]uuid.UUID, len(values))
	for i, value := range values {
		var err error
		ids[i], err = uuid.NewV7()
		require.NoError(h.t, err)
		h.produceAs(ids[i].String(), value)
	}
	return ids
}

func (h *harness) produceAs(id, value string) {
	h.t.Helper()
	h.produceRecord(&kgo.Record{Value: []byte(value), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(id)}}})
}

func (h *harness) produceRecord(record *kgo.Record) {
	h.t.Helper()
	record.Topic = h.topic
	client := kafkatest.Client(h.t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	defer client.Close()
	require.NoError(h.t, client.ProduceSync(h.t.Context(), record).FirstErr())
}

// produceAll does what produce does, with one client.
func (h *harness) produceAll(values ...string) {
	h.t.Helper()
	client := kafkatest.Client(h.t, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	defer client.Close()
	records := make([]*kgo.Record, len(values))
	for i, value := range values {
		records[i] = &kgo.Record{Topic: h.topic, Value: []byte(value), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(uuid.Must(uuid.NewV7()).String())}}}
	}
	require.NoError(h.t, client.ProduceSync(h.t.Context(), records...).FirstErr())
}

// effect is the handler of most tests: one row for each message.
func effect(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
	_, err := tx.Exec(ctx, `INSERT INTO effects (message_id, value) VALUES ($1, $2)`, [16]byte(msg.ID), string(msg.Value))
	return err
}

// run starts a consumer and returns what stops it and returns what Run returned.
func (h *harness) run(handler consumer.Handler, change func(*consumer.Config)) (stop func() error) {
	h.t.Helper()
	return h.runOn(h.pool, handler, change)
}

func (h *harness) runOn(pool *pgxpool.Pool, handler consumer.Handler, change func(*consumer.Config)) (stop func() error) {
	h.t.Helper()
	return h.runWith(pool, nil, handler, change)
}

func (h *harness) runWith(pool *pgxpool.Pool, kafka []kgo.Opt, handler consumer.Handler, change func(*consumer.Config)) (stop func() error) {
	h.t.Helper()
	_, stop = h.startWith(pool, append(kafka, kgo.SeedBrokers(kafkatest.Brokers(h.t)...)), handler, change)
	return stop
}

// startWith is run for any brokers. It returns the consumer, too.
func (h *harness) startWith(pool *pgxpool.Pool, kafka []kgo.Opt, handler consumer.Handler, change func(*consumer.Config)) (c *consumer.Consumer, stop func() error) {
	h.t.Helper()
	cfg := consumer.Config{
		Group: h.topic, Topics: []string{h.topic}, RetryMin: time.Millisecond, RetryMax: 50 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(h.log, nil)),
	}
	if change != nil {
		change(&cfg)
	}
	c, err := consumer.New(pool, kafka, handler, cfg)
	require.NoError(h.t, err)
	if h.tune != nil {
		h.tune(c)
	}
	ctx, cancel := context.WithCancel(h.t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	var once sync.Once
	var result error
	stop = func() error {
		once.Do(func() {
			cancel()
			result = testwait.Chan(h.t, "the consumer stops", done)
		})
		return result
	}
	h.t.Cleanup(func() {
		_ = stop()
		if h.t.Failed() {
			h.t.Log(h.log.String())
		}
	})
	return c, stop
}

// bothModes tests without and with something, each with a name.
func bothModes(t *testing.T, name string, test func(t *testing.T, with bool)) {
	t.Helper()
	for _, with := range []bool{false, true} {
		t.Run(fmt.Sprintf("%s=%v", name, with), func(t *testing.T) {
			t.Parallel()
			test(t, with)
		})
	}
}

// wait waits for a condition, long enough for a slow machine.
func (h *harness) wait(what string, condition func() bool) {
	h.t.Helper()
	testwait.True(h.t, what, condition)
}

// waitEffects waits for n effects. There must be no more of them, neither now nor, unless the test
// waits for more or looks at them, when its consumers have stopped.
func (h *harness) waitEffects(n int) {
	h.t.Helper()
	h.wait(fmt.Sprintf("%d effects", n), func() bool { return h.number(`SELECT count(*) FROM effects`) >= n })
	require.Equal(h.t, n, h.number(`SELECT count(*) FROM effects`), "INVARIANT: effects are doubled")
	h.effects = n
}

// requireEffects is the look at the end of a test that waited for effects.
func (h *harness) requireEffects() {
	h.t.Helper()
	if h.effects == 0 || h.t.Failed() {
		return
	}
	var n int
	err := h.pool.QueryRow(context.WithoutCancel(h.t.Context()), `SELECT count(*) FROM effects`).Scan(&n)
	require.NoError(h.t, err)
	assert.Equal(h.t, h.effects, n, "INVARIANT: effects when the consumers have stopped")
}

// position is the stored position of partition 0.
func (h *harness) position() int {
	h.t.Helper()
	return h.number(`SELECT coalesce(max(next_offset), -1) FROM effectonce.consumer_positions WHERE topic = $1 AND partition = 0`, h.topic)
}

func (h *harness) values() []string {
	h.t.Helper()
	rows, err := h.pool.Query(h.t.Context(), `SELECT value FROM effects ORDER BY n`)
	require.NoError(h.t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(h.t, err)
	h.effects = len(found)
	return found
}

type logLines struct {
	mu   sync.Mutex
	text []byte
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, p...)
	return len(p), nil
}

func (l *logLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// block makes a failing message block its partition.
func block(c *consumer.Config) { c.OnFailure = consumer.OnFailureBlock }

// produceKeyed sends messages of the form key:value to partition 0, with new IDs.
func (h *harness) produceKeyed(messages ...string) {
	h.t.Helper()
	for _, message := range messages {
		key, _, _ := strings.Cut(message, ":")
		h.produceRecord(&kgo.Record{Key: []byte(key), Value: []byte(message), Headers: []kgo.RecordHeader{{Key: "message-id", Value: []byte(uuid.Must(uuid.NewV7()).String())}}})
	}
}

// parked lists the parked messages, in order: value, reason and state.
func (h *harness) parked() []string {
	h.t.Helper()
	rows, err := h.pool.Query(h.t.Context(), `SELECT convert_from(coalesce(payload, ''), 'UTF8') || ' ' || reason || ' ' || state FROM effectonce.parked_messages ORDER BY seq`)
	require.NoError(h.t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(h.t, err)
	return found
}

// waitParked waits until messages are parked for exactly these reasons, whatever is behind them.
func (h *harness) waitParked(reasons ...string) {
	h.t.Helper()
	h.wait("parked "+strings.Join(reasons, " "), func() bool {
		return h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE reason <> 'behind'`) == len(reasons) &&
			h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE reason = ANY ($1)`, reasons) == len(reasons)
	})
}

// retry retries all parked messages as an operator does.
func (h *harness) retry() {
	h.t.Helper()
	h.exec(`UPDATE effectonce.parked_messages SET state = 'retry', retry_at = clock_timestamp(), released_at = NULL WHERE state = 'parked'`)
}
