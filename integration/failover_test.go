package integration_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// standby is a streaming copy of a primary. It listens at a socket of its own.
type standby struct {
	dir  string
	pool *pgxpool.Pool
}

// newStandby copies a primary, which it crashes and restarts for that, and streams from it.
func newStandby(t *testing.T, primary *servers.Postgres) *standby {
	t.Helper()
	ctx := t.Context()
	var data, programs string
	conn, err := pgx.Connect(ctx, primary.URL)
	require.NoError(t, err)
	require.NoError(t, conn.QueryRow(ctx, `SELECT current_setting('data_directory'), setting FROM pg_config WHERE name = 'BINDIR'`).Scan(&data, &programs))
	config := conn.Config()
	require.NoError(t, conn.Close(ctx))

	s := &standby{}
	s.dir, err = os.MkdirTemp("", "effectonce-standby-") //nolint:usetesting // PostgreSQL's user has to get there
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(s.dir) })
	require.NoError(t, primary.Kill(ctx))
	copied := filepath.Join(s.dir, "data")
	output, err := exec.CommandContext(ctx, "cp", "-a", data, copied).CombinedOutput() // with its owner
	require.NoError(t, err, string(output))
	require.NoError(t, primary.Restart(ctx))
	_ = os.Remove(filepath.Join(copied, "postmaster.pid"))
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(s.dir, nobody, nobody))
	}

	upstream := fmt.Sprintf("primary_conninfo = 'host=127.0.0.1 port=%d user=%s password=%s'\n", config.Port, config.User, config.Password)
	for name, text := range map[string]string{"standby.signal": "", "postgresql.auto.conf": upstream} { // where ALTER SYSTEM changes it
		file := filepath.Join(copied, name)
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		if os.Geteuid() == 0 { // which PostgreSQL refuses
			require.NoError(t, os.Chown(file, nobody, nobody))
		}
	}
	log := &lockedBuffer{}
	leash, ended := leashedPostgres(t, log, filepath.Join(programs, "postgres"), "-D", copied, "-c", "listen_addresses=", "-c", "unix_socket_directories="+s.dir)
	t.Cleanup(func() {
		_ = leash.Close()
		<-ended
		if t.Failed() {
			t.Logf("the standby said:\n%s", log)
		}
	})
	s.pool = open(t, fmt.Sprintf("postgres://%s:%s@/postgres?host=%s&port=5432&sslmode=disable", config.User, config.Password, s.dir))
	eventually(t, "the standby streams", func() (bool, any) {
		var n int
		err := s.pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_wal_receiver WHERE status = 'streaming'`).Scan(&n)
		return n == 1, fmt.Sprint(err, log)
	})
	return s
}

// leashedPostgres runs PostgreSQL until its input, and so the test's process, ends.
func leashedPostgres(t *testing.T, log io.Writer, args ...string) (leash io.Closer, ended chan struct{}) {
	t.Helper()
	cmd := exec.Command("/bin/sh", append([]string{"-c", `"$0" "$@" & read -r _; kill -QUIT $!; wait`}, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	leash, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	ended = make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	return leash, ended
}

// either is a URL of whichever of the two is the primary.
func (s *standby) either(primary *servers.Postgres) string {
	config := s.pool.Config().ConnConfig
	first, _ := pgx.ParseConfig(primary.URL)
	return fmt.Sprintf("postgres://%s:%s@/postgres?host=%s,%s&port=%d,5432&sslmode=disable&target_session_attrs=read-write&connect_timeout=10",
		config.User, config.Password, first.Host, s.dir, first.Port)
}

// cut ends the replication.
func (s *standby) cut(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for _, sql := range []string{`ALTER SYSTEM SET primary_conninfo = ''`, `SELECT pg_reload_conf()`} {
		_, err := s.pool.Exec(ctx, sql)
		require.NoError(t, err)
	}
	eventually(t, "the replication ends", func() (bool, any) {
		n := count(ctx, t, s.pool, `SELECT count(*) FROM pg_stat_wal_receiver`)
		return n == 0, n
	})
}

// Property: a dump on a standby survives the TRUNCATE of a slot while replay is paused there, as the runbook
// says, and the standby follows again afterwards; feedback and a delay do not save it. Row O48 of guarantees.md.
func TestDumpOnAStandby(t *testing.T) {
	longtest.Only(t, "a standby of its own")
	t.Parallel()
	ctx := t.Context()
	primary, second := newPair(t)
	pool := openWorkload(t, primary.URL)
	execs := func(pool *pgxpool.Pool, statements ...string) {
		for _, sql := range statements {
			_, err := pool.Exec(ctx, sql)
			require.NoError(t, err, sql)
		}
	}
	execs(second.pool, `ALTER SYSTEM SET max_standby_streaming_delay = '1s'`, `ALTER SYSTEM SET hot_standby_feedback = on`, `SELECT pg_reload_conf()`)
	for _, paused := range []bool{true, false} {
		execs(pool, `INSERT INTO effectonce.outbox (topic) VALUES ('orders')`)
		eventually(t, "it is replicated", func() (bool, any) {
			n := count(ctx, t, second.pool, `SELECT count(*) FROM effectonce.outbox`)
			return n == 1, n
		})
		if paused {
			execs(second.pool, `SELECT pg_wal_replay_pause()`)
		}
		dump, err := second.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
		require.NoError(t, err)
		defer func() { _ = dump.Rollback(context.WithoutCancel(ctx)) }()
		_, err = dump.Exec(ctx, `SELECT FROM effectonce.outbox`)
		require.NoError(t, err)
		execs(pool, `TRUNCATE effectonce.outbox`)
		var end string
		require.NoError(t, pool.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&end))
		if paused {
			eventually(t, "the standby has the TRUNCATE", func() (bool, any) {
				n := count(ctx, t, second.pool, `SELECT count(*) WHERE pg_last_wal_receive_lsn() >= '`+end+`'`)
				return n == 1, n
			})
			execs(second.pool, `SELECT pg_sleep(3)`) // longer than the delay
			_, err = dump.Exec(ctx, `SELECT FROM effectonce.outbox`)
			require.NoError(t, err)
			require.NoError(t, dump.Commit(ctx))
			execs(second.pool, `SELECT pg_wal_replay_resume()`)
		} else {
			eventually(t, "the dump is cancelled", func() (bool, any) { _, err := dump.Exec(ctx, `SELECT FROM effectonce.outbox`); return err != nil, err })
		}
		eventually(t, "the standby follows", func() (bool, any) {
			n := count(ctx, t, second.pool, `SELECT count(*) WHERE pg_last_wal_replay_lsn() >= '`+end+`'`)
			return n == 1, n
		})
	}
}

// newPair starts a primary of the test's own, migrated, and its standby. Embedded: the standby runs from
// the primary's programs and a copy of its files.
func newPair(t *testing.T) (*servers.Postgres, *standby) {
	t.Helper()
	primary, err := servers.StartPostgres(t.Context(), servers.PostgresOptions{Own: true, Embedded: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = primary.Stop(context.WithoutCancel(t.Context())) })
	pgtest.Migrate(t, primary.URL)
	return primary, newStandby(t, primary)
}

// Property: a standby that is promoted after the primary died with commits that were not replicated
// has every effect once, and in order, although Kafka's offsets are ahead of it: a consumer that
// runs on, and one that is started later, make up for what was lost. Row C32 of guarantees.md.
func TestFailoverThatLosesCommitsIsMadeUpFor(t *testing.T) {
	longtest.Only(t, "promotions of clusters of its own")
	t.Parallel()
	for name, order := range map[string]consumer.Order{
		"started later": consumer.OrderByPartition, "runs on, under load": consumer.OrderByPartition, "runs on, idle": consumer.OrderByPartition,
		"runs on, under load, by key": consumer.OrderByKey, "runs on, idle, unordered": consumer.OrderUnordered,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			restart, idle := name == "started later", strings.HasPrefix(name, "runs on, idle")
			ctx := t.Context()
			primary, second := newPair(t)
			pool := openWorkload(t, primary.URL)

			topic := kafkatest.Topic(t, 2)
			c := child{
				Role: "consumer", URL: second.either(primary), Brokers: kafkatest.Brokers(t), Topic: topic, Group: topic,
				BatchMax: 20, Order: order, SessionTimeout: sessionTimeout, IdleTimeout: 2 * time.Second,
			}
			m := start(t, c)
			producedAt(t, kafkatest.Brokers(t), pool, topic, "k", 6, 50, 0)
			c.handledBy(ctx, t, pool)
			eventually(t, "it is replicated", func() (bool, any) {
				var n int
				err := second.pool.QueryRow(ctx, `SELECT count(*) FROM effects`).Scan(&n)
				return n == 300, fmt.Sprint(n, err)
			})
			second.cut(t)
			producedAt(t, c.Brokers, pool, topic, "lost", 6, 50, 10)
			c.handledBy(ctx, t, pool)
			if restart {
				require.NoError(t, m.terminate())
			}
			admin := kadm.NewClient(kafkatest.Client(t))
			eventually(t, "Kafka's offsets are at the end", func() (bool, any) {
				lags, err := admin.Lag(ctx, topic)
				lag := lags[topic].Lag.Total()
				return err == nil && lag == 0, fmt.Sprint(lag, err)
			})
			require.NoError(t, primary.Kill(ctx))
			_, err := second.pool.Exec(ctx, `SELECT pg_promote()`)
			require.NoError(t, err)
			require.Equal(t, 300, count(ctx, t, second.pool, `SELECT count(*) FROM effects`), "the test's own premise: half is lost")
			_, err = second.pool.Exec(ctx, `INSERT INTO versions SELECT 'lost' || n, 50 FROM generate_series(0, 5) n`)
			require.NoError(t, err)
			if restart {
				m = start(t, c)
			}
			if !idle {
				producedAt(t, c.Brokers, second.pool, topic, "after", 6, 50, 0)
			}
			c.handledBy(ctx, t, second.pool)
			require.NoError(t, m.terminate())
		})
	}
}

// Property: a standby is promoted after the primary died with commits that were not replicated, and
// assigns their transaction ids and row numbers again. Nothing that is committed on it is skipped.
// The order of first occurrences is kept, although some of the lost rows had been published (which
// cannot be undone) and with exactly-once Kafka's progress is ahead of the database. A relay that
// is connected to the old primary afterwards refuses, once it can know. Rows O22, O23, O24, O26 of
// guarantees.md.
func TestPromotionThatLosesCommitsSkipsNothing(t *testing.T) {
	longtest.Only(t, "promotions of clusters of its own")
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		for _, shards := range []int16{1, 3} {
			t.Run(fmt.Sprintf("%d shards", shards), func(t *testing.T) {
				t.Parallel()
				either(t, "restarted", "runs on", func(t *testing.T, running bool) {
					t.Helper()
					promote(t, child{ExactlyOnce: exactly, Shards: shards}, running)
				})
			})
		}
	})
}

func promote(t *testing.T, c child, running bool) {
	t.Helper()
	ctx := t.Context()
	primary, second := newPair(t)
	pool := openWorkload(t, primary.URL)
	topic := kafkatest.Topic(t, 2)
	c.Role, c.URL, c.Brokers, c.Lease = "relay", second.either(primary), kafkatest.Brokers(t), time.Second
	r := start(t, c)
	w := writers{goroutines: 4, transactions: 200, keys: 6, topic: topic, seed: 3}
	w.run(ctx, t, pool)
	before := requirePublished(t, pool, topic)
	floor := `SELECT min(floor) FROM effectonce.outbox_progress_now`
	eventually(t, "it is replicated", func() (bool, any) {
		var n int
		err := second.pool.QueryRow(ctx, floor).Scan(&n)
		return err == nil && n > 0 && n == count(ctx, t, pool, floor), fmt.Sprint(n, err)
	})
	second.cut(t)
	// Lost: more transactions than come after, each with rows of its own, all of them published.
	for i := range 150 {
		_, err := pool.Exec(ctx, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, $2, $3)`,
			topic, fmt.Appendf(nil, "lost%d", i%3), fmt.Appendf(nil, `{"key":"lost%d","version":%d}`, i%3, i/3+1))
		require.NoError(t, err)
	}
	eventually(t, "what will be lost is published", func() (bool, any) {
		n := kafkatest.Count(t, topic)
		return n >= before.records+150, n
	})
	if !running {
		require.NoError(t, r.terminate())
	}
	lost := count(ctx, t, pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`)
	require.NoError(t, primary.Kill(ctx))
	_, err := second.pool.Exec(ctx, `SELECT pg_promote()`)
	require.NoError(t, err)
	require.Less(t, count(ctx, t, second.pool, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint`), lost, "the test's own premise: transaction ids come again")
	if !running {
		r = start(t, c)
	}
	w.transactions, w.seed = 120, 4
	w.run(ctx, t, second.pool)
	requireKept(t, second.pool, topic)
	require.NoError(t, r.terminate())

	// The old primary comes back, and learns of the promotion as a restore of it would.
	require.NoError(t, primary.Restart(ctx))
	pool.Reset()
	_, err = pool.Exec(ctx, `UPDATE effectonce.outbox_progress SET timeline = timeline + 1, lease_until = NULL`)
	require.NoError(t, err)
	old, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(c.Brokers...)}, relay.Config{ExactlyOnce: c.ExactlyOnce})
	require.NoError(t, err)
	limited, cancel := context.WithTimeout(ctx, testwait.Bound)
	defer cancel()
	require.ErrorIs(t, old.Run(limited), relay.ErrOldPrimary)
}

// requireKept waits until everything that the database has is published, and judges it; what was
// lost is left out.
func requireKept(t *testing.T, pool *pgxpool.Pool, topic string) {
	t.Helper()
	want := written(t.Context(), t, pool)
	var judged stream
	eventually(t, "everything is published", func() (bool, any) {
		var kept []*kgo.Record
		for _, record := range kafkatest.ReadAll(t, topic) {
			if !strings.HasPrefix(string(record.Key), "lost") {
				kept = append(kept, record)
			}
		}
		judged = judge(t, kept)
		for key, version := range want {
			if judged.last[key] != version {
				return false, fmt.Sprint(key, judged.last[key], version)
			}
		}
		return true, nil
	})
	require.Equal(t, want, judged.last)
	require.Empty(t, judged.missing)
	require.Zero(t, judged.inversions)
}
