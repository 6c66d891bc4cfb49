package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

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
	found, moved, err := newRelay(t, pool, relay.Config{}).PromotePage(ctx, 100)
	require.NoError(t, err)
	require.Equal(t, []int{3, 3}, []int{found, moved})
	must(t, pool, `UPDATE effectonce.outbox SET txid = pg_current_xact_id()`)
	require.Equal(t, 6, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`))
}
