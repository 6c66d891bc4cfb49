package relay_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/outbox"
	"github.com/effectonce/effectonce/relay"
)

// absurdTimes are those that PostgreSQL takes, but that time.Time or RFC 3339 do not have.
const absurdTimes = `unnest('{-infinity, 4713-01-01 00:00:00+00 BC, 0001-01-01 00:00:00+00 BC, 10000-01-01+00, 294276-12-31+00, infinity}'::timestamptz[])`

// Property: rows that publishers of earlier releases inserted with any time are published, with a
// time in the header that can be read; also from the table of messages for later and from the dead
// ones. Nothing of theirs holds up others.
func TestRowsOfAnyTimeArePublished(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, address, topic := t.Context(), pgtest.EmptyDatabase(t), kafkatest.Topic(t, 1)
		conn := pgtest.Connect(t, address)
		require.NoError(t, migrations.To(ctx, conn, migrations.Options{}, 7))
		pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox (topic, key, payload, created_at) SELECT $1, at::text::bytea, 'row', at FROM `+absurdTimes+` AS at`, topic)
		pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox_scheduled (topic, key, payload, due_at, created_at)
			SELECT $1, at::text::bytea, 'later', '-infinity', at FROM `+absurdTimes+` AS at`, topic)
		pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
			SELECT 'default', nextval('effectonce.outbox_seq_seq'), gen_random_uuid(), $1, ('dead ' || n)::bytea, 'dead', '{}', at, 'refused', 'x', 'retry'
			FROM `+absurdTimes+` WITH ORDINALITY AS a (at, n)`, topic)
		require.NoError(t, migrations.Up(ctx, conn, migrations.Options{}))
		pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox (topic, payload) VALUES ($1, 'now')`, topic)
		pool, err := pgxpool.New(ctx, address)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		running(t, pool, relay.Config{ExactlyOnce: exactly})
		require.Eventually(t, func() bool { return len(values(t, topic)) == 6+6+6+1 && dead(t, pool) == 0 }, 2*time.Minute, 10*time.Millisecond)
		for _, record := range kafkatest.ReadAll(t, topic) {
			_, err := time.Parse(time.RFC3339Nano, header(record, outbox.HeaderOccurredAt)[0])
			require.NoError(t, err)
		}
	})
}
