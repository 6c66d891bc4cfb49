package dedup_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// C6: replicas of one application start at once and all get the same number, also those that find a
// row which another transaction inserted concurrently (insert-or-select would see none); another
// name gets another one.
func TestReplicasRegisterAsOneConsumer(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	type outcome struct {
		consumer dedup.Consumer
		err      error
	}
	results := make(chan outcome, 32)
	for range cap(results) {
		go func() {
			consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "billing/orders", Group: "billing", Topics: []string{"orders"}})
			results <- outcome{consumer, err}
		}()
	}
	first := <-results
	require.NoError(t, first.err)
	for range cap(results) - 1 {
		require.Equal(t, first, <-results)
	}

	other := registered(t, pool, claims, dedup.Registration{Name: "billing/refunds", Group: "billing", Topics: []string{"refunds"}})
	assert.NotEqual(t, first.consumer, other)
	assert.Equal(t, 2, pgtest.Count(t, pool, "SELECT count(*) FROM effectonce.consumers"))
}

// C27: a name that belongs to another group is refused, with both groups in the text, and its owner
// does not change: two applications under one name would drop each other's messages.
func TestNameOfAnotherGroupIsRefused(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	owner := registered(t, pool, claims, dedup.Registration{Name: "orders", Group: "billing", Topics: []string{"orders"}})

	_, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "orders", Group: "mailing", Topics: []string{"mails"}})
	require.ErrorIs(t, err, dedup.ErrNameTaken)
	require.ErrorContains(t, err, `"orders" belongs to group "billing", not to "mailing"`)
	require.ErrorContains(t, err, "choose another consumer name")

	const ownerSQL = "SELECT consumer_group || topics FROM effectonce.consumers"
	assert.Equal(t, []string{"billing", "orders"}, pgtest.Value[[]string](t, pool, ownerSQL))
	again := registered(t, pool, claims, dedup.Registration{Name: "orders", Group: "billing", Topics: []string{"orders", "refunds"}})
	assert.Equal(t, owner, again)
	assert.Equal(t, []string{"billing", "orders", "refunds"}, pgtest.Value[[]string](t, pool, ownerSQL), "its owner may change the topics")
}

// Names have bounds, which the database enforces and the error states.
func TestConsumerNamesHaveBounds(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	longest := strings.Repeat("ü", 300) // 600 bytes
	registered(t, pool, claims, dedup.Registration{Name: longest, Group: strings.Repeat("g", 255), Topics: []string{"orders"}})

	for _, tc := range []struct {
		name string
		r    dedup.Registration
		says string
	}{
		{"no name", dedup.Registration{Group: "billing"}, "Name of 0 bytes"},
		{"name of 601 bytes", dedup.Registration{Name: longest + "x", Group: "billing"}, "Name of 601 bytes"},
		{"no group", dedup.Registration{Name: "billing"}, "Group of 0 bytes"},
		{"group of 256 bytes", dedup.Registration{Name: "billing", Group: strings.Repeat("g", 256)}, "Group of 256 bytes"},
		{"name with NUL", dedup.Registration{Name: "a\x00b", Group: "billing"}, "without NUL"},
		{"short window", dedup.Registration{Name: "a", Group: "a", Window: time.Second}, "Window 1s: want 1m0s to"},
		{"window and forever", dedup.Registration{Name: "a", Group: "a", Window: time.Hour, Forever: true}, "none together with Forever"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := claims.Register(t.Context(), pool, tc.r)
			require.ErrorContains(t, err, "register consumer")
			require.ErrorContains(t, err, tc.says)
		})
	}
}

// A window may change, but whether a consumer forgets may not: its claims are in one table or the
// other. C29.
func TestForeverIsDecidedOnce(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	window := func(name string) *float64 {
		return pgtest.Value[*float64](t, pool, "SELECT extract(epoch FROM dedup_window)::float8 FROM effectonce.consumers WHERE name = $1", name)
	}
	r := dedup.Registration{Name: "billing", Group: "billing"}
	registered(t, pool, claims, r)
	require.InDelta(t, 7*24*3600, *window("billing"), 0)
	r.Window = time.Hour
	registered(t, pool, claims, r)
	require.InDelta(t, 3600, *window("billing"), 0)
	r.Window, r.Forever = 0, true
	_, err := claims.Register(t.Context(), pool, r)
	require.ErrorIs(t, err, dedup.ErrForeverDecided)
	require.InDelta(t, 3600, *window("billing"), 0)

	ledger := dedup.Registration{Name: "ledger", Group: "ledger", Forever: true}
	consumer := registered(t, pool, claims, ledger)
	require.Nil(t, window("ledger"))
	id := uuid.New()
	require.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, id))
	require.Equal(t, []bool{false}, claimAlone(t, pool, claims, consumer, id))
	require.Equal(t, 1, pgtest.Count(t, pool, "SELECT count(*) FROM effectonce.processed_forever"))
	ledger.Forever = false
	_, err = claims.Register(t.Context(), pool, ledger)
	require.ErrorIs(t, err, dedup.ErrForeverDecided)
}

// The claim is one statement and must stay one: a SELECT followed by an INSERT would be a race.
func TestClaimIsOneStatement(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	config := pool.Config().ConnConfig
	var statements []string
	config.Tracer = pgtest.Statements(func(sql string) { statements = append(statements, sql) })
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	statements = nil
	_, err = newClaims(t).ClaimBatch(t.Context(), tx, dedup.Numbered(1), messages(newIDs(t, 1000)))
	require.NoError(t, err)
	assert.Contains(t, statements[0], "-- dedup.claim\n")
	for _, other := range statements[1:] { // which read the mark
		assert.NotContains(t, other, "processed_")
	}
	require.NoError(t, tx.Rollback(t.Context()))
}

// S8: everything happens in the configured schema, whatever the search path offers instead; there is
// no other schema of this library in this database.
func TestConfiguredSchemaIsUsed(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	conn := pgtest.Connect(t, address)
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{Schema: "tenant_7"}))
	_, err := conn.Exec(t.Context(), `CREATE SCHEMA evil; CREATE TABLE evil.fences (LIKE tenant_7.fences); CREATE TABLE evil.processed_messages (LIKE tenant_7.processed_messages)`)
	require.NoError(t, err)
	pool := newPool(t, address, 2, "search_path", "evil, public")

	claims, err := dedup.New(dedup.Config{Schema: "tenant_7"})
	require.NoError(t, err)
	consumer := registered(t, pool, claims, dedup.Registration{Name: "billing/orders", Group: "billing", Topics: []string{"orders"}})
	id := newIDs(t, 1)[0]
	assert.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, id))
	assert.Equal(t, []bool{false}, claimAlone(t, pool, claims, consumer, id))
	for _, version := range []int64{3, 4} {
		require.True(t, fenceAlone(t, pool, claims, "order-1", version))
	}
	assert.Equal(t, []int{1, 4}, pgtest.Value[[]int](t, conn, `SELECT array[count(*), (SELECT version FROM tenant_7.fences)] FROM tenant_7.processed_messages`))
}
