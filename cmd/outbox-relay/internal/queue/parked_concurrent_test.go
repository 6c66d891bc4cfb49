package queue_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/queue"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// consumeSQL is a consumer's transaction over one key: what is handed back, and all that is behind
// it, is handled and deleted in order, the rows being locked first.
const consumeSQL = `
WITH head AS (SELECT * FROM effectonce.parked_messages WHERE state = 'retry' ORDER BY random() LIMIT 1),
locked AS MATERIALIZED (SELECT p.seq, p.key FROM effectonce.parked_messages p
	WHERE p.seq IN (SELECT seq FROM head UNION
		SELECT n.seq FROM effectonce.parked_messages n JOIN head h ON n.key = h.key AND n.seq > h.seq
		WHERE NOT EXISTS (SELECT FROM effectonce.parked_messages m WHERE m.key = h.key AND m.seq > h.seq AND m.seq <= n.seq AND m.reason <> 'behind'))
	ORDER BY p.seq LIMIT 3 FOR UPDATE),
gone AS (DELETE FROM effectonce.parked_messages p USING locked l WHERE p.seq = l.seq RETURNING p.seq, p.key)
INSERT INTO effects (seq, key) SELECT seq, key FROM gone ORDER BY seq`

const mendParkedSQL = `
UPDATE effectonce.parked_messages p SET state = CASE WHEN p.reason = 'behind' THEN 'retry' ELSE 'parked' END
FROM (SELECT DISTINCT ON (key) seq FROM effectonce.parked_messages WHERE key IS NOT NULL ORDER BY key, seq) first
WHERE p.seq = first.seq AND p.state = 'behind'`

const (
	parkedKeys  = 40
	queueLength = 6
)

// fill parks queues of messages, some of which have a reason of their own.
func fill(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	exec(t, conn, "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing/orders', 'billing', '{orders}')")
	exec(t, conn, "CREATE TABLE effects (seq bigint PRIMARY KEY, key bytea NOT NULL, n bigserial)")
	exec(t, conn, `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
		SELECT id, gen_random_uuid(), 'orders', 0, n, convert_to('key ' || n % $1::int, 'UTF8'),
			CASE WHEN n < $1::int OR n % 17 = 0 THEN 'failed' ELSE 'behind' END, 'e', CASE WHEN n < $1::int THEN 'parked' ELSE 'behind' END
		FROM effectonce.consumers, generate_series(0, $1::int * $2::int - 1) n`, parkedKeys, queueLength)
}

// Operators retry and discard at once, with a consumer in between. No message is lost or handled
// twice, and at no moment is a key without a first message on which someone will act.
func TestNoParkedMessageIsLostDoubledOrStranded(t *testing.T) {
	longtest.Only(t, "a hammer")
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	fill(t, conn)
	// The workers stop between two transactions: one that is cut off cannot count what its COMMIT
	// did.
	ctx := t.Context()
	var stopped atomic.Bool
	defer stopped.Store(true)
	var discarded, handled atomic.Int64
	var group errgroup.Group
	for worker := range 6 {
		own := connect(t, address)
		random := rand.New(rand.NewPCG(1, uint64(worker)))
		group.Go(func() error {
			for !stopped.Load() {
				var err error
				if worker == 0 {
					err = consume(ctx, own, &handled)
				} else {
					err = operateParked(ctx, own, random, &discarded)
				}
				if err != nil {
					return fmt.Errorf("worker %d: %w", worker, err)
				}
			}
			return nil
		})
	}
	for empty := false; !empty; {
		var stranded, early int
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) = 0,
				count(*) FILTER (WHERE state = 'behind' AND seq = first), count(*) FILTER (WHERE state <> 'behind' AND seq > first)
			FROM (SELECT *, min(seq) OVER (PARTITION BY key) AS first FROM effectonce.parked_messages) p`).Scan(&empty, &stranded, &early))
		if !assert.Zero(t, stranded, "keys without a first message") || !assert.Zero(t, early, "messages before the first of their key") {
			break
		}
	}
	stopped.Store(true)
	require.NoError(t, group.Wait())
	var effects, logged, both, twice, outOfOrder int64
	require.NoError(t, conn.QueryRow(t.Context(), `WITH gone AS (SELECT (subject->>'seq')::bigint AS seq FROM effectonce.operator_actions WHERE what = 'parked.discard')
		SELECT (SELECT count(*) FROM effects), (SELECT count(DISTINCT seq) FROM gone), (SELECT count(*) FROM effects JOIN gone USING (seq)),
			(SELECT count(*) FROM gone) - (SELECT count(DISTINCT seq) FROM gone),
			(SELECT count(*) FROM effects a JOIN effects b ON a.key = b.key AND a.seq < b.seq AND a.n > b.n)`).Scan(&effects, &logged, &both, &twice, &outOfOrder))
	assert.Equal(t, int64(parkedKeys*queueLength), effects+logged, "messages that are either handled or discarded")
	assert.Zero(t, both, "handled and discarded")
	assert.Zero(t, twice, "INVARIANT: discarded twice")
	assert.Zero(t, outOfOrder, "handled before an earlier message of its key")
	assert.Equal(t, effects, handled.Load())
	assert.Equal(t, logged, discarded.Load())
	assert.Positive(t, effects)
	assert.Positive(t, logged)
}

func consume(ctx context.Context, conn *pgx.Conn, handled *atomic.Int64) error {
	var n int64
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, consumeSQL)
		if n = tag.RowsAffected(); err != nil || n == 0 {
			return err
		}
		_, err = tx.Exec(ctx, mendParkedSQL)
		return err
	})
	if err == nil {
		handled.Add(n)
	}
	return ignoreDeadlock(err)
}

func operateParked(ctx context.Context, conn *pgx.Conn, random *rand.Rand, discarded *atomic.Int64) error {
	seqs, err := parked.Targets(ctx, conn, queue.ParkedFilter{}, 1+random.IntN(5))
	if err != nil {
		return err
	}
	random.Shuffle(len(seqs), func(i, j int) { seqs[i], seqs[j] = seqs[j], seqs[i] })
	if random.IntN(3) > 0 {
		_, err = parked.Retry(ctx, conn, ana, seqs)
		return err
	}
	result, err := parked.Discard(ctx, conn, ana, seqs[:min(len(seqs), 1)], random.IntN(20) == 0)
	if err == nil {
		discarded.Add(int64(len(result.Done)))
	}
	return err
}
