package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// harness is a database with a table of effects that has no unique constraint (a second effect must
// show), a topic, and a consumer of it.
type harness struct {
	t       *testing.T
	pool    *pgxpool.Pool
	brokers []string
	topic   string
	log     *logLines
	kafka   []kgo.Opt                // of its consumers, beside the brokers
	tune    func(*consumer.Consumer) // before it runs; nil: none

	effects int // that the test waited for, or saw, last
}

func newHarness(t *testing.T, partitions int) *harness {
	t.Helper()
	h := newHarnessOn(t, pgtest.Pool(t), partitions)
	t.Cleanup(h.requireEffects) // consumers, which start later, stop before
	return h
}

func newHarnessOn(t *testing.T, pool *pgxpool.Pool, partitions int) *harness {
	t.Helper()
	h := &harness{t: t, pool: pool, brokers: kafkatest.Brokers(t), topic: kafkatest.Topic(t, partitions), log: &logLines{}}
	h.exec(`CREATE TABLE effects (n bigint GENERATED ALWAYS AS IDENTITY, message_id uuid, value text)`)
	return h
}

// newFaked is newHarness on a kfake that only this test uses, for faults.
func newFaked(t *testing.T, partitions int32) (*harness, *kfake.Cluster) {
	t.Helper()
	h := newHarness(t, 1)
	fake := kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(partitions, h.topic))
	h.brokers = fake.ListenAddrs()
	return h, fake
}

// answer answers the requests of a kind that a kfake gets. nil leaves the answer to the kfake.
func answer[R kmsg.Request](fake *kfake.Cluster, with func(request R) kmsg.Response) {
	var kind R
	fake.ControlKey(kind.Key(), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		response := with(request.(R))
		return response, nil, response != nil
	})
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

// newID is the header of a message with a new ID.
func newID() []kgo.RecordHeader { return headers("message-id=" + uuid.Must(uuid.NewV7()).String()) }

// headers makes headers of pairs "name=value".
func headers(pairs ...string) []kgo.RecordHeader {
	made := make([]kgo.RecordHeader, len(pairs))
	for i, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		made[i] = kgo.RecordHeader{Key: name, Value: []byte(value)}
	}
	return made
}

// produceRecords sends records to their partitions, in order.
func (h *harness) produceRecords(records ...*kgo.Record) {
	h.t.Helper()
	client := kafkatest.ClientAt(h.t, h.brokers, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	defer client.Close()
	for _, record := range records {
		record.Topic = h.topic
	}
	require.NoError(h.t, client.ProduceSync(h.t.Context(), records...).FirstErr())
}

// produce sends one record for each value, with new IDs, to partition 0.
func (h *harness) produce(values ...string) {
	h.t.Helper()
	h.produceEach(0, values...)
}

// produceEach is produce for any partition.
func (h *harness) produceEach(partition int32, values ...string) {
	h.t.Helper()
	records := make([]*kgo.Record, len(values))
	for i, value := range values {
		records[i] = &kgo.Record{Partition: partition, Value: []byte(value), Headers: newID()}
	}
	h.produceRecords(records...)
}

// produceKeyed sends messages of the form key:value to partition 0, with new IDs.
func (h *harness) produceKeyed(messages ...string) {
	h.t.Helper()
	records := make([]*kgo.Record, len(messages))
	for i, message := range messages {
		key, _, _ := strings.Cut(message, ":")
		records[i] = &kgo.Record{Key: []byte(key), Value: []byte(message), Headers: newID()}
	}
	h.produceRecords(records...)
}

// produceWith sends one record for each value, all with the same headers.
func (h *harness) produceWith(with []kgo.RecordHeader, values ...string) {
	h.t.Helper()
	records := make([]*kgo.Record, len(values))
	for i, value := range values {
		records[i] = &kgo.Record{Value: []byte(value), Headers: with}
	}
	h.produceRecords(records...)
}

func (h *harness) produceAs(id, value string) {
	h.t.Helper()
	h.produceWith(headers("message-id="+id), value)
}

// numbered are n values: 0, 1 and so on.
func numbered(n int) (values []string) {
	for i := range n {
		values = append(values, fmt.Sprint(i))
	}
	return values
}

// versions are messages key:version of some keys, each version of all keys before the next one.
func versions(keys, first, end int) (messages []string) {
	for version := first; version < end; version++ {
		for key := range keys {
			messages = append(messages, fmt.Sprintf("k%d:%d", key, version))
		}
	}
	return messages
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
	_, stop = h.begin(h.t.Context(), h.makeOn(pool, handler, change))
	return stop
}

// start is run that returns the consumer, too, which often looks after its partitions.
func (h *harness) start(handler consumer.Handler, change func(*consumer.Config)) (c *consumer.Consumer, stop func() error) {
	h.t.Helper()
	c = h.make(handler, change)
	_, stop = h.begin(h.t.Context(), c)
	return c, stop
}

// make makes a consumer that does not run yet, and then often looks after its partitions.
func (h *harness) make(handler consumer.Handler, change func(*consumer.Config)) *consumer.Consumer {
	h.t.Helper()
	c := h.makeOn(h.pool, handler, change)
	consumer.WatchEvery(c, 20*time.Millisecond)
	return c
}

func (h *harness) makeOn(pool *pgxpool.Pool, handler consumer.Handler, change func(*consumer.Config)) *consumer.Consumer {
	h.t.Helper()
	cfg := consumer.Config{
		Group: h.topic, Topics: []string{h.topic}, RetryMin: time.Millisecond, RetryMax: 50 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(h.log, nil)),
	}
	if change != nil {
		change(&cfg)
	}
	c, err := consumer.New(pool, append([]kgo.Opt{kgo.SeedBrokers(h.brokers...)}, h.kafka...), handler, cfg)
	require.NoError(h.t, err)
	if h.tune != nil {
		h.tune(c)
	}
	return c
}

// poolWith is a pool of the test's database with other settings.
func (h *harness) poolWith(change func(*pgxpool.Config)) *pgxpool.Pool {
	h.t.Helper()
	config := h.pool.Config()
	change(config)
	return pgtest.PoolOf(h.t, config)
}

// begin runs a consumer in the background. It returns what ends Run's context, and what does so,
// waits for Run and returns its error.
func (h *harness) begin(ctx context.Context, c *consumer.Consumer) (cancel func(), stop func() error) {
	h.t.Helper()
	ctx, cancel = context.WithCancel(ctx)
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
	return cancel, stop
}

// each runs a test for each case, side by side, each with a harness that has one partition.
func each[C any](t *testing.T, cases map[string]C, test func(t *testing.T, h *harness, name string, c C)) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newHarness(t, 1), name, c)
		})
	}
}

// eachOf is each for cases that are their names.
func eachOf(t *testing.T, names []string, test func(t *testing.T, h *harness, name string)) {
	t.Helper()
	cases := map[string]bool{}
	for _, name := range names {
		cases[name] = true
	}
	each(t, cases, func(t *testing.T, h *harness, name string, _ bool) {
		t.Helper()
		test(t, h, name)
	})
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

// waitNumber waits until a query counts so many.
func (h *harness) waitNumber(want int, sql string, args ...any) {
	h.t.Helper()
	testwait.Equal(h.t, want, sql, func() int { return h.number(sql, args...) })
}

// waitHandled waits until partition 0 is handled up to an offset.
func (h *harness) waitHandled(offset int) {
	h.t.Helper()
	testwait.Equal(h.t, offset, "position", h.position)
}

// untilHandled lets a consumer run until partition 0 is handled up to an offset, and stops it.
func (h *harness) untilHandled(offset int, stop func() error) {
	h.t.Helper()
	h.waitHandled(offset)
	require.NoError(h.t, stop())
}

// untilEffects lets a consumer run until there are n effects, and stops it.
func (h *harness) untilEffects(n int, stop func() error) {
	h.t.Helper()
	h.waitEffects(n)
	require.NoError(h.t, stop())
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
	found := h.texts(`SELECT value FROM effects ORDER BY n`)
	h.effects = len(found)
	return found
}

// texts are the rows of a query of one column.
func (h *harness) texts(sql string) []string {
	h.t.Helper()
	return pgtest.Column[string](h.t, h.pool, sql)
}

// list collects texts from any goroutine.
type list struct {
	mu    sync.Mutex
	texts []string
}

func (l *list) add(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.texts = append(l.texts, text)
}

func (l *list) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.texts)
}

func (l *list) count(text string) int {
	return len(slices.DeleteFunc(l.all(), func(one string) bool { return one != text }))
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

// parked lists the parked messages, in order: value, reason and state.
func (h *harness) parked() []string {
	h.t.Helper()
	return h.texts(`SELECT convert_from(coalesce(payload, ''), 'UTF8') || ' ' || reason || ' ' || state FROM effectonce.parked_messages ORDER BY seq`)
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
