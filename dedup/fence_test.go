package dedup_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

func newFences(tb testing.TB, cfg dedup.FenceConfig) *dedup.Fences {
	tb.Helper()
	fences, err := dedup.NewFences(cfg)
	require.NoError(tb, err)
	return fences
}

// fenceAlone fences in its own transaction, which commits unless there is an error.
func fenceAlone(t *testing.T, pool *pgxpool.Pool, fences *dedup.Fences, versions ...dedup.Version) (results []dedup.Fenced, err error) {
	t.Helper()
	err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		results, err = fences.FenceBatch(t.Context(), tx, "orders", versions)
		return err
	})
	return results, err
}

func storedVersion(t *testing.T, pool *pgxpool.Pool, resource string) (version int64) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT version FROM effectonce.fences WHERE scope = 'orders' AND resource = $1`, resource).Scan(&version))
	return version
}

// C47: eight writers apply random versions of a few resources at once, in batches that contain them
// several times. Per resource, the applied versions only grow, in the order of the commits, each is
// applied once, and the last one is the greatest that was given.
func TestVersionsNeverRegress(t *testing.T) {
	t.Parallel()
	pool, fences := newPool(t, pgtest.Database(t), 8), newFences(t, dedup.FenceConfig{})
	_, err := pool.Exec(t.Context(), `CREATE TABLE applied (n bigint GENERATED ALWAYS AS IDENTITY, resource text, version bigint)`)
	require.NoError(t, err)
	var mu sync.Mutex
	given := map[string]int64{}
	failures := make(chan error, 8)
	for range cap(failures) {
		go func() {
			var err error
			for i := 0; i < 60 && err == nil; i++ {
				versions := make([]dedup.Version, 1+rand.IntN(6))
				for k := range versions {
					versions[k] = dedup.Version{Resource: fmt.Sprint("order-", rand.IntN(4)), Version: rand.Int64N(400)}
				}
				mu.Lock()
				for _, v := range versions {
					given[v.Resource] = max(given[v.Resource], v.Version)
				}
				mu.Unlock()
				err = applyVersions(t.Context(), pool, fences, versions)
			}
			failures <- err
		}()
	}
	for range cap(failures) {
		require.NoError(t, <-failures)
	}

	rows, err := pool.Query(t.Context(), `SELECT resource, version FROM applied ORDER BY n`)
	require.NoError(t, err)
	last := map[string]int64{}
	var resource string
	var version int64
	_, err = pgx.ForEachRow(rows, []any{&resource, &version}, func() error {
		if before, ok := last[resource]; ok && version <= before {
			return fmt.Errorf("version %d of %s was applied after %d", version, resource, before)
		}
		last[resource] = version
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, given, last)
	for name, newest := range given {
		require.Equal(t, newest, storedVersion(t, pool, name))
	}
}

// applyVersions has an effect for each version that is applied, in the same transaction.
func applyVersions(ctx context.Context, pool *pgxpool.Pool, fences *dedup.Fences, versions []dedup.Version) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		results, err := fences.FenceBatch(ctx, tx, "orders", versions)
		for i, result := range results {
			if result.Verdict == dedup.Applied && err == nil {
				_, err = tx.Exec(ctx, `INSERT INTO applied (resource, version) VALUES ($1, $2)`, versions[i].Resource, versions[i].Version)
			}
		}
		return err
	})
}

// A batch gives the same results and leaves the same rows as consecutive calls, also if a resource
// occurs several times, with stale and equal versions, other contents and gaps.
func TestBatchIsOneCallAfterTheOther(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgtest.Database(t), 2)
	contents := [][]byte{nil, []byte("a"), []byte("b"), {}}
	for _, cfg := range []dedup.FenceConfig{{}, {RefuseStale: true}, {RefuseGaps: true}, {RefuseGaps: true, RefuseStale: true, InitialVersion: -1}} {
		fences := newFences(t, cfg)
		random := rand.New(rand.NewPCG(47, 48))
		refused := 0
		for round := range 150 {
			versions := make([]dedup.Version, 1+random.IntN(8))
			for i := range versions {
				versions[i] = dedup.Version{Resource: fmt.Sprint(random.IntN(3)), Version: random.Int64N(5), Content: contents[random.IntN(len(contents))]}
			}
			tx, _ := begin(t, pool, pgx.TxOptions{})
			before := versions[:random.IntN(len(versions)+1)]
			for _, scope := range []string{"alone", "batch"} {
				for _, v := range before {
					_, _ = fences.Fence(t.Context(), tx, scope, v.Resource, v.Version, v.Content)
				}
			}
			var want []dedup.Fenced
			var problems []error
			for _, v := range versions {
				result, err := fences.Fence(t.Context(), tx, "alone", v.Resource, v.Version, v.Content)
				want, problems = append(want, result), append(problems, err)
			}
			got, err := fences.FenceBatch(t.Context(), tx, "batch", versions)
			if errors.Join(problems...) != nil {
				refused++
				require.EqualError(t, err, strings.ReplaceAll(errors.Join(problems...).Error(), "fence alone", "fence batch"), "%+v round %d: %v", cfg, round, versions)
			} else {
				require.NoError(t, err)
				require.Equal(t, want, got, "%+v round %d: %v after %v", cfg, round, versions, before)
				var differ int
				require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM (SELECT resource, version, content FROM effectonce.fences WHERE scope = 'alone') a
					FULL JOIN (SELECT resource, version, content FROM effectonce.fences WHERE scope = 'batch') b USING (resource)
					WHERE (a.version, a.content) IS DISTINCT FROM (b.version, b.content)`).Scan(&differ))
				require.Zero(t, differ, "%+v round %d: %v after %v", cfg, round, versions, before)
			}
			require.NoError(t, tx.Rollback(t.Context()))
		}
		require.Positive(t, refused, "contents conflict sometimes")
	}
}

// A newer version is applied, an older one is a result and counted, and the stored version is
// returned.
func TestStaleVersionsAreDroppedAndCounted(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	counted := map[string]int{}
	fences := newFences(t, dedup.FenceConfig{Stale: func(scope string, versions int) { counted[scope] += versions }})
	for _, step := range []struct {
		version int64
		want    dedup.Fenced
	}{
		{7, dedup.Fenced{Verdict: dedup.Applied, Stored: 7}},
		{6, dedup.Fenced{Verdict: dedup.Stale, Stored: 7}},
		{7, dedup.Fenced{Verdict: dedup.Equal, Stored: 7}},
		{math.MaxInt64, dedup.Fenced{Verdict: dedup.Applied, Stored: math.MaxInt64}},
		{0, dedup.Fenced{Verdict: dedup.Stale, Stored: math.MaxInt64}},
	} {
		results, err := fenceAlone(t, pool, fences, dedup.Version{Resource: "order-1", Version: step.version})
		require.NoError(t, err)
		require.Equal(t, []dedup.Fenced{step.want}, results, "version %d", step.version)
	}
	assert.Equal(t, map[string]int{"orders": 2}, counted)

	// Scopes do not see each other; nor do resources.
	tx, _ := begin(t, pool, pgx.TxOptions{})
	for _, other := range [][2]string{{"orders", "order-2"}, {"refunds", "order-1"}} {
		result, err := dedup.Fence(t.Context(), tx, other[0], other[1], 0, nil)
		require.NoError(t, err)
		assert.Equal(t, dedup.Fenced{Verdict: dedup.Applied}, result)
	}
	results, err := dedup.FenceBatch(t.Context(), tx, "orders", nil)
	require.NoError(t, err)
	assert.Empty(t, results)
}

// With RefuseGaps, a version that does not follow is refused and not stored, and is applied once
// the missing one has been. The first one is at most InitialVersion+1.
func TestGapsAreRefusedUntilTheyClose(t *testing.T) {
	t.Parallel()
	pool, fences := pgtest.Pool(t), newFences(t, dedup.FenceConfig{RefuseGaps: true})
	tx, _ := begin(t, pool, pgx.TxOptions{})
	for _, step := range []struct {
		version int64
		refused string
	}{
		{2, "given version 2, stored none"},
		{1, ""},
		{3, "given version 3, stored version 1"},
		{2, ""},
		{3, ""},
		{1, ""}, // stale
		{5, "given version 5, stored version 3"},
		{math.MaxInt64, "stored version 3"},
	} {
		_, err := fences.Fence(t.Context(), tx, "orders", "order-1", step.version, nil)
		if step.refused == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorIs(t, err, dedup.ErrGap)
		require.ErrorContains(t, err, step.refused)
	}
	results, err := fences.FenceBatch(t.Context(), tx, "orders", []dedup.Version{{"order-1", 4, nil}, {"order-1", 5, nil}, {"order-2", 0, nil}, {"order-2", 1, nil}})
	require.NoError(t, err)
	for _, result := range results {
		require.Equal(t, dedup.Applied, result.Verdict)
	}
	_, err = newFences(t, dedup.FenceConfig{RefuseGaps: true, InitialVersion: -1}).Fence(t.Context(), tx, "orders", "order-3", 1, nil)
	require.ErrorIs(t, err, dedup.ErrGap)
}

// An older version is an error with RefuseStale: it has everything that a person needs, and the
// transaction stays usable.
func TestRefusalSaysWhatIsStored(t *testing.T) {
	t.Parallel()
	pool, fences := pgtest.Pool(t), newFences(t, dedup.FenceConfig{RefuseStale: true})
	tx, _ := begin(t, pool, pgx.TxOptions{})
	_, err := fences.Fence(t.Context(), tx, "orders", "order-1", 7, nil)
	require.NoError(t, err)
	_, err = fences.Fence(t.Context(), tx, "orders", "order-1", 5, nil)
	require.ErrorIs(t, err, dedup.ErrStale)
	require.EqualError(t, err, `fence orders, resource "order-1": version is stale: given version 5, stored version 7`)
	var refused *dedup.VersionError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, dedup.VersionError{"orders", "order-1", 5, 7, true, dedup.ErrStale}, *refused)
	result, err := fences.Fence(t.Context(), tx, "orders", "order-1", 7, nil)
	require.NoError(t, err)
	assert.Equal(t, dedup.Equal, result.Verdict)
	require.NoError(t, tx.Commit(t.Context()))
	assert.EqualValues(t, 7, storedVersion(t, pool, "order-1"))
}

// C48: two states with the same version are reported, also within one batch. The same state twice
// is a duplicate, and a version without content is not compared.
func TestEqualVersionOfOtherContentIsAConflict(t *testing.T) {
	t.Parallel()
	pool, fences := pgtest.Pool(t), newFences(t, dedup.FenceConfig{})
	version := func(n int64, content []byte) dedup.Version { return dedup.Version{"order-1", n, content} }
	_, err := fenceAlone(t, pool, fences, version(1, []byte("paid")))
	require.NoError(t, err)
	for _, same := range [][]byte{[]byte("paid"), nil} {
		results, err := fenceAlone(t, pool, fences, version(1, same))
		require.NoError(t, err)
		require.Equal(t, []dedup.Fenced{{dedup.Equal, 1}}, results)
	}
	for _, versions := range [][]dedup.Version{
		{version(1, []byte("cancelled"))},
		{version(1, []byte{})},
		{version(2, []byte("sent")), version(2, []byte("lost"))},
		{version(2, []byte("sent")), version(3, []byte("done")), version(3, []byte("lost"))},
	} {
		_, err = fenceAlone(t, pool, fences, versions...)
		require.ErrorIs(t, err, dedup.ErrFenceConflict)
		require.ErrorContains(t, err, "other content")
	}
	_, err = fenceAlone(t, pool, fences, version(2, nil))
	require.NoError(t, err)
	_, err = fenceAlone(t, pool, fences, version(2, []byte("sent")))
	require.NoError(t, err, "nothing to compare with")
}

// A version waits for the open transaction that holds its resource, or inserts it, and is then
// compared with the result of that transaction.
func TestVersionWaitsForTheOpenOne(t *testing.T) {
	t.Parallel()
	pool, fences := pgtest.Pool(t), newFences(t, dedup.FenceConfig{})
	for i, tc := range []struct {
		commit bool
		want   dedup.Fenced
	}{
		{true, dedup.Fenced{Verdict: dedup.Stale, Stored: 7}},
		{false, dedup.Fenced{Verdict: dedup.Applied, Stored: 5}},
	} {
		resource := fmt.Sprint("order-", i)
		holder, holderPID := begin(t, pool, pgx.TxOptions{})
		_, err := fences.Fence(t.Context(), holder, "orders", resource, 7, nil)
		require.NoError(t, err)
		waiter, pid := begin(t, pool, pgx.TxOptions{})
		results := make(chan dedup.Fenced, 1)
		go func() {
			result, err := fences.Fence(t.Context(), waiter, "orders", resource, 5, nil)
			assert.NoError(t, err)
			results <- result
		}()
		waitUntilBlocked(t, pool, pid, holderPID)
		if tc.commit {
			require.NoError(t, holder.Commit(t.Context()))
		} else {
			require.NoError(t, holder.Rollback(t.Context()))
		}
		require.Equal(t, tc.want, <-results)
		require.NoError(t, waiter.Commit(t.Context()))
	}
}

// C7: two batches that name the same resources in opposite orders do not deadlock.
func TestFenceBatchesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool, fences := newPool(t, pgtest.Database(t), 2, "deadlock_timeout", "20ms"), newFences(t, dedup.FenceConfig{})
	versions := make([]dedup.Version, 500)
	for round := range 10 {
		for i := range versions {
			versions[i] = dedup.Version{Resource: fmt.Sprint("order-", i), Version: int64(round)}
		}
		reversed := slices.Clone(versions)
		slices.Reverse(reversed)
		start, failures := make(chan struct{}), make(chan error, 2)
		for _, batch := range [][]dedup.Version{versions, reversed} {
			tx, _ := begin(t, pool, pgx.TxOptions{})
			go func() {
				<-start
				_, err := fences.FenceBatch(t.Context(), tx, "orders", batch)
				if err == nil {
					err = tx.Commit(t.Context())
				} else {
					_ = tx.Rollback(t.Context())
				}
				failures <- err
			}()
		}
		close(start)
		require.NoError(t, errors.Join(<-failures, <-failures))
	}
}

// C5: under REPEATABLE READ and SERIALIZABLE a version that was stored after the snapshot is
// ErrRetry, and in the next transaction the result is stale.
func TestFenceBeyondTheSnapshotIsForRetry(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, fences := pgtest.Pool(t), newFences(t, dedup.FenceConfig{})
			for round, resource := range []string{"order-1", "order-1", "order-2"} { // inserted, updated, inserted
				tx, _ := begin(t, pool, pgx.TxOptions{IsoLevel: level})
				_, err := tx.Exec(t.Context(), "SELECT FROM effectonce.fences")
				require.NoError(t, err)
				_, err = fenceAlone(t, pool, fences, dedup.Version{Resource: resource, Version: int64(10 + round)})
				require.NoError(t, err)
				_, err = fences.Fence(t.Context(), tx, "orders", resource, 5, nil)
				requireRetry(t, err, "40001")
				require.NoError(t, tx.Rollback(t.Context()))
				results, err := fenceAlone(t, pool, fences, dedup.Version{Resource: resource, Version: 5})
				require.NoError(t, err)
				require.Equal(t, []dedup.Fenced{{dedup.Stale, int64(10 + round)}}, results)
			}
		})
	}
}

// C25: what the server would refuse is refused before, all problems at once, and the transaction
// stays usable.
func TestBadVersionsNeverReachTheServer(t *testing.T) {
	t.Parallel()
	pool, fences := pgtest.Pool(t), newFences(t, dedup.FenceConfig{})
	tx, _ := begin(t, pool, pgx.TxOptions{})
	_, err := fences.FenceBatch(t.Context(), tx, "a\x00b", []dedup.Version{{"", 1, nil}, {"\xff", 1, nil}, {strings.Repeat("x", 1025), 1, nil}, {"order-1", -1, nil}})
	require.ErrorIs(t, err, dedup.ErrFenceInvalid)
	require.Equal(t, 5, strings.Count(err.Error(), dedup.ErrFenceInvalid.Error()), "%v", err)
	_, err = fences.Fence(t.Context(), tx, strings.Repeat("x", 256), "order-1", 1, nil)
	require.ErrorIs(t, err, dedup.ErrFenceInvalid)
	_, err = fences.Fence(t.Context(), tx, strings.Repeat("x", 255), strings.Repeat("ü", 512), 1, nil)
	require.NoError(t, err, "the bounds of the table")

	_, err = dedup.NewFences(dedup.FenceConfig{Schema: "No Schema", InitialVersion: -2})
	for _, part := range []string{"schema ", "InitialVersion -2: want -1", "unless RefuseGaps"} {
		require.ErrorContains(t, err, part)
	}
}

// S8: everything happens in the configured schema, whatever the search path offers instead.
func TestFencesUseTheConfiguredSchema(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	conn, err := pgx.Connect(t.Context(), address)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) }()
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{Schema: "tenant_7"}))
	_, err = conn.Exec(t.Context(), `CREATE SCHEMA evil; CREATE TABLE evil.fences (LIKE tenant_7.fences);
		CREATE FUNCTION evil.unnest(text[]) RETURNS SETOF text LANGUAGE sql AS $$ SELECT ''::text WHERE false $$;
		CREATE FUNCTION evil.unnest(bigint[]) RETURNS SETOF bigint LANGUAGE sql AS $$ SELECT 0::bigint WHERE false $$`)
	require.NoError(t, err)
	pool := newPool(t, address, 1, "search_path", "evil, public")
	for _, cfg := range []dedup.FenceConfig{{Schema: "tenant_7"}, {Schema: "tenant_7", RefuseGaps: true}} {
		fences := newFences(t, cfg)
		versions := []dedup.Version{{"order-1", 1, nil}, {"order-1", 2, nil}}
		if cfg.RefuseGaps {
			versions = []dedup.Version{{"order-1", 3, nil}, {"order-1", 4, nil}}
		}
		results, err := fenceAlone(t, pool, fences, versions...)
		require.NoError(t, err)
		require.Equal(t, []dedup.Fenced{{dedup.Applied, versions[0].Version}, {dedup.Applied, versions[1].Version}}, results)
	}
	var version int64
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT version FROM tenant_7.fences`).Scan(&version))
	assert.EqualValues(t, 4, version)
}

// A batch touches the rows of its resources and no others, through the primary key, whatever the
// planner knows about the table.
func TestFencesAreFoundByIndex(t *testing.T) {
	t.Parallel()
	pool := newPool(t, pgtest.Database(t), 1)
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.fences (scope, resource, version) SELECT 'orders', 'order-' || n, n FROM generate_series(1, 30000) n`)
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), `VACUUM ANALYZE effectonce.fences`)
			require.NoError(t, err)
		}
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			_, err := pool.Exec(t.Context(), "SET plan_cache_mode = "+mode)
			require.NoError(t, err)
			names, numbers, hashes := []string{}, []int64{}, []*[16]byte{}
			for i := range 100 {
				names, numbers, hashes = append(names, fmt.Sprint("order-", i*200)), append(numbers, int64(i)), append(hashes, nil)
			}
			for _, args := range [][]any{
				{dedup.FenceNextSQL, "orders", names, numbers, hashes, int64(-1)},
				{dedup.ReadFencesSQL, "orders", names},
			} {
				rows, err := pool.Query(t.Context(), "EXPLAIN (COSTS OFF) "+args[0].(string), args[1:]...)
				require.NoError(t, err)
				lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err)
				plan := strings.Join(lines, "\n")
				require.Contains(t, plan, "fences_pkey", mode)
				require.NotContains(t, plan, "Seq Scan", mode)
				require.NotContains(t, plan, "hashed SubPlan", mode)
			}
		}
	}
}
