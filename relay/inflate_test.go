package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// Property: headers whose text is much longer than what is stored are refused: the relay would read
// up to a gigabyte, or fail, for a row of a few kilobytes.
func TestHeadersThatInflateAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, numbers := range []int{100, 9000} { // of 131,072 digits each
		headers := `{"a":[` + strings.TrimSuffix(strings.Repeat("1e131071,", numbers), ",") + `]}`
		for _, sql := range []string{
			`INSERT INTO effectonce.outbox (topic, headers) VALUES ('t', $1::text::jsonb)`,
			`INSERT INTO effectonce.outbox_scheduled (due_at, topic, headers) VALUES (now(), 't', $1::text::jsonb)`,
		} {
			_, err := pool.Exec(t.Context(), sql, headers)
			require.ErrorContains(t, err, map[int]string{100: "row_is_out_of_bounds", 9000: "SQLSTATE 54000"}[numbers])
		}
	}
}

// Property: headers that Publish accepts are accepted by the tables, as they are and compressed,
// now and for later, and in another cluster, whatever bytes they are of.
func TestHeadersThatPublishAcceptsFit(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), pgtest.Pool(t)
	large, err := outbox.New(outbox.Config{RecordBytesMax: 100_000_000})
	require.NoError(t, err)
	for i, value := range []string{"\x01", `"`, "\xff", "x", "ü"} {
		n := (1<<20 - 20) / len(value)
		msg := outbox.Message{ID: uuid.New(), Topic: "t", Headers: []outbox.Header{{Name: "h", Value: []byte(strings.Repeat(value, n))}}}
		later := msg
		later.DeliverAt = time.Unix(1000, 0)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return large.Publish(ctx, tx, msg, later) }), "%d", i)
	}
	found, moved, err := newRelay(t, pool, relay.Config{}).PromotePage(ctx, 100)
	require.NoError(t, err)
	require.Equal(t, []int{5, 5}, []int{found, moved})
	must(t, pool, `UPDATE effectonce.outbox SET txid = pg_current_xact_id()`)
	require.Equal(t, 10, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox`))
}

// Property: rows of before schema version 8 that are out of today's bounds do not keep a relay from
// beginning in another cluster; those that Kafka does not take become dead.
func TestOldRowsInAnotherCluster(t *testing.T) {
	t.Parallel()
	ctx, address, topic := t.Context(), pgtest.EmptyDatabase(t), kafkatest.Topic(t, 1)
	conn := pgtest.Connect(t, address)
	require.NoError(t, migrations.To(ctx, conn, migrations.Options{}, 7))
	pgtest.Exec(t, conn, fmt.Sprintf(`INSERT INTO effectonce.outbox (txid, topic, key, payload, headers, created_at) VALUES
		('99999999999', '%[1]s', 'k', 'infinite', '{}', 'infinity'), ('99999999999', '%[1]s', convert_to(repeat('x', 2000000), 'UTF8'), 'large key', '{}', now()),
		('99999999999', '%[1]s', 'm', 'large header', jsonb_build_object('h', repeat('x', 9000000)), now()), ('99999999999', '%[1]s', 'l', 'good', '{}', now())`, topic))
	require.NoError(t, migrations.Up(ctx, conn, migrations.Options{}))
	pool, err := pgxpool.New(ctx, address)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	drain(t, newRelay(t, pool, relay.Config{}))
	require.Equal(t, []string{"infinite", "good"}, values(t, topic))
	require.Equal(t, 2, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_dead WHERE reason = 'too_large'`))
	_, err = pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key) VALUES ('t', convert_to(repeat('x', 2000000), 'UTF8'))`)
	require.ErrorContains(t, err, "outbox_row_is_out_of_bounds")
}
