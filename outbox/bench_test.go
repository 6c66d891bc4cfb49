package outbox_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/outbox"
)

// BenchmarkNotify compares transactions that publish one message and notify no relay, that notify
// after COMMIT (as Notify is meant), and that notify inside, where PostgreSQL makes them wait for
// each other.
func BenchmarkNotify(b *testing.B) {
	for _, way := range []string{"quiet", "after", "inside"} {
		b.Run(way, func(b *testing.B) {
			pool := pgtest.Pool(b)
			b.SetParallelism(8)
			b.RunParallel(func(pb *testing.PB) {
				ctx := b.Context()
				for pb.Next() {
					err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
						if err := outbox.Publish(ctx, tx, outbox.Message{Topic: "orders", Payload: make([]byte, 256)}); err != nil || way != "inside" {
							return err
						}
						return outbox.Notify(ctx, tx)
					})
					if err == nil && way == "after" {
						err = outbox.Notify(ctx, pool)
					}
					require.NoError(b, err)
				}
			})
		})
	}
}
