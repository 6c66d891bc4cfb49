package keyclient_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func newPending(t *testing.T, pool *pgxpool.Pool, cfg keyclient.PendingConfig) *keyclient.Pending {
	t.Helper()
	cfg.Client = "shop"
	pending, err := keyclient.NewPending(pool, cfg)
	require.NoError(t, err)
	return pending
}

func isPending(t *testing.T, pending *keyclient.Pending) []string {
	t.Helper()
	list, err := pending.List(t.Context(), "", 100)
	require.NoError(t, err)
	names := []string{}
	for _, r := range list {
		names = append(names, r.Request)
	}
	return names
}

// Property: a request gets no key when servers may have forgotten it, and is listed as too old.
func TestPendingRequestGetsTooOld(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{AgeMax: time.Hour})
	for _, test := range []struct {
		age     string
		refused bool
	}{{"59 minutes", false}, {"61 minutes", true}} {
		_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.pending_requests (client, request, key, created_at)
			VALUES ('shop', 'charge', 'old', clock_timestamp() - $1::text::interval) ON CONFLICT (client, request) DO UPDATE SET created_at = excluded.created_at`, test.age)
		require.NoError(t, err)
		key, err := pending.Begin(t.Context(), "charge", "fresh")
		require.Equal(t, test.refused, key == "")
		require.Equal(t, test.refused, errors.Is(err, keyclient.ErrPendingTooOld), "%v", err)
		list, err := pending.List(t.Context(), "", 1)
		require.NoError(t, err)
		require.Equal(t, test.refused, list[0].TooOld)
	}
	forget := func(key string) error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return pending.Forget(t.Context(), tx, "charge", key) })
	}
	require.NoError(t, forget("another"))
	require.Len(t, isPending(t, pending), 1)
	require.NoError(t, forget("old"))
	require.Empty(t, isPending(t, pending))
}

// Property: settings of a Pending are checked all at once; what is listed comes in pages.
func TestPendingSettingsAndPages(t *testing.T) {
	t.Parallel()
	_, err := keyclient.NewPending(nil, keyclient.PendingConfig{Schema: "no-schema!", AgeMax: time.Second})
	for _, want := range []string{"pool is nil", "Client of 0 bytes: want 1 to 255", "AgeMax 1s: want 1m0s"} {
		require.ErrorContains(t, err, want)
	}
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	for _, name := range []string{"c", "a", "b"} {
		_, err := pending.Begin(t.Context(), name, "key-"+name)
		require.NoError(t, err)
	}
	page, err := pending.List(t.Context(), "a", 1)
	require.NoError(t, err)
	require.Len(t, page, 1)
	require.Equal(t, "b", page[0].Request)
	require.Equal(t, "key-b", page[0].Key)
}

// Property: a key is committed before Begin returns, with synchronous_commit whatever the role's
// default is, and stays until the transaction that stores the answer forgets it.
func TestKeyIsPendingUntilTheAnswerIsWrittenDown(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, `
		CREATE TABLE commits (how text NOT NULL);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.commits VALUES (current_setting(''synchronous_commit'')); RETURN NEW; END';
		CREATE TRIGGER note AFTER INSERT ON effectonce.pending_requests FOR EACH ROW EXECUTE FUNCTION note()`)
	lazy := pool.Config()
	lazy.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	pending := newPending(t, pgtest.PoolOf(t, lazy), keyclient.PendingConfig{})
	sent, err := pending.Begin(t.Context(), "charge", "k")
	require.NoError(t, err)
	require.Equal(t, "k", sent)
	require.Equal(t, []string{"charge"}, isPending(t, pending))
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM commits WHERE how = 'on'`))

	forget := func(err error) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			return errors.Join(pending.Forget(t.Context(), tx, "charge", sent), err)
		}
	}
	require.Error(t, pgx.BeginFunc(t.Context(), pool, forget(errors.New("not written down"))))
	require.Len(t, isPending(t, pending), 1)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, forget(nil)))
	require.Empty(t, isPending(t, pending))
}

// Property: concurrent requests with one name use one key: the insert decides; the same name of two
// clients is two requests.
func TestOneNameIsOneKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	pending := newPending(t, pool, keyclient.PendingConfig{})
	var group sync.WaitGroup
	var mu sync.Mutex
	keys := map[string]int{}
	for range 20 {
		group.Go(func() {
			key, err := pending.Begin(t.Context(), "charge", idempotency.NewKey())
			assert.NoError(t, err) //nolint:testifylint // not in the goroutine of the test
			mu.Lock()
			defer mu.Unlock()
			keys[key]++
		})
	}
	group.Wait()
	require.Len(t, keys, 1)
	other, err := keyclient.NewPending(pool, keyclient.PendingConfig{Client: "another shop"})
	require.NoError(t, err)
	key, err := other.Begin(t.Context(), "charge", "fresh")
	require.NoError(t, err)
	require.Equal(t, "fresh", key)
}

// Property: a name that cannot be stored, and a database that cannot be reached, give no key; a
// pending key is returned in place of another one.
func TestNoKeyThatIsNotDurable(t *testing.T) {
	t.Parallel()
	pending := newPending(t, pgtest.Pool(t), keyclient.PendingConfig{})
	for _, second := range []string{"first", "second"} {
		key, err := pending.Begin(t.Context(), "charge", second)
		require.NoError(t, err)
		require.Equal(t, "first", key)
	}
	for name, on := range map[string]*keyclient.Pending{"a\nb": pending, "other": newPending(t, pgtest.NoPool(t), keyclient.PendingConfig{})} {
		key, err := on.Begin(t.Context(), name, "second")
		require.Error(t, err)
		require.Empty(t, key)
	}
}
