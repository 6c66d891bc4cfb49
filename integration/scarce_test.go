package integration_test

import (
	"context"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/relay"
)

// diskSQL makes the tables that the relay writes refuse as a server does whose data volume is full:
// reads continue. The function decides, so that the disk is filled and freed without a lock of the
// tables: statements that lock several of them would deadlock with the relay's own.
const diskSQL = `CREATE FUNCTION disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER disk BEFORE INSERT OR UPDATE ON effectonce.outbox_progress FOR EACH STATEMENT EXECUTE FUNCTION disk();
CREATE TRIGGER disk BEFORE INSERT OR UPDATE ON effectonce.outbox_replicas FOR EACH STATEMENT EXECUTE FUNCTION disk();
CREATE TRIGGER disk BEFORE INSERT ON effectonce.outbox_relays FOR EACH STATEMENT EXECUTE FUNCTION disk();
CREATE TRIGGER disk BEFORE INSERT ON effectonce.outbox_ticks FOR EACH STATEMENT EXECUTE FUNCTION disk();
CREATE TRIGGER disk BEFORE INSERT OR UPDATE ON effectonce.outbox_dead FOR EACH STATEMENT EXECUTE FUNCTION disk()`

const (
	diskIsFull = `CREATE OR REPLACE FUNCTION disk() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$`
	diskIsFree = `CREATE OR REPLACE FUNCTION disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$`
)

// Property: a database that takes no more writes, because its disk is full, is waited out, by a
// relay that starts then as by one that runs: nothing is lost, nothing moves to outbox_dead for it,
// and with exactly-once nothing comes twice. Row O32 of guarantees.md. (A full volume of the WAL
// ends the server: that is a crash.)
func TestFullDiskIsWaitedOut(t *testing.T) {
	longtest.Only(t, "it waits for a line of the log to be repeated")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		ctx, pool, topic := t.Context(), openWorkload(t, pgtest.Database(t)), kafkatest.Topic(t, 1)
		log := &lockedBuffer{}
		cfg := relay.Config{ExactlyOnce: exactly, Lease: time.Second, Logger: slog.New(slog.NewTextHandler(log, nil))}
		refused := func(times int) {
			eventually(t, "the relay is refused", func() (bool, any) {
				return strings.Count(log.String(), "SQLSTATE 53100") >= times, log
			})
		}
		execute := func(sql string) {
			_, err := pool.Exec(ctx, sql)
			require.NoError(t, err)
		}
		w := writers{goroutines: 2, transactions: 20, keys: 3, topic: topic, seed: 11}
		w.run(ctx, t, pool)
		execute(diskSQL)
		execute(diskIsFull)
		running(t, pool, kafkatest.Brokers(t), cfg)
		refused(2)
		execute(diskIsFree)
		requirePublished(t, pool, topic)
		execute(diskIsFull)
		seen := strings.Count(log.String(), "SQLSTATE 53100")
		w.seed = 12
		w.run(ctx, t, pool)
		refused(seen + 1) // repeated warnings are written every 30 s
		execute(diskIsFree)
		s := requirePublished(t, pool, topic)
		require.Zero(t, count(ctx, t, pool, `SELECT count(*) FROM effectonce.outbox_dead`))
		if exactly {
			require.Zero(t, s.duplicates)
		}
	})
}

// upkeep forgets claims, for a consumer that has been registered and has not consumed yet, so that
// the oldest days of a new schema may go, whatever the time of day is.
func (c child) upkeep(ctx context.Context, pool *pgxpool.Pool) error {
	claims, err := dedup.New(dedup.Config{})
	if err != nil {
		return err
	}
	if _, err := claims.Register(ctx, pool, dedup.Registration{Name: "other", Group: "other", Topics: []string{"other"}, Window: 24 * time.Hour}); err != nil {
		return err
	}
	_, err = claims.Maintain(ctx, pool, dedup.MaintainOptions{Owner: "upkeep"})
	return err
}

// Property: a process that freezes while it forgets old claims, with the table of claims locked,
// holds consumers up for a moment only, and when it wakes up it changes nothing. Rows C9, C30 of
// guarantees.md.
func TestFrozenUpkeepDoesNotHoldUpClaims(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, pool := consuming(t, child{}, 1)
	zombie := start(t, child{Role: "upkeep", URL: c.URL, FreezeSQL: "DETACH PARTITION"})
	eventually(t, "the upkeep freezes", func() (bool, any) {
		select {
		case <-zombie.done:
			require.Fail(t, "the upkeep had nothing to forget")
		default:
		}
		return frozen(zombie), zombie.log
	})
	heir := start(t, c)
	producedAt(t, c.Brokers, pool, c.Topic, "k", 4, 50, 0)
	eventually(t, "every message has its effect", effectsOfAll(ctx, t, pool))
	zombie.signal(syscall.SIGCONT)
	<-zombie.done
	require.Error(t, zombie.err, "its connection is gone")
	require.NoError(t, heir.terminate())
	handled(ctx, t, pool)
}
