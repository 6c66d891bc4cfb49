package dedup_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// beforeSQL calls a function once, before the first statement with a text is sent.
type beforeSQL struct {
	text string
	call func()
	once sync.Once
}

func (b *beforeSQL) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, b.text) {
		b.once.Do(b.call)
	}
	return ctx
}

func (*beforeSQL) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Property: a claim that is made in an old day between the look that found the day empty and the
// lock on the table keeps its day. C29.
func TestClaimBeforeTheLockKeepsItsDay(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	consumer, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "c", Group: "g", Window: time.Minute})
	require.NoError(t, err)
	late := idAt(time.Now().AddDate(0, 0, -3))
	before := &beforeSQL{text: "LOCK TABLE ONLY", call: func() {
		require.Equal(t, []bool{true}, claimAlone(t, pool, claims, consumer, late))
	}}
	config := pool.Config()
	config.ConnConfig.Tracer = before
	traced, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(traced.Close)
	day := "processed_messages_" + time.Now().UTC().AddDate(0, 0, -3).Format("20060102")
	require.Zero(t, number(t, pool, partitionOfSQL, late, "past"))

	report, err := claims.Maintain(t.Context(), traced, dedup.MaintainOptions{Owner: "test"})
	require.NoError(t, err)
	require.NotEmpty(t, report.Dropped, "older days are dropped")
	require.NotContains(t, report.Dropped, day)
	require.Equal(t, []bool{false}, claimAlone(t, pool, claims, consumer, late), "the claim is there")
}
