package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// O1: a message is published if and when the caller's transaction commits: it is not visible
// before, and a rollback, also to a savepoint, removes it.
func TestMessagesFollowTheirTransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	message := func(payload string) outbox.Message {
		return outbox.Message{Topic: "orders", Payload: []byte(payload)}
	}

	tx := begin(t, pool)
	require.NoError(t, outbox.Publish(t.Context(), tx, message("rolled back")))
	assert.Len(t, rows(t, tx), 1)
	require.NoError(t, tx.Rollback(t.Context()))
	assert.Empty(t, rows(t, pool))

	tx = begin(t, pool)
	require.NoError(t, outbox.Publish(t.Context(), tx, message("first")))
	refused := errors.New("refused")
	err := pgx.BeginFunc(t.Context(), tx, func(savepoint pgx.Tx) error {
		return errors.Join(outbox.Publish(t.Context(), savepoint, message("inside")), refused)
	})
	require.ErrorIs(t, err, refused)
	require.NoError(t, outbox.Publish(t.Context(), tx, message("second")))
	assert.Empty(t, rows(t, pool), "not before the commit")
	require.NoError(t, tx.Commit(t.Context()))

	stored := rows(t, pool)
	require.Len(t, stored, 2)
	assert.Equal(t, "first", string(stored[0].Payload))
	assert.Equal(t, "second", string(stored[1].Payload))
}

// The order of messages in a call is the order of seq, however many they are and whatever their
// IDs.
func TestOrderOfACallIsTheOrderOfSeq(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 3, 100, 2000} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			msgs := make([]outbox.Message, n)
			for i := range msgs {
				msgs[i] = outbox.Message{Topic: "orders", Key: []byte{byte(i % 7)}, Payload: []byte(strconv.Itoa(i))}
				if i%2 == 0 {
					msgs[i].ID = uuid.New() // random, so that an order by ID would show
				}
			}
			publishAlone(t, pool, msgs...)
			stored := rows(t, pool)
			require.Len(t, stored, n)
			ids := map[uuid.UUID]bool{}
			for i, r := range stored {
				require.Equal(t, strconv.Itoa(i), string(r.Payload))
				require.False(t, ids[r.ID], "an ID was given twice")
				ids[r.ID] = true
				if i%2 == 0 {
					require.Equal(t, msgs[i].ID, r.ID)
				} else {
					require.Equal(t, uuid.Version(7), r.ID.Version())
				}
			}
		})
	}
}

// A call is one statement and, once it is prepared, one round trip, however many messages it has.
func TestACallIsOneRoundTrip(t *testing.T) {
	t.Parallel()
	config, err := pgx.ParseConfig(pgtest.Database(t))
	require.NoError(t, err)
	var writes atomic.Int64
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return countedConn{conn, &writes}, err
	}
	tx, statements := traced(t, config)
	message := outbox.Message{Topic: "orders", Payload: []byte("x")}
	require.NoError(t, outbox.Publish(t.Context(), tx, message))          // prepares the statement for one message …
	require.NoError(t, outbox.Publish(t.Context(), tx, message, message)) // … and that for many

	for _, n := range []int{0, 1, 10, 500} {
		*statements = nil
		writes.Store(0)
		require.NoError(t, outbox.Publish(t.Context(), tx, slices.Repeat([]outbox.Message{message}, n)...))
		if n == 0 {
			assert.Empty(t, *statements)
			assert.Zero(t, writes.Load())
			continue
		}
		require.Len(t, *statements, 1)
		assert.Contains(t, (*statements)[0], "-- outbox.publish\n")
		assert.Equal(t, int64(1), writes.Load(), "%d messages", n)
	}
	require.NoError(t, tx.Rollback(t.Context()))
}

type countedConn struct {
	net.Conn

	writes *atomic.Int64
}

func (c countedConn) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// A queued publish shares the round trip of other statements and refuses the same messages.
func TestQueueSharesARoundTrip(t *testing.T) {
	t.Parallel()
	pool, o := pgtest.Pool(t), newOutbox(t, outbox.Config{})
	batch := &pgx.Batch{}
	require.ErrorIs(t, o.Queue(t.Context(), batch, outbox.Message{Topic: "no topic"}), outbox.ErrInvalid)
	require.NoError(t, o.Queue(t.Context(), batch))
	require.Zero(t, batch.Len())

	batch.Queue("CREATE TABLE before_it (n int)")
	require.NoError(t, o.Queue(t.Context(), batch, outbox.Message{Topic: "a"}, outbox.Message{Topic: "b"}))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return tx.SendBatch(t.Context(), batch).Close()
	}))
	stored := rows(t, pool)
	require.Len(t, stored, 2)
	assert.Equal(t, "a", stored[0].Topic)
	assert.Equal(t, "b", stored[1].Topic)
}

// The trace context of the caller is added to every message of the call, unless the message has its
// own, and the caller's headers do not change.
func TestInjectedHeadersDoNotOverride(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	calls := 0
	o := newOutbox(t, outbox.Config{Inject: func(_ context.Context, headers map[string]string) {
		calls++
		headers[outbox.HeaderTraceParent] = "injected"
	}})
	roomy := make([]outbox.Header, 1, 8)
	roomy[0] = outbox.Header{Name: "a", Value: []byte("1")}
	msgs := []outbox.Message{
		{Topic: "orders"},
		{Topic: "orders", Headers: roomy},
		{Topic: "orders", Headers: []outbox.Header{{Name: outbox.HeaderTraceParent, Value: []byte("own")}}},
	}
	publishOf(t, o, pool, msgs...)
	stored := rows(t, pool)
	require.Len(t, stored, 3)
	assert.JSONEq(t, `{"traceparent": "injected"}`, stored[0].Headers)
	assert.JSONEq(t, `{"traceparent": "injected", "a": "1"}`, stored[1].Headers)
	assert.JSONEq(t, `{"traceparent": "own"}`, stored[2].Headers)
	assert.Equal(t, 1, calls, "once for a call, not for a message")
	assert.Nil(t, msgs[0].Headers)
	assert.Zero(t, roomy[:2][1], "written behind the caller's headers")

	publishOf(t, o, pool)
	assert.Equal(t, 1, calls, "nothing to inject into")
}

// S1: an invalid schema name never reaches a statement; all problems of a configuration are
// reported at once.
func TestBadConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{`"we""ird; DROP TABLE x`, "a.b", "A", "ü", "a b", "1a", "pg_catalog", "a\x00", "a\n", "a'"} {
		o, err := outbox.New(outbox.Config{Schema: name})
		require.ErrorContains(t, err, "schema ", name)
		assert.Nil(t, o, name)
	}
	for _, size := range []int{-1, 1, 1023, 100_000_001} {
		_, err := outbox.New(outbox.Config{RecordBytesMax: size})
		require.ErrorContains(t, err, fmt.Sprintf("RecordBytesMax %d: want 1024 to 100000000", size))
	}
	for _, size := range []int{0, 1024, 100_000_000} {
		newOutbox(t, outbox.Config{RecordBytesMax: size})
	}
	_, err := outbox.New(outbox.Config{Schema: "A", RecordBytesMax: 1})
	require.ErrorContains(t, err, "schema ")
	require.ErrorContains(t, err, "RecordBytesMax")
}

// Property: the SQL of the documents publishes: plain INSERTs, and the trigger for each row that is written.
// Its constraint refuses a row that is too large.
func TestDocumentedSQLPublishes(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, `CREATE TABLE orders (id text PRIMARY KEY, amount int)`)
	block := regexp.MustCompile("(?ms)^```sql\n(.*?)^```$")
	for path, blocks := range map[string]int{"../README.md": 1, "../docs/how-to/publish.md": 3} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		found := block.FindAllStringSubmatch(string(text), -1)
		require.Len(t, found, blocks, path)
		for _, sql := range found {
			_, err := pool.Exec(t.Context(), sql[1])
			require.NoError(t, err, sql[1])
		}
	}
	_, err := pool.Exec(t.Context(), `INSERT INTO orders VALUES ('order-3', 7); UPDATE orders SET amount = 8`)
	require.NoError(t, err)
	var keys, payloads []string
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT array_agg(convert_from(key, 'UTF8') ORDER BY seq), array_agg(convert_from(payload, 'UTF8')::jsonb ->> 'amount' ORDER BY seq)
		FROM effectonce.outbox WHERE convert_from(key, 'UTF8') = 'order-3'`).Scan(&keys, &payloads))
	require.Equal(t, []string{"order-3", "order-3"}, keys)
	require.Equal(t, []string{"7", "8"}, payloads)
	require.Equal(t, 2, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.outbox WHERE convert_from(key, 'UTF8') IN ('order-1', 'order-2')`))
	_, err = pool.Exec(t.Context(), `INSERT INTO effectonce.outbox (topic, payload) SELECT 't', convert_to(repeat('x', 1000000), 'UTF8')`)
	require.ErrorContains(t, err, "outbox_record_is_too_large")
}

// A buffer sends nothing until it is flushed, then everything in the order in which it was added,
// in one statement, and a second flush sends nothing.
func TestBufferKeepsOrderAndFlushesOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	tx, statements := traced(t, pool.Config().ConnConfig)
	buffer := outbox.NewBuffer()
	require.NoError(t, buffer.Flush(t.Context(), tx), "an empty buffer")
	for i := range 50 {
		require.NoError(t, buffer.Add(t.Context(),
			outbox.Message{Topic: "orders", Payload: fmt.Append(nil, 2*i)},
			outbox.Message{Topic: "orders", Payload: fmt.Append(nil, 2*i+1)}))
	}
	require.NoError(t, buffer.Add(t.Context()))
	assert.Equal(t, 100, buffer.Len())
	assert.Empty(t, *statements)
	require.NoError(t, buffer.Flush(t.Context(), tx))
	assert.Zero(t, buffer.Len())
	require.NoError(t, buffer.Flush(t.Context(), tx))
	assert.Len(t, *statements, 1)
	require.NoError(t, tx.Commit(t.Context()))

	stored := rows(t, pool)
	require.Len(t, stored, 100)
	for i, r := range stored {
		assert.Equal(t, fmt.Sprint(i), string(r.Payload))
	}
}

// A call of Add with one invalid message keeps none of its messages, and all that were kept before. A
// flush that fails leaves the buffer unchanged, for the next attempt in a new transaction.
func TestBufferSurvivesAFailedFlush(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	buffer := outbox.NewBuffer()
	require.NoError(t, buffer.Add(t.Context(), outbox.Message{Topic: "orders"}, outbox.Message{Topic: "refunds"}))
	require.ErrorIs(t, buffer.Add(t.Context(), outbox.Message{Topic: "orders"}, outbox.Message{Topic: "?"}), outbox.ErrInvalid)
	assert.Equal(t, 2, buffer.Len())

	tx := begin(t, pool)
	_, err := tx.Exec(t.Context(), "SELECT 1/0")
	require.Error(t, err)
	require.ErrorContains(t, buffer.Flush(t.Context(), tx), "insert 2 outbox rows: ")
	assert.Equal(t, 2, buffer.Len())
	require.NoError(t, tx.Rollback(t.Context()))

	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return buffer.Flush(t.Context(), tx)
	}))
	assert.Len(t, rows(t, pool), 2)
}
