package relay_test

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/relay"
)

// requireFirsts compares the values of a topic in the order of their first occurrences.
func requireFirsts(t *testing.T, topic string, want []string) {
	t.Helper()
	var got []string
	testwait.True(t, "all rows are there", func() bool { got = distinctInOrder(values(t, topic)); return len(got) >= len(want) })
	require.Equal(t, want, got)
}

func numbered(prefix string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint(prefix, i))
	}
	return all
}

func insertAll(t *testing.T, pool *pgxpool.Pool, topic string, payloads []string) {
	t.Helper()
	for i, payload := range payloads {
		if i%2 == 0 {
			insert(t, pool, topic, "k", payload)
			continue
		}
		tx := opened(t, pool, `SAVEPOINT s`) // the row's xmin is not the transaction that it names
		insert(t, tx, topic, "k", payload)
		require.NoError(t, tx.Commit(t.Context()))
	}
}

// publishToFloor publishes rows until the floor is at one that is given, and returns what they are.
func publishToFloor(t *testing.T, pool *pgxpool.Pool, r *relay.Relay, topic string, floor int64) (all []string) {
	t.Helper()
	for {
		require.Less(t, len(all), 2000, "the floor does not move")
		all = append(all, fmt.Sprint("before", len(all)))
		insert(t, pool, topic, "k", all[len(all)-1])
		drain(t, r)
		if one[int64](t, pool, `SELECT min(floor) FROM effectonce.outbox_progress_now`) >= floor {
			return all
		}
	}
}

// roled is a database with the group roles: its owner's pool, and the relay role's.
func roled(t *testing.T) (owner, member *pgxpool.Pool, prefix string) {
	t.Helper()
	address := pgtest.Database(t)
	owner, prefix = poolAt(t, address), pgtest.RolePrefix(t, address)
	sql, err := migrations.Roles(migrations.Options{}, prefix)
	require.NoError(t, err)
	must(t, owner, sql)
	return owner, poolAt(t, pgtest.Login(t, address, prefix, "relay")), prefix
}

// published20 is a database with the group roles whose 20 rows, from "before0", are published.
func published20(t *testing.T) (owner, member *pgxpool.Pool, topic string) {
	t.Helper()
	owner, member, _ = roled(t)
	topic = kafkatest.Topic(t, 1)
	insertAll(t, owner, topic, numbered("before", 20))
	drain(t, newRelay(t, member, relay.Config{}))
	return owner, member, topic
}

// inOrder requires that the sequences need no repair.
func inOrder(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	state, err := relay.ReadSequences(t.Context(), pool, "")
	require.NoError(t, err)
	require.False(t, state.Behind, "%+v", state)
}

// wentBack are ways in which the sequence goes back, and whether rows of before are there still.
var wentBack = map[string]string{
	"restart identity": `TRUNCATE effectonce.outbox RESTART IDENTITY`,
	"setval":           `SELECT setval('effectonce.outbox_slot', 1), setval('effectonce.outbox_seq_seq', 1, false)`,
	// What a subscription leaves: rows, and sequences that were never called, in another cluster.
	"logical copy": `TRUNCATE effectonce.outbox_0, effectonce.outbox_1, effectonce.outbox_2, effectonce.outbox_3 RESTART IDENTITY;
		SELECT setval('effectonce.outbox_seq_seq', 1, false), setval('effectonce.outbox_ticks_tick_seq', 1, false);
		UPDATE effectonce.outbox_progress SET system_identifier = system_identifier - 1`,
}

// repaired repairs the sequences as an operator does, once a relay refused to publish.
func repaired(t *testing.T, owner *pgxpool.Pool, refuses *relay.Relay) relay.Repaired {
	t.Helper()
	if refuses != nil {
		_, err := refuses.Drain(t.Context())
		require.ErrorIs(t, err, relay.ErrSequenceBehind)
	}
	done, err := relay.Repair(t.Context(), owner, ana)
	require.NoError(t, err)
	require.True(t, done.Repaired)
	return done
}

// Property: rows that commit after the sequence went back are published after a repair, each of
// them, in order, although their numbers are below the floor: whether the relay looks before the
// sequence reached its old numbers again or behind that. Row O40 of guarantees.md.
func TestSequenceThatWentBack(t *testing.T) {
	t.Parallel()
	// Each pair of properties, not each combination.
	for _, c := range []struct {
		how                  string
		exactly, later, runs bool
	}{
		{"restart identity", false, false, false},
		{"restart identity", true, true, true},
		{"setval", true, false, true},
		{"setval", false, true, false},
		{"logical copy", false, false, true},
		{"logical copy", true, true, false},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			t.Parallel()
			owner, pool, _ := roled(t)
			topic := kafkatest.Topic(t, 1)
			r := newRelay(t, pool, relay.Config{ExactlyOnce: c.exactly})
			before := publishToFloor(t, owner, r, topic, 10)
			after := numbered("after", 5)
			if c.later {
				after = numbered("after", len(before)+50)
			}
			must(t, owner, wentBack[c.how])
			insertAll(t, owner, topic, after)
			if !c.runs {
				repaired(t, owner, r)
				drain(t, r)
			} else {
				running(t, pool, relay.Config{ExactlyOnce: c.exactly})
				repaired(t, owner, nil)
			}
			requireFirsts(t, topic, append(before, after...))
			inOrder(t, pool)
			insertAll(t, owner, topic, []string{"last"})
			if !c.runs {
				require.EqualValues(t, 1, drain(t, r))
			}
			requireFirsts(t, topic, append(append(before, after...), "last"))
		})
	}
}

// Property: rows that were not published when the sequence went back stay before those of their key
// that came afterwards.
func TestRowsOfBeforeComeFirst(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"setval":       wentBack["setval"],
		"logical copy": wentBack["setval"] + `; UPDATE effectonce.outbox_progress SET system_identifier = system_identifier - 1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			either(t, "the first", "behind published ones", func(t *testing.T, published bool) {
				t.Helper()
				owner, pool, _ := roled(t)
				topic := kafkatest.Topic(t, 1)
				r := newRelay(t, pool, relay.Config{})
				var want []string
				if published {
					want = publishToFloor(t, owner, r, topic, 10)
				}
				waiting, after := numbered("waiting", 10), numbered("after", 5)
				insertAll(t, owner, topic, waiting)
				must(t, owner, sql)
				insertAll(t, owner, topic, after)
				want = append(append(want, waiting...), after...)
				repaired(t, owner, r)
				drain(t, r)
				requireFirsts(t, topic, want)
			})
		})
	}
}

// Property: a relay whose sequence went back publishes nothing, removes nothing, and names the
// command; the operator's role repairs it, and the relay continues by itself. Two at once repair it
// once.
func TestSequenceIsRepairedByAnOperator(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, pool, prefix := roled(t)
	topic, r := kafkatest.Topic(t, 1), newRelay(t, pool, relay.Config{Keep: 100 * time.Millisecond})
	insertAll(t, owner, topic, numbered("before", 20))
	drain(t, r)
	must(t, owner, wentBack["restart identity"])
	insertAll(t, owner, topic, numbered("after", 5))
	must(t, owner, turnedSQL, 60)

	_, err := r.Drain(ctx)
	require.ErrorIs(t, err, relay.ErrSequenceBehind)
	require.ErrorContains(t, err, `run "outbox-relay repair"`)
	require.Equal(t, 5, left(t, owner, r))
	running(t, pool, relay.Config{})

	config := owner.Config()
	config.ConnConfig.RuntimeParams["role"] = prefix + "_operator"
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	operator := pgtest.PoolOf(t, config)
	var mu sync.Mutex
	var repaired []relay.Repaired
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			done, err := relay.Repair(ctx, operator, ana)
			mu.Lock()
			defer mu.Unlock()
			if err == nil && done.Repaired {
				repaired = append(repaired, done)
			}
		})
	}
	group.Wait()
	require.Len(t, repaired, 1)
	require.Equal(t, int64(5), repaired[0].Renumbered)
	require.Equal(t, "ana", one[string](t, owner, `SELECT stated FROM effectonce.operator_actions WHERE what = 'outbox.repair'`))
	requireFirsts(t, topic, append(numbered("before", 20), numbered("after", 5)...))
}

// Property: a row whose number a dead row has is not lost when it becomes dead, and stays behind
// it. Row O40 of guarantees.md.
func TestDeadRowsOfReusedNumbers(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, exactly bool) {
		t.Helper()
		owner, pool, _ := roled(t)
		missing := kafkatest.UnusedTopic(t)
		r := newRelay(t, pool, relay.Config{ExactlyOnce: exactly})
		before, after := numbered("before", 5), numbered("after", 5)
		insertAll(t, owner, missing, before)
		drain(t, r)
		require.Equal(t, 5, one[int](t, owner, `SELECT count(*) FROM effectonce.outbox_dead`))
		// No progress that knows the numbers, only dead rows.
		must(t, owner, wentBack["restart identity"]+`; DELETE FROM effectonce.outbox_progress; DELETE FROM effectonce.outbox_advances`)
		insertAll(t, owner, missing, after)
		repaired(t, owner, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		drain(t, newRelay(t, pool, relay.Config{ExactlyOnce: exactly}))
		require.Equal(t, 10, one[int](t, owner, `SELECT count(*) FROM effectonce.outbox_dead`))
		kafkatest.CreateTopic(t, missing, 1)
		running(t, pool, relay.Config{ExactlyOnce: exactly})
		requireFirsts(t, missing, append(before, after...))
	})
}

// Property: where the sequence of ticks went back, numbers of ticks are not given twice, and the
// relay continues.
func TestSequenceOfTicksThatWentBack(t *testing.T) {
	t.Parallel()
	owner, pool, _ := roled(t)
	topic := kafkatest.Topic(t, 1)
	r := newRelay(t, pool, relay.Config{})
	for i := range 5 {
		insertAll(t, owner, topic, []string{fmt.Sprint(i)})
		drain(t, r)
	}
	known := one[int64](t, owner, `SELECT max(tick) FROM effectonce.outbox_ticks`)
	// Old ticks were removed: the first numbers are free, and lead on to those that are there.
	must(t, owner, `DELETE FROM effectonce.outbox_ticks WHERE tick > 0 AND tick < (SELECT min(tick) FROM effectonce.outbox_progress_now);
		SELECT setval('effectonce.outbox_ticks_tick_seq', 1, false)`)
	insertAll(t, owner, topic, []string{"5"})
	repaired(t, owner, r)
	require.EqualValues(t, 1, drain(t, r), "nothing is published twice")
	require.Greater(t, one[int64](t, owner, `SELECT min(tick) FROM effectonce.outbox_progress_now`), known)
	requireFirsts(t, topic, []string{"0", "1", "2", "3", "4", "5"})
}

// Property: a role that may call the repair cannot push the sequences beyond what can be used, and
// a sequence in order is not changed.
func TestRepairIsBounded(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, _, prefix := roled(t)
	pool := poolAt(t, pgtest.Login(t, owner.Config().ConnString(), prefix, "operator"))
	insertAll(t, owner, kafkatest.Topic(t, 1), numbered("v", 3))
	last := `SELECT pg_sequence_last_value('effectonce.outbox_seq_seq')`
	must(t, owner, `INSERT INTO effectonce.outbox_progress (relay, shard) VALUES ('r', 0); INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch) VALUES ('r', 0, 1, 0)`)
	for _, tc := range []struct {
		floor int64
		code  string
		want  int64
	}{{0, "", 3}, {math.MaxInt64, "22003", 3}, {1000, "", 1003}} {
		must(t, owner, fmt.Sprint(`UPDATE effectonce.outbox_advances SET floor = `, tc.floor))
		_, err := pool.Exec(ctx, `SELECT effectonce.repair_outbox_sequences()`)
		var refusal *pgconn.PgError
		if tc.code == "" {
			require.NoError(t, err)
		} else {
			require.ErrorAs(t, err, &refusal)
			require.Equal(t, tc.code, refusal.Code)
		}
		require.Equal(t, tc.want, one[int64](t, owner, last), tc.floor)
	}
	for _, direct := range []string{
		`SELECT setval('effectonce.outbox_seq_seq', 1)`, `SELECT effectonce.renumber_outbox(0, 0, NULL)`, `ALTER SEQUENCE effectonce.outbox_seq_seq RESTART WITH 1`,
	} {
		_, err := pool.Exec(ctx, direct)
		require.ErrorContains(t, err, "42501")
	}
}

// Property: a repair waits for a transaction that has inserted with an old number and has not
// ended, changes nothing while that is open for longer, and takes its row along afterwards.
func TestRepairWaitsForWriters(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, pool, topic := published20(t)
	r := newRelay(t, pool, relay.Config{})
	must(t, owner, wentBack["restart identity"])
	writer := opened(t, owner, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ($1, 'k', 'open')`, topic)
	_, err := r.Drain(ctx)
	require.ErrorIs(t, err, relay.ErrSequenceBehind)
	_, err = relay.Repair(ctx, owner, ana)
	require.ErrorIs(t, err, relay.ErrSequenceBusy)
	repaired := make(chan relay.Repaired, 1)
	go func() {
		done, err := relay.Repair(ctx, owner, ana)
		assert.NoError(t, err)
		repaired <- done
	}()
	becomes(t, owner, "the repair waits", `SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation::regclass::text ~ 'outbox' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	require.NoError(t, writer.Commit(ctx))
	require.EqualValues(t, 1, (<-repaired).Renumbered)
	require.EqualValues(t, 1, drain(t, r))
	requireFirsts(t, topic, append(numbered("before", 20), "open"))
}

// Property: a repair ends all leases, so that what another process has in memory is not stored
// behind it.
func TestRepairEndsLeases(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, pool, topic := published20(t)
	held, err := newRelay(t, pool, relay.Config{}).Acquires(ctx, 0)
	require.NoError(t, err)
	require.True(t, held)
	before := one[int64](t, owner, `SELECT epoch FROM effectonce.outbox_progress`)
	must(t, owner, wentBack["restart identity"])
	insertAll(t, owner, topic, numbered("after", 3))
	repaired(t, owner, nil)
	require.Greater(t, one[int64](t, owner, `SELECT epoch FROM effectonce.outbox_progress_now WHERE owner IS NULL AND lease_until IS NULL AND progress_epoch = epoch`), before)
	inOrder(t, owner)
	drain(t, newRelay(t, pool, relay.Config{}))
	requireFirsts(t, topic, append(numbered("before", 20), numbered("after", 3)...))
}

// Property: when the sequence goes back while relays run and others write, each committed row is
// published after the repair, in order, and the relays continue by themselves: also where one transaction truncates,
// restarts and writes more rows than there were, so that no look sees the sequence below where it
// was. Row O40 of guarantees.md.
func TestSequenceThatGoesBackMeanwhile(t *testing.T) {
	longtest.Only(t, "relays and writers at random moments")
	t.Parallel()
	type back struct {
		how   string
		after int // rows
	}
	eachBoth(t, map[string]back{
		"restart identity": {"restart identity", 5}, "restarted and refilled": {"restart identity", 2000}, "setval": {"setval", 5},
	}, func(t *testing.T, c back, exactly bool) {
		t.Helper()
		owner, pool, _ := roled(t)
		topic := kafkatest.Topic(t, 1)
		cfg := relay.Config{ExactlyOnce: exactly, Lease: 2 * time.Second}
		running(t, pool, cfg)
		running(t, pool, cfg)
		want := numbered("before", 50)
		insertAll(t, owner, topic, want)
		requireFirsts(t, topic, want)
		after := numbered("after", c.after)
		tx := opened(t, owner, wentBack[c.how])
		must(t, tx, `INSERT INTO effectonce.outbox (topic, key, payload)
			SELECT $1, 'k', convert_to(payload, 'UTF8') FROM unnest($2::text[]) WITH ORDINALITY AS all_ (payload, n) ORDER BY n`, topic, after)
		require.NoError(t, tx.Commit(t.Context()))
		want = append(want, after...)
		// There is nothing to repair where progress was not stored yet, or only in Kafka.
		testwait.True(t, "all rows are there", func() bool {
			_, err := relay.Repair(t.Context(), owner, ana)
			require.NoError(t, err)
			return len(distinctInOrder(values(t, topic))) >= len(want)
		})
		requireFirsts(t, topic, want)
		insertAll(t, owner, topic, []string{"last"})
		requireFirsts(t, topic, append(want, "last"))
	})
}

// Property: the relay never takes a number as assigned before it is: rows that are assigned it
// later would count as read, and be lost. (The sequence's row is briefly ahead, while nextval
// writes it for the write-ahead log.)
func TestSequenceIsNeverReadAhead(t *testing.T) {
	longtest.Only(t, "a hammer of three seconds")
	t.Parallel()
	pool := pgtest.Pool(t)
	for range 2 {
		defer keepsWriting(t, pool, `SELECT $1::text, $2::bytea, count(nextval('effectonce.outbox_seq_seq')) FROM generate_series(1, 500)`, "")()
	}
	begun := time.Now()
	for looks := 0; looks < 500 || time.Since(begun) < 3*time.Second; looks++ {
		var read, given int64
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT read, nextval('effectonce.outbox_seq_seq') FROM (SELECT `+relay.LastSeq+` AS read OFFSET 0) AS look`).Scan(&read, &given))
		require.Less(t, read, given, "look %d", looks)
	}
}

// Property: a repair of both sequences ends, however long it renumbers rows, while others look at
// the sequences: they wait, and it waits for none of them.
func TestRepairBesideThoseWhoLook(t *testing.T) {
	longtest.Only(t, "a hammer of three seconds")
	t.Parallel()
	ctx := t.Context()
	owner, pool, topic := published20(t)
	must(t, owner, wentBack["logical copy"])
	insertAll(t, owner, topic, numbered("after", 3))
	must(t, owner, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END';
		CREATE TRIGGER slow BEFORE INSERT ON effectonce.outbox FOR EACH ROW EXECUTE FUNCTION slow()`)
	var looking errgroup.Group
	var over atomic.Bool
	looking.Go(func() error {
		for !over.Load() {
			if _, err := relay.ReadSequences(ctx, pool, ""); err != nil {
				return err
			}
		}
		return nil
	})
	done := repaired(t, owner, nil)
	over.Store(true)
	require.EqualValues(t, 3, done.Renumbered)
	require.Greater(t, done.TickAfter, done.TickBefore, "the test's own premise")
	require.NoError(t, looking.Wait())
	must(t, owner, `DROP TRIGGER slow ON effectonce.outbox`)
	drain(t, newRelay(t, pool, relay.Config{}))
	requireFirsts(t, topic, append(numbered("before", 20), numbered("after", 3)...))
}

// Property: rows of another cluster that a relay stamps, as it begins, are no numbers that were
// given twice to a relay that is ahead of them: nothing is repaired, nor published again.
func TestStampedRowsAreNotReused(t *testing.T) {
	t.Parallel()
	owner, _, topic := published20(t)
	ahead := newRelay(t, owner, relay.Config{})
	insertAll(t, owner, topic, []string{"floor"})
	drain(t, ahead)
	must(t, owner, `UPDATE effectonce.outbox SET txid = (1000000000 + seq)::text::xid8; UPDATE effectonce.outbox_progress SET system_identifier = system_identifier - 1`)
	drain(t, ahead)
	insertAll(t, owner, topic, numbered("after", 5))
	drain(t, ahead)
	published := kafkatest.Count(t, topic)
	require.EqualValues(t, 26, drain(t, newRelay(t, owner, relay.Config{Name: "begins"})))
	inOrder(t, owner)
	require.Zero(t, drain(t, ahead))
	require.Equal(t, published+26, kafkatest.Count(t, topic))
}

// Property: a sequence that is set forward before anything was written is in order.
func TestSequenceThatIsSetForward(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{`ALTER SEQUENCE effectonce.outbox_seq_seq RESTART WITH 1000`, `SELECT setval('effectonce.outbox_seq_seq', 1000, false)`} {
		owner, pool, topic := published20(t)
		r := newRelay(t, pool, relay.Config{})
		must(t, owner, sql)
		inOrder(t, pool)
		require.Zero(t, drain(t, r))
		insertAll(t, owner, topic, []string{"after"})
		require.EqualValues(t, 1, drain(t, r))
		require.EqualValues(t, 1000, one[int64](t, owner, `SELECT max(seq) FROM effectonce.outbox`))
	}
}

// Property: a TRUNCATE of the outbox that restarts its sequence, which locks the table, its
// partitions and then the sequence, does not deadlock with the relay: while the relay waits for the
// table, it holds no lock of the sequence.
func TestTableIsLockedBeforeItsSequence(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, topic := pgtest.Pool(t), kafkatest.Topic(t, 1)
	insertAll(t, pool, topic, []string{"before"})
	tx := opened(t, pool, `LOCK TABLE effectonce.outbox IN ACCESS EXCLUSIVE MODE`)
	running(t, pool, relay.Config{})
	var group errgroup.Group
	for _, sql := range []string{relay.FetchSQL, relay.FetchNewSQL, relay.FetchSizedSQL, fmt.Sprintf(relay.UnpublishedSQL, 0)} { // the relay itself waits in an earlier statement
		group.Go(func() error {
			conn, err := pool.Acquire(ctx)
			if err != nil {
				return err
			}
			defer conn.Release()
			_, err = conn.Conn().Prepare(ctx, "look", sql)
			return errors.Join(err, conn.Conn().Deallocate(ctx, "look"))
		})
	}
	here := `= (SELECT oid FROM pg_database WHERE datname = current_database())`
	waiting := `FROM pg_locks w WHERE NOT w.granted AND w.relation = 'effectonce.outbox'::regclass AND w.database ` + here
	testwait.True(t, "all wait for the table", func() bool { return one[int](t, pool, `SELECT count(*) `+waiting) >= 5 })
	require.Zero(t, one[int](t, pool, `SELECT count(*) FROM pg_locks l WHERE l.granted AND l.database `+here+` AND l.pid IN (SELECT w.pid `+waiting+`)
		AND l.relation IN (SELECT oid FROM pg_class WHERE relnamespace = 'effectonce'::regnamespace AND relname IN ('outbox_seq_seq', 'outbox_0', 'outbox_1', 'outbox_2', 'outbox_3'))`))
	for _, sql := range []string{`TRUNCATE effectonce.outbox RESTART IDENTITY`, `INSERT INTO effectonce.outbox (topic, key, payload) VALUES ('` + topic + `', 'k', 'after')`} {
		must(t, tx, sql)
	}
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, group.Wait())
	requireFirsts(t, topic, []string{"after"})
}
