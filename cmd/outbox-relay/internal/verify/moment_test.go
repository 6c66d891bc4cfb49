package verify_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/verify"
)

// meanwhile does something right before and right after progress is read.
type meanwhile struct {
	*pgxpool.Pool
	happen func()
}

func (m meanwhile) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	switch {
	case strings.HasPrefix(sql, "-- inspect.cut"), strings.HasPrefix(sql, "-- verify.rows"):
		m.happen()
	}
	return m.Pool.Query(ctx, sql, args...)
}

// Property: progress is read before the end of any topic: what is published at the last moment
// before it is found, and what is published after it is no fault either.
func TestProgressIsReadFirst(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.drain()
	happened := 0
	db := meanwhile{s.pool, func() {
		happened++
		s.insert(5)
		s.drain()
	}}
	opts := verify.Options{Schema: "effectonce", Relay: "default", Topics: []string{s.topic}, Examples: 3}
	r, err := verify.Run(t.Context(), db, &inspect.Kafka{Client: s.client(), Options: s.options()}, opts)
	require.NoError(t, err)
	assert.True(t, r.Well, "%+v", r)
	assert.Equal(t, 2, happened)
	assert.Equal(t, []int64{10, 5}, []int64{r.Rows, r.Published})
}
