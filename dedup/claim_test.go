package dedup_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
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
)

// C26: if an ID occurs several times in a batch, its first occurrence is fresh and the others are
// duplicates, in the order of the batch and not in that of the IDs.
func TestFirstOccurrenceInABatchWins(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	ids := newIDs(t, 4)
	a, b, c, d := ids[0], ids[1], ids[2], ids[3]

	assert.Equal(t, []bool{true, true, false, false}, claimAlone(t, pool, claims, dedup.Numbered(1), b, a, b, b))
	assert.Equal(t, []bool{false, true, false, true, false, false}, claimAlone(t, pool, claims, dedup.Numbered(1), a, d, d, c, b, d))
	assert.Equal(t, []bool{false, false, false, false}, claimAlone(t, pool, claims, dedup.Numbered(1), a, b, c, d))
	assert.Empty(t, claimAlone(t, pool, claims, dedup.Numbered(1)))

	assert.Equal(t, []uuid.UUID{a, b, c, d}, ids, "the caller's slice was sorted")
}

// C3: a claim and the effect of its message are committed together or not at all, however the
// transaction ends.
func TestClaimAndEffectStandOrFallTogether(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	pgtest.Exec(t, pool, "CREATE TABLE effects (id uuid, amount int CHECK (amount > 0))")
	refused := errors.New("refused")

	for _, tc := range []struct {
		name      string
		amount    int
		end       func(t *testing.T, tx pgx.Tx) error
		committed bool
	}{
		{"committed", 1, func(*testing.T, pgx.Tx) error { return nil }, true},
		{"rolled back", 1, func(*testing.T, pgx.Tx) error { return refused }, false},
		{"the effect fails", -1, func(*testing.T, pgx.Tx) error { return nil }, false},
		{"the connection dies", 1, func(t *testing.T, tx pgx.Tx) error {
			t.Helper()
			pgtest.Exec(t, pool, "SELECT pg_terminate_backend($1, 60000)", tx.Conn().PgConn().PID())
			return nil
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			id := newIDs(t, 1)[0]
			err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				require.True(t, claim(t, claims, tx, dedup.Numbered(1), id))
				if _, err := tx.Exec(t.Context(), "INSERT INTO effects VALUES ($1, $2)", id, tc.amount); err != nil {
					return err
				}
				return tc.end(t, tx)
			})
			assert.Equal(t, tc.committed, err == nil, err)

			assert.Equal(t, tc.committed, pgtest.Count(t, pool, "SELECT count(*) FROM effects WHERE id = $1", id) == 1)
			assert.Equal(t, []bool{!tc.committed}, claimAlone(t, pool, claims, dedup.Numbered(1), id), "the message is redelivered")
		})
	}
}

// Every ID has a partition: those of the past, of today, of the far future and hashes. A duplicate
// is recognised in each of them, and a batch may go across all.
func TestEveryIDHasItsPartition(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	now := pgtest.Value[time.Time](t, pool, "SELECT now()")
	midnight := now.UTC().Truncate(24 * time.Hour)
	at := func(at time.Time) uuid.UUID { return dedup.PublishID("a", newIDs(t, 1)[0], "", at) }
	day := func(at time.Time) string { return "processed_messages_" + at.Format("20060102") }

	cases := []struct {
		name, partition string
		id              uuid.UUID
	}{
		{"1970", "processed_messages_past", at(time.UnixMilli(0))},
		{"all bits clear", "processed_messages_past", uuid.Nil},
		{"a year ago", "processed_messages_past", at(midnight.AddDate(-1, 0, 0))},
		{"a week ago", day(midnight.AddDate(0, 0, -7)), at(midnight.AddDate(0, 0, -7))},
		{"last moment of yesterday", day(midnight.AddDate(0, 0, -1)), at(midnight.Add(-time.Millisecond))},
		{"first moment of today", day(midnight), at(midnight)},
		{"smallest ID of today", day(midnight), floor(midnight)},
		{"largest ID of yesterday", day(midnight.AddDate(0, 0, -1)), before(floor(midnight))},
		{"now", day(midnight), at(now)},
		{"in four weeks", day(midnight.AddDate(0, 0, 28)), at(midnight.AddDate(0, 0, 28))},
		{"in ten years", "processed_messages_ahead", at(midnight.AddDate(10, 0, 0))},
		{"largest ID with a time", "processed_messages_ahead", uuid.MustParse("7fffffff-ffff-ffff-ffff-ffffffffffff")},
		{"smallest ID without", "processed_messages_untimed", uuid.MustParse("80000000-0000-0000-0000-000000000000")},
		{"hash", "processed_messages_untimed", dedup.MessageID("orders", []byte("order-4711"))},
		{"all bits set", "processed_messages_untimed", uuid.Max},
	}
	ids := make([]uuid.UUID, len(cases))
	for i, tc := range cases {
		ids[i] = tc.id
	}
	assert.NotContains(t, claimAlone(t, pool, claims, dedup.Numbered(1), ids...), false)
	for i, tc := range cases {
		partition := pgtest.Value[string](t, pool, "SELECT tableoid::regclass::text FROM effectonce.processed_messages WHERE message_id = $1 AND consumer = 1", tc.id)
		assert.Equal(t, "effectonce."+tc.partition, partition, tc.name)
		assert.Equal(t, []bool{false}, claimAlone(t, pool, claims, dedup.Numbered(1), ids[i]), tc.name)
	}
}

// floor returns the smallest ID of a time, whatever its version.
func floor(at time.Time) uuid.UUID {
	id := dedup.PublishID("billing", uuid.Nil, "", at)
	clear(id[6:])
	return id
}

// before returns the ID that precedes another one.
func before(id uuid.UUID) uuid.UUID {
	for i := len(id) - 1; i >= 0; i-- {
		id[i]--
		if id[i] != 0xff {
			break
		}
	}
	return id
}

// A claim is only an insert: neither a duplicate nor a conflict between two transactions updates,
// deletes or locks a row of processed_messages, so there is nothing for vacuum to clean.
func TestProcessedMessagesAreNeverUpdated(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	claims := newClaims(t)
	ids := append(newIDs(t, 100), dedup.MessageID("orders", []byte("order-4711")))

	pool := newPool(t, address, 3)
	claimAlone(t, pool, claims, dedup.Numbered(1), ids...)
	claimAlone(t, pool, claims, dedup.Numbered(1), ids...)
	holder, waiter, answers := contested(t, pool, claims, pgx.TxOptions{}, newIDs(t, 1)[0])
	require.NoError(t, holder.Commit(t.Context()))
	require.Equal(t, answer{}, <-answers)
	require.NoError(t, waiter.Commit(t.Context()))
	pool.Close() // a connection reports its statistics when it is closed, at the latest

	observer := newPool(t, address, 1)
	const changed = ` FROM pg_stat_user_tables WHERE schemaname = 'effectonce' AND relname LIKE 'processed_messages%'`
	waitUntil(t, observer, `SELECT sum(n_tup_ins) >= $1`+changed, len(ids)+1)
	done := pgtest.Value[[]int](t, observer, `SELECT array[sum(n_tup_ins), sum(n_tup_upd), sum(n_tup_del), sum(n_dead_tup)]::int[]`+changed)
	assert.Equal(t, []int{len(ids) + 1, 0, 0, 0}, done, "rows inserted, updated, deleted, dead")
	assert.Zero(t, pgtest.Count(t, observer, "SELECT count(*) FROM effectonce.processed_messages WHERE xmax <> 0"))
}

// A partition is not read once for each duplicate, although it was empty when its statistics and the plan were made, as
// tomorrow's is.
func TestDuplicatesOfANewPartition(t *testing.T) {
	t.Parallel()
	pool, claims, timed := newPool(t, pgtest.Database(t), 1), newClaims(t), newIDs(t, 1)
	const fill = "INSERT INTO effectonce.processed_messages SELECT (%s || substr(gen_random_uuid()::text, 15))::uuid, 1, 0 FROM generate_series(1, 20000)"
	pgtest.Exec(t, pool, "VACUUM ANALYZE effectonce.processed_messages")
	pgtest.Exec(t, pool, fmt.Sprintf(fill, "substr(effectonce.uuid_floor(now())::text, 1, 14)"))
	for range 8 { // from the sixth time on the plan may be the one for all arguments
		claimAlone(t, pool, claims, dedup.Numbered(1), timed...)
	}
	pgtest.Exec(t, pool, fmt.Sprintf(fill, "'90000000-0000-'"))
	tx, _ := begin(t, pool, pgx.TxOptions{})
	ids := pgtest.Column[uuid.UUID](t, tx, "SELECT message_id FROM effectonce.processed_messages_untimed LIMIT 500")
	_, err := claims.ClaimBatch(t.Context(), tx, dedup.Numbered(1), messages(ids))
	require.NoError(t, err)
	const readSQL = "SELECT seq_tup_read FROM pg_stat_xact_all_tables WHERE relid = 'effectonce.processed_messages_untimed'::regclass"
	require.Less(t, pgtest.Count(t, tx, readSQL), 3*20000, "rows that were read in sequence")
}

// An error that a new transaction cannot resolve is not ErrRetry, and names the operation that
// failed.
func TestOtherErrorsAreNotForRetry(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	pgtest.Exec(t, pool, "ALTER TABLE effectonce.processed_messages RENAME TO gone")
	tx, _ := begin(t, pool, pgx.TxOptions{})
	_, err := claims.Claim(t.Context(), tx, dedup.Numbered(1), newIDs(t, 1)[0], 0)
	require.ErrorContains(t, err, "claim messages: ")
	require.ErrorContains(t, err, "processed_messages")
	require.NotErrorIs(t, err, dedup.ErrRetry)
}

// C23: the same ID with other content is distinguished from a true duplicate, whether the first came
// earlier or in the same batch, whichever form claimed it, and by Claim.
func TestConflictsAreDistinguishedFromDuplicates(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	for name, consumer := range kinds(t, pool, claims) {
		for _, copied := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", copied ", copied), func(t *testing.T) {
				t.Parallel()
				a, b := uuid.New(), uuid.New()
				claimed := func(copied bool, ids []uuid.UUID, contents ...string) (fresh, conflicts []bool) {
					msgs := messages(ids)
					for i, content := range contents {
						msgs[i].Fingerprint = dedup.Fingerprint(nil, []byte(content))
					}
					conn := acquire(t, pool)
					var result *dedup.Result
					var err error
					if copied {
						result, err = claims.BeginFresh(t.Context(), conn, sql(beginSQL), consumer, msgs)
					} else {
						batch := &pgx.Batch{}
						batch.Queue(beginSQL)
						result = claims.Queue(batch, consumer, msgs)
						err = conn.SendBatch(t.Context(), batch).Close()
					}
					require.NoError(t, err)
					require.NoError(t, claims.Compare(t.Context(), conn, consumer, result))
					pgtest.Exec(t, conn, "COMMIT")
					return result.Fresh(), result.Conflicts()
				}
				fresh, conflicts := claimed(copied, []uuid.UUID{b, a, a, a}, "b", "first", "first", "other")
				require.Equal(t, []bool{true, true, false, false}, fresh)
				require.Equal(t, []bool{false, false, false, true}, conflicts)
				fresh, conflicts = claimed(false, []uuid.UUID{a, b, uuid.New(), a}, "other", "b", "other", "first")
				require.Equal(t, []bool{false, false, true, false}, fresh)
				require.Equal(t, []bool{true, false, false, false}, conflicts)

				tx, _ := begin(t, pool, pgx.TxOptions{})
				once, err := claims.Claim(t.Context(), tx, consumer, a, dedup.Fingerprint(nil, []byte("first")))
				require.NoError(t, err)
				require.False(t, once)
				_, err = claims.Claim(t.Context(), tx, consumer, a, dedup.Fingerprint(nil, []byte("other")))
				require.ErrorIs(t, err, dedup.ErrConflict)
				require.True(t, claim(t, claims, tx, consumer, uuid.New()), "the transaction can be used")
			})
		}
	}
}

// Other programs compute fingerprints, too. Nil and empty differ, and so does where the key ends.
func TestFingerprintIsCRC32C(t *testing.T) {
	t.Parallel()
	require.Equal(t, int32(1421357393), dedup.Fingerprint(nil, []byte("x")))
	seen := map[int32]bool{}
	for _, parts := range [][2][]byte{{nil, nil}, {nil, {}}, {{}, nil}, {{}, {}}, {nil, []byte("x")}, {{}, []byte("x")}, {[]byte("a"), []byte("bc")}, {[]byte("ab"), []byte("c")}} {
		seen[dedup.Fingerprint(parts[0], parts[1])] = true
	}
	require.Len(t, seen, 8)
}

// newPool returns a pool of at most that many connections, with settings of the session.
func newPool(t *testing.T, address string, conns int32, settings ...string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	config.MaxConns = conns
	for pair := range slices.Chunk(settings, 2) {
		config.ConnConfig.RuntimeParams[pair[0]] = pair[1]
	}
	return pgtest.PoolOf(t, config)
}

// C4: a claim waits for the transaction that holds it, and for no other; a claim of another ID or
// by another consumer does not wait.
func TestClaimWaitsForItsHolderOnly(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	ids := newIDs(t, 3)
	holder, holderPID := begin(t, pool, pgx.TxOptions{})
	other, _ := begin(t, pool, pgx.TxOptions{})
	waiter, waiterPID := begin(t, pool, pgx.TxOptions{})
	_, err := claims.ClaimBatch(t.Context(), holder, dedup.Numbered(1), messages(ids[:2]))
	require.NoError(t, err)

	pgtest.Exec(t, other, "SET LOCAL lock_timeout = '5s'")
	assert.True(t, claim(t, claims, other, dedup.Numbered(1), ids[2]), "another ID does not wait")
	assert.True(t, claim(t, claims, other, dedup.Numbered(2), ids[0]), "another consumer does not wait")

	answers := claimInBackground(t, claims, waiter, ids[1])
	waitUntilBlocked(t, pool, waiterPID, holderPID)
	require.NoError(t, holder.Rollback(t.Context()))
	assert.Equal(t, answer{fresh: true}, <-answers)
}

// C5: under REPEATABLE READ and SERIALIZABLE, PostgreSQL reports a claim that the snapshot does not
// show yet as a serialization failure, not as a duplicate. It is ErrRetry, and a new transaction
// sees the duplicate.
func TestConflictBeyondTheSnapshotIsForRetry(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, claims := pgtest.Pool(t), newClaims(t)
			opts := pgx.TxOptions{IsoLevel: level}
			ids := newIDs(t, 4)

			// A claim that was committed before the snapshot is an ordinary duplicate.
			claimAlone(t, pool, claims, dedup.Numbered(1), ids[0])
			tx, _ := begin(t, pool, opts)
			assert.False(t, claim(t, claims, tx, dedup.Numbered(1), ids[0]))

			// A claim that was committed after it is not.
			claimAlone(t, pool, claims, dedup.Numbered(1), ids[1])
			_, err := claims.Claim(t.Context(), tx, dedup.Numbered(1), ids[1], 0)
			requireRetry(t, err, "40001")
			require.NoError(t, tx.Rollback(t.Context()))
			assert.Equal(t, []bool{false}, claimIn(t, pool, opts, claims, dedup.Numbered(1), ids[1]))

			// Nor is a claim that was open when this one conflicted with it, and then committed.
			holder, tx, answers := contested(t, pool, claims, opts, ids[2])
			require.NoError(t, holder.Commit(t.Context()))
			requireRetry(t, (<-answers).err, "40001")
			require.NoError(t, tx.Rollback(t.Context()))
			assert.Equal(t, []bool{false}, claimIn(t, pool, opts, claims, dedup.Numbered(1), ids[2]))

			// After a rollback there is nothing to conflict with.
			holder, tx, answers = contested(t, pool, claims, opts, ids[3])
			require.NoError(t, holder.Rollback(t.Context()))
			assert.Equal(t, answer{fresh: true}, <-answers)
			require.NoError(t, tx.Commit(t.Context()))
			assert.Equal(t, []bool{false}, claimIn(t, pool, opts, claims, dedup.Numbered(1), ids[3]))
		})
	}
}

func requireRetry(t *testing.T, err error, code string) {
	t.Helper()
	require.ErrorIs(t, err, dedup.ErrRetry)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, code, pgErr.Code)
}

// A lock timeout is ErrRetry: a new transaction may get the claim.
func TestLockTimeoutIsForRetry(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	id := newIDs(t, 1)[0]
	holder, _ := begin(t, pool, pgx.TxOptions{})
	claim(t, claims, holder, dedup.Numbered(1), id)

	tx, _ := begin(t, pool, pgx.TxOptions{})
	pgtest.Exec(t, tx, "SET LOCAL lock_timeout = '1ms'")
	_, err := claims.Claim(t.Context(), tx, dedup.Numbered(1), id, 0)
	requireRetry(t, err, "55P03")
	require.NoError(t, holder.Rollback(t.Context()))
	require.NoError(t, tx.Rollback(t.Context()))
	assert.Equal(t, []bool{true}, claimAlone(t, pool, claims, dedup.Numbered(1), id))
}

// beforeSQL calls a function once, before the first statement with a text is sent.
func beforeSQL(text string, call func()) pgtest.Statements {
	var once sync.Once
	return func(sql string) {
		if strings.Contains(sql, text) {
			once.Do(call)
		}
	}
}

// Property: a claim that is made in an old day between the look that found the day empty and the
// lock on the table keeps its day. C29.
func TestClaimBeforeTheLockKeepsItsDay(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer := registered(t, pool, claims, dedup.Registration{Name: "c", Group: "g", Window: time.Minute})
	late := idAt(time.Now().AddDate(0, 0, -3))
	config := pool.Config()
	config.ConnConfig.Tracer = beforeSQL("LOCK TABLE ONLY", func() {
		require.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, late))
	})
	traced := pgtest.PoolOf(t, config)
	day := "processed_messages_" + time.Now().UTC().AddDate(0, 0, -3).Format("20060102")
	require.Zero(t, pgtest.Count(t, pool, partitionOfSQL, late, "past"))

	report := maintain(t, traced, claims)
	require.NotEmpty(t, report.Dropped, "older days are dropped")
	require.NotContains(t, report.Dropped, day)
	require.Equal(t, []bool{false}, claimAlone(t, pool, claims, consumer, late), "the claim is there")
}
