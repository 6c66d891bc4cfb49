package dedup_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// BenchmarkClaimBatch compares batches of claims with the textbook way (SELECT the text of the ID,
// then INSERT it, one message per transaction), alternating in one run. x-textbook is how many
// times as many messages per second the batch claims, by_id/s is the rate of the batch, textbook/s
// that of the other.
func BenchmarkClaimBatch(b *testing.B) {
	for _, size := range []int{1, 100, 1000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			pool, claims := pgtest.Pool(b), newClaims(b)
			_, err := pool.Exec(b.Context(), "CREATE TABLE textbook (consumer text, message_id text, processed_at timestamptz DEFAULT now(), PRIMARY KEY (consumer, message_id))")
			require.NoError(b, err)
			var byID, textbook time.Duration
			for b.Loop() {
				b.StopTimer()
				ids := newIDs(b, size)
				b.StartTimer()
				start := time.Now()
				err := pgx.BeginFunc(b.Context(), pool, func(tx pgx.Tx) error {
					_, err := claims.ClaimBatch(b.Context(), tx, dedup.Numbered(1), ids)
					return err
				})
				byID += time.Since(start)
				require.NoError(b, err)

				start = time.Now()
				err = claimByTheBook(b.Context(), pool, ids)
				textbook += time.Since(start)
				require.NoError(b, err)
			}
			messages := float64(b.N * size)
			b.ReportMetric(messages/byID.Seconds(), "by_id/s")
			b.ReportMetric(messages/textbook.Seconds(), "textbook/s")
			b.ReportMetric(textbook.Seconds()/byID.Seconds(), "x-textbook")
			b.ReportMetric(0, "ns/op") // of both together: it says nothing
		})
	}
}

func claimByTheBook(ctx context.Context, pool *pgxpool.Pool, ids []uuid.UUID) error {
	for _, id := range ids {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			var known bool
			err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM textbook WHERE consumer = 'bench' AND message_id = $1)", id.String()).Scan(&known)
			if err != nil || known {
				return err
			}
			_, err = tx.Exec(ctx, "INSERT INTO textbook (consumer, message_id) VALUES ('bench', $1)", id.String())
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// BenchmarkClaimForms compares the claim that takes everything as fresh with the one that asks,
// alternating in one run. x-asking is how many times as many messages per second the first one
// claims.
func BenchmarkClaimForms(b *testing.B) {
	for _, size := range []int{20, 100, 500} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			pool, claims := pgtest.Pool(b), newClaims(b)
			conn, err := pool.Acquire(b.Context())
			require.NoError(b, err)
			defer conn.Release()
			var took [2]time.Duration
			for b.Loop() {
				for form, optimistic := range []bool{false, true} {
					ids := newIDs(b, size)
					start := time.Now()
					_, err := claimEitherWay(b.Context(), claims, conn.Conn(), optimistic, dedup.Numbered(1), ids)
					took[form] += time.Since(start)
					require.NoError(b, err)
				}
			}
			b.ReportMetric(took[0].Seconds()/took[1].Seconds(), "x-asking")
			b.ReportMetric(float64(b.N*size)/took[1].Seconds(), "fresh/s")
			b.ReportMetric(0, "ns/op") // of both together: it says nothing
		})
	}
}

// BenchmarkMessageID covers what a message may carry, from the cheapest to the most expensive.
func BenchmarkMessageID(b *testing.B) {
	for _, carried := range []string{"0191d3a7-5c1e-7abc-9def-0123456789ab", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "order-4711"} {
		b.Run(carried, func(b *testing.B) {
			raw := []byte(carried)
			b.ReportAllocs()
			for b.Loop() {
				dedup.MessageID("orders", raw)
			}
		})
	}
}
