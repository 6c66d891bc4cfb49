package relay_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: the tick to which a relay's progress refers is kept, however old it is: a relay that
// comes back after a long time publishes what was inserted meanwhile, and nothing else.
func TestTickOfProgressIsKept(t *testing.T) {
	t.Parallel()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	must(t, pool, `INSERT INTO effectonce.outbox_ticks (snapshot, seq_last) VALUES ('10:10:', 0)`)
	insert(t, pool, topic, "k", "1")
	away := newRelay(t, pool, relay.Config{Name: "away"})
	require.EqualValues(t, 1, drain(t, away))
	require.EqualValues(t, 1, drain(t, newRelay(t, pool, relay.Config{})))
	must(t, pool, `UPDATE effectonce.outbox_ticks SET created_at = clock_timestamp() - interval '1 day'`)

	running(t, pool, relay.Config{Lease: 30 * time.Second})
	testwait.True(t, "older ticks are removed", func() bool {
		return one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_ticks WHERE snapshot::text = '10:10:'`) == 0
	})
	require.Equal(t, 1, one[int](t, pool, `SELECT count(*) FROM effectonce.outbox_progress_now JOIN effectonce.outbox_ticks USING (tick) WHERE relay = 'away'`))
	insert(t, pool, topic, "k", "2")
	require.EqualValues(t, 1, drain(t, away))
}

// Property: a tick is durable before progress refers to it, whatever synchronous_commit the role or
// the database has: after a crash, transaction ids that the tick has seen could be assigned again.
func TestTicksAreDurable(t *testing.T) {
	t.Parallel()
	for setting, want := range map[string]string{"off": "on", "local": "local", "remote_apply": "remote_apply"} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			owner, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
			must(t, owner, `CREATE TABLE saw (setting text);
				CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO saw VALUES (current_setting('synchronous_commit')); RETURN NULL; END$$;
				CREATE TRIGGER look AFTER INSERT ON effectonce.outbox_ticks FOR EACH ROW EXECUTE FUNCTION look()`)
			config := owner.Config()
			config.ConnConfig.RuntimeParams["synchronous_commit"] = setting
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			r := newRelay(t, pool, relay.Config{})
			for range 3 {
				insert(t, pool, topic, "k", "v")
				require.EqualValues(t, 1, drain(t, r))
			}
			require.Positive(t, one[int](t, owner, `SELECT count(*) FROM saw`))
			require.Zero(t, one[int](t, owner, `SELECT count(*) FROM saw WHERE setting <> '`+want+`'`))
		})
	}
}
