package dedup_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// sql is a list of steps without parameters.
func sql(statements ...string) []dedup.Step {
	steps := make([]dedup.Step, len(statements))
	for i, statement := range statements {
		steps[i].SQL = statement
	}
	return steps
}

const beginSQL = "BEGIN ISOLATION LEVEL READ COMMITTED"

// acquire returns a connection that is released when the test ends.
func acquire(t *testing.T, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return conn.Conn()
}

// kinds are the consumers of both tables.
func kinds(t *testing.T, pool *pgxpool.Pool, claims *dedup.Claims) map[string]dedup.Consumer {
	t.Helper()
	forever := registered(t, pool, claims, dedup.Registration{Name: "ledger", Group: "ledger", Forever: true})
	return map[string]dedup.Consumer{"window": dedup.Numbered(1000), "forever": forever}
}

// A claim that takes everything as fresh claims everything once: the other forms see its claims,
// another consumer does not, and if an ID occurs several times, the first occurrence is fresh.
func TestBeginFreshClaimsEveryID(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	for name, consumer := range kinds(t, pool, claims) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := acquire(t, pool)
			ids := append(newIDs(t, 2000), dedup.MessageID(name, []byte("no time")))
			rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
			given := append(slices.Clone(ids), ids[7], ids[0])

			result, err := claims.BeginFresh(t.Context(), conn, sql(beginSQL), consumer, messages(given))
			require.NoError(t, err)
			pgtest.Exec(t, conn, "COMMIT")
			want := slices.Repeat([]bool{true}, len(ids))
			assert.Equal(t, append(want, false, false), result.Fresh())
			assert.NotContains(t, result.Conflicts(), true)
			assert.False(t, slices.Contains(claimAlone(t, pool, claims, consumer, ids...), true))
			assert.False(t, slices.Contains(claimAlone(t, pool, claims, dedup.Numbered(2000), ids...), false), "of another consumer")
		})
	}
}

// One duplicate refuses the whole claim, wherever it is in the batch, whenever it was committed and
// whatever the isolation level. Nothing is claimed, and after the rollback the other form reports
// which one it was.
func TestADuplicateRefusesAFreshClaim(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	for name, consumer := range kinds(t, pool, claims) {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			for _, late := range []bool{false, true} {
				for _, place := range []int{0, 250, 499} {
					t.Run(fmt.Sprintf("%s/%s/after the snapshot=%v/%d", name, level, late, place), func(t *testing.T) {
						t.Parallel()
						conn := acquire(t, pool)
						ids := newIDs(t, 500)
						begin := "BEGIN ISOLATION LEVEL " + string(level)
						if late {
							pgtest.Exec(t, conn, begin)
							pgtest.Exec(t, conn, "SELECT 1") // takes the snapshot
							begin = "SELECT 1"
						}
						claimAlone(t, pool, claims, consumer, ids[place])

						_, err := claims.BeginFresh(t.Context(), conn, sql(begin), consumer, messages(ids))
						require.ErrorIs(t, err, dedup.ErrTaken)
						require.NotErrorIs(t, err, dedup.ErrRetry)
						require.EqualValues(t, 'E', conn.PgConn().TxStatus())
						pgtest.Exec(t, conn, "ROLLBACK")

						want := slices.Repeat([]bool{true}, len(ids))
						want[place] = false
						assert.Equal(t, want, claimAlone(t, pool, claims, consumer, ids...))
					})
				}
			}
		}
	}
}

// Only the constraint on claims means duplicate. A unique violation of anything else, in the same
// round trip or in a trigger on the table of claims itself, is an error like any other.
func TestAnotherUniqueViolationIsNoDuplicate(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	pgtest.Exec(t, pool, `CREATE TABLE processed_messages_copy (n int PRIMARY KEY); INSERT INTO processed_messages_copy VALUES (1);
		CREATE TABLE effectonce.effects (n int PRIMARY KEY); INSERT INTO effectonce.effects VALUES (1)`)
	fail := func(t *testing.T, before, after []dedup.Step) {
		t.Helper()
		conn, ids := acquire(t, pool), newIDs(t, 2)
		_, err := claims.BeginFresh(t.Context(), conn, before, dedup.Numbered(1), messages(ids), after...)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "23505", pgErr.Code)
		require.NotErrorIs(t, err, dedup.ErrTaken)
		pgtest.Exec(t, conn, "ROLLBACK")
		assert.Equal(t, []bool{true, true}, claimAlone(t, pool, claims, dedup.Numbered(1), ids...))
	}
	const elsewhere, beside = "INSERT INTO processed_messages_copy VALUES (1)", "INSERT INTO effectonce.effects VALUES (1)"
	fail(t, sql(beginSQL, elsewhere), nil)
	fail(t, sql(beginSQL), sql(elsewhere))
	fail(t, sql(beginSQL), sql(beside))
	fail(t, sql(beginSQL, "INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint) SELECT '00000000-0000-0000-0000-000000000000', 1, 0 FROM generate_series(1, 2)"), nil)
	conn := acquire(t, pool)
	pgtest.Exec(t, conn, `CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.processed_messages_copy VALUES (1); RETURN NULL; END'`)
	pgtest.Exec(t, conn, `CREATE TRIGGER audit AFTER INSERT ON effectonce.processed_messages FOR EACH STATEMENT WHEN (current_setting('test.audit', true) = 'on') EXECUTE FUNCTION audit()`)
	fail(t, sql(beginSQL, "SET LOCAL test.audit = on"), nil)
}

// Whichever statement of the round trip fails, nothing is claimed, and the connection is in sync with
// the server.
func TestAFailedFreshClaimLeavesTheConnectionUsable(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	conn := acquire(t, pool)
	for _, tc := range [][2][]dedup.Step{
		{sql("BEGIN ISOLATION LEVEL MOSTLY HARMLESS"), nil},
		{sql(beginSQL, "SELECT 1/0"), nil},
		{sql(beginSQL), sql("SELECT 1/0")},
		{sql("BEGIN READ ONLY"), nil},
		{sql(beginSQL, "LOCK TABLE nowhere"), nil},
		{sql(beginSQL), sql("SELECT set_config('lock_timeout', '1s', true)", "SELECT 1/0")},
		{{{SQL: beginSQL}, {SQL: "SELECT $1::int", Args: []string{"one"}}}, nil},
		{{{SQL: beginSQL}, {SQL: "SELECT 'one'", Into: []any{new(int)}}}, nil},
		{{{SQL: beginSQL}, {SQL: "SELECT 1, 2", Into: []any{new(int)}}}, nil},
	} {
		ids := newIDs(t, 500)
		_, err := claims.BeginFresh(t.Context(), conn, tc[0], dedup.Numbered(1), messages(ids), tc[1]...)
		require.Error(t, err, tc)
		require.NotErrorIs(t, err, dedup.ErrTaken)
		pgtest.Exec(t, conn, "ROLLBACK")
		assert.False(t, slices.Contains(claimAlone(t, pool, claims, dedup.Numbered(1), ids...), false), tc)
		pgtest.Exec(t, conn, "SELECT true")
	}
}

// gatedConn delays the server's messages until the client has sent the end of a round trip.
type gatedConn struct {
	net.Conn

	mu     sync.Mutex
	opened *sync.Cond
	shut   bool
}

func (c *gatedConn) Read(p []byte) (int, error) {
	c.mu.Lock()
	for c.shut {
		c.opened.Wait()
	}
	c.mu.Unlock()
	return c.Conn.Read(p)
}

func (c *gatedConn) Write(p []byte) (int, error) {
	if bytes.HasSuffix(p, []byte("S\x00\x00\x00\x04")) { // Sync, the last message of a round trip
		c.gate(false)
	}
	return c.Conn.Write(p)
}

func (c *gatedConn) gate(shut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = shut
	c.opened.Broadcast()
}

// connectGated opens a connection in a mode of pgx.
func connectGated(t *testing.T, address string, mode pgx.QueryExecMode) (*pgx.Conn, *gatedConn) {
	t.Helper()
	config, err := pgx.ParseConfig(address)
	require.NoError(t, err)
	config.DefaultQueryExecMode = mode
	var gated *gatedConn
	config.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		gated = &gatedConn{Conn: conn}
		gated.opened = sync.NewCond(&gated.mu)
		return gated, err
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	return conn, gated
}

// BEGIN, the other steps and the claim take one round trip, in each mode that works behind a pooler
// and in the default: the client sends everything before it receives anything.
func TestBeginFreshTakesOneRoundTrip(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			conn, gated := connectGated(t, address, mode)
			claims := newClaims(t)
			for attempt := range 3 {
				ctx, cancel := context.WithTimeout(t.Context(), testwait.Bound)
				defer cancel()
				context.AfterFunc(ctx, func() { gated.gate(false) })
				if attempt > 0 || mode != pgx.QueryExecModeCacheStatement { // which prepares at its first use
					gated.gate(true)
				}
				var timeout, none string
				var at *time.Time
				result, err := claims.BeginFresh(ctx, conn, []dedup.Step{
					{SQL: beginSQL},
					{SQL: "SELECT set_config('lock_timeout', $1, true), 'x'", Args: []string{"7s"}, Into: []any{&timeout, nil}},
				}, dedup.Numbered(1), messages(newIDs(t, 500)),
					dedup.Step{SQL: "SELECT NULL::timestamptz", Into: []any{&at}},
					dedup.Step{SQL: "SELECT 'a row' WHERE $1::int = 0", Args: []string{"1"}, Into: []any{&none}})
				require.NoError(t, err)
				require.NoError(t, ctx.Err())
				assert.False(t, slices.Contains(result.Fresh(), false))
				assert.Equal(t, []string{"7s", ""}, []string{timeout, none})
				assert.Nil(t, at)
				pgtest.Exec(t, conn, "COMMIT")
			}
		})
	}
}

// A connection that hangs ends the claim at its deadline and is closed.
func TestBeginFreshOnASilentConnectionEndsInTime(t *testing.T) {
	t.Parallel()
	conn, _ := connectGated(t, pgtest.Database(t), pgx.QueryExecModeCacheDescribe)
	holder, err := pgx.Connect(t.Context(), conn.Config().ConnString())
	require.NoError(t, err)
	defer func() { assert.NoError(t, holder.Close(context.WithoutCancel(t.Context()))) }()
	pgtest.Exec(t, holder, "BEGIN; LOCK TABLE effectonce.processed_messages") // so that the server does not respond
	// The statement has to be on its way before that.
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err = newClaims(t).BeginFresh(ctx, conn, sql(beginSQL), dedup.Numbered(1), messages(newIDs(t, 500)))
	require.Error(t, err)
	require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded)
	assert.True(t, conn.IsClosed())
}

// Statements that the server dropped (DISCARD ALL of a pool's hook) are prepared again by the
// attempt after the next.
func TestBeginFreshPreparesAnewAfterDiscard(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	conn := acquire(t, pool)
	for round := range 3 {
		_, err := claims.BeginFresh(t.Context(), conn, sql(beginSQL), dedup.Numbered(1), messages(newIDs(t, 5)))
		if round > 0 {
			require.Error(t, err)
			_, err = claims.BeginFresh(t.Context(), conn, sql(beginSQL), dedup.Numbered(1), messages(newIDs(t, 5)))
		}
		require.NoError(t, err)
		_, err = conn.PgConn().Exec(t.Context(), "COMMIT; DISCARD ALL").ReadAll() // DISCARD cannot run inside a transaction block
		require.Error(t, err)
		_, err = conn.PgConn().Exec(t.Context(), "DISCARD ALL").ReadAll()
		require.NoError(t, err)
	}
}

// claimEitherWay claims as consumers do: in the form that takes everything as fresh, and if that is
// refused, in the form that reports duplicates. It returns the IDs that were fresh.
func claimEitherWay(ctx context.Context, claims *dedup.Claims, conn *pgx.Conn, optimistic bool, consumer dedup.Consumer, ids []uuid.UUID) ([]uuid.UUID, error) {
	end := func(sql string) error { _, err := conn.Exec(ctx, sql); return err }
	var result *dedup.Result
	var err error
	if optimistic {
		result, err = claims.BeginFresh(ctx, conn, sql(beginSQL), consumer, messages(ids))
		if err != nil {
			if again := end("ROLLBACK"); again != nil || !errors.Is(err, dedup.ErrTaken) {
				return nil, cmp.Or(again, err)
			}
		}
	}
	if !optimistic || err != nil {
		batch := &pgx.Batch{}
		batch.Queue(beginSQL)
		result = claims.Queue(batch, consumer, messages(ids))
		if err := conn.SendBatch(ctx, batch).Close(); err != nil {
			return nil, errors.Join(err, end("ROLLBACK"))
		}
	}
	var fresh []uuid.UUID
	for i, so := range result.Fresh() {
		if so {
			fresh = append(fresh, ids[i])
		}
	}
	return fresh, end("COMMIT")
}

// C7: replicas that claim the same IDs in opposite order, in one form or in two, never deadlock,
// also over several partitions. A third transaction holds the ID in the middle, so that each would
// hold one half of the other's if the order of the batch counted. Each form waits for the holder of
// an ID: it claims the ID after a rollback, and reports a duplicate after a commit.
func TestMixedFormsInOppositeOrderDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool, claims := newPool(t, pgtest.Database(t), 4, "deadlock_timeout", "200ms"), newClaims(t)
	for round := range 12 {
		consumer := dedup.Numbered(round)
		ids := newIDs(t, 51)
		for i := range ids {
			if i%3 == 0 {
				ids[i] = dedup.MessageID("orders", ids[i][:]) // in another partition
			}
		}
		reversed := slices.Clone(ids)
		slices.Reverse(reversed)
		middle, _ := begin(t, pool, pgx.TxOptions{})
		claim(t, claims, middle, consumer, ids[25])
		answers := make(chan answer, 2)
		for i, batch := range [][]uuid.UUID{ids, reversed} {
			conn, err := pool.Acquire(t.Context())
			require.NoError(t, err)
			go func() {
				defer conn.Release()
				optimistic := round%4 == 0 || round%4 != 1 && (i+round)%2 == 0 // both, neither, one of the two
				fresh, err := claimEitherWay(t.Context(), claims, conn.Conn(), optimistic, consumer, batch)
				if len(fresh) != 0 && len(fresh) != len(batch) {
					err = fmt.Errorf("%d of %d are fresh", len(fresh), len(batch))
				}
				answers <- answer{len(fresh) > 0, err}
			}()
			waitUntil(t, pool, "SELECT cardinality(pg_blocking_pids($1)) > 0", int32(conn.Conn().PgConn().PID()))
		}
		require.NoError(t, middle.Rollback(t.Context()))
		a, b := <-answers, <-answers
		require.NoError(t, errors.Join(a.err, b.err))
		require.NotEqual(t, a.fresh, b.fresh, "one batch is fresh and the other one is not")
	}
}
