package dedup_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// C6: replicas of one application start at once and all get the same number, also those that find a row which
// another transaction inserted meanwhile (insert-or-select would see none); another name gets another one.
func TestReplicasRegisterAsOneConsumer(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	type registered struct {
		consumer dedup.Consumer
		err      error
	}
	results := make(chan registered, 32)
	for range cap(results) {
		go func() {
			consumer, err := claims.Register(t.Context(), pool, "billing/orders", "billing", []string{"orders"})
			results <- registered{consumer, err}
		}()
	}
	first := <-results
	require.NoError(t, first.err)
	for range cap(results) - 1 {
		require.Equal(t, first, <-results)
	}

	other, err := claims.Register(t.Context(), pool, "billing/refunds", "billing", []string{"refunds"})
	require.NoError(t, err)
	assert.NotEqual(t, first.consumer, other)
	var rows int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.consumers").Scan(&rows))
	assert.Equal(t, 2, rows)
}

// C27: a name that belongs to another group is refused, with both groups in the text, and stays with its
// owner as it was: two applications under one name would drop each other's messages.
func TestNameOfAnotherGroupIsRefused(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	owner, err := claims.Register(t.Context(), pool, "orders", "billing", []string{"orders"})
	require.NoError(t, err)

	_, err = claims.Register(t.Context(), pool, "orders", "mailing", []string{"mails"})
	require.ErrorIs(t, err, dedup.ErrNameTaken)
	require.ErrorContains(t, err, `"orders" belongs to group "billing", not to "mailing"`)
	require.ErrorContains(t, err, "choose another consumer name")

	var group string
	var topics []string
	err = pool.QueryRow(t.Context(), "SELECT consumer_group, topics FROM effectonce.consumers").Scan(&group, &topics)
	require.NoError(t, err)
	assert.Equal(t, "billing", group)
	assert.Equal(t, []string{"orders"}, topics)
	again, err := claims.Register(t.Context(), pool, "orders", "billing", []string{"orders", "refunds"})
	require.NoError(t, err)
	assert.Equal(t, owner, again)
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT topics FROM effectonce.consumers").Scan(&topics))
	assert.Equal(t, []string{"orders", "refunds"}, topics, "its owner may change the topics")
}

// A consumer without topics is one: the package knows no Kafka.
func TestConsumerNeedsNoTopics(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer, err := claims.Register(t.Context(), pool, "webhooks", "webhooks", nil)
	require.NoError(t, err)
	assert.NotZero(t, consumer)
}

// Names have bounds, which the database keeps and the error names.
func TestConsumerNamesHaveBounds(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	longest := strings.Repeat("ü", 300) // 600 bytes
	_, err := claims.Register(t.Context(), pool, longest, strings.Repeat("g", 255), []string{"orders"})
	require.NoError(t, err)

	for _, tc := range []struct{ name, consumer, group, constraint string }{
		{"no name", "", "billing", "consumers_name_check"},
		{"name of 601 bytes", longest + "x", "billing", "consumers_name_check"},
		{"no group", "billing", "", "consumers_consumer_group_check"},
		{"group of 256 bytes", "billing", strings.Repeat("g", 256), "consumers_consumer_group_check"},
		{"name with NUL", "a\x00b", "billing", "22021"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := claims.Register(t.Context(), pool, tc.consumer, tc.group, []string{"orders"})
			require.ErrorContains(t, err, "register consumer")
			require.ErrorContains(t, err, tc.constraint)
		})
	}
}
