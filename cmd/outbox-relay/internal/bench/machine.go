package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// machineSamples of each kind are taken in a round.
const machineSamples = 100

// machineTurn measures the two times on which the ratios depend: a round trip to the database, and
// a commit. The textbook pays four round trips and one commit for each message. So a disk that
// syncs slowly makes it look worse, and a disk that does not sync makes it look better.
func (b *consumeBench) machineTurn(ctx context.Context) error {
	conn, closeConn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer closeConn()
	roundTrips, commits := make([]float64, 0, machineSamples), make([]float64, 0, machineSamples)
	for range machineSamples {
		trip, commit, err := b.oneCommit(ctx, conn)
		if err != nil {
			return fmt.Errorf("measure a commit: %w", err)
		}
		roundTrips, commits = append(roundTrips, trip.Seconds()*1e6), append(commits, commit.Seconds()*1e6)
	}
	b.samples.add("round_trip_us", percentile(roundTrips, 0.5))
	b.samples.add("commit_us", percentile(commits, 0.5))
	return nil
}

func (b *consumeBench) oneCommit(ctx context.Context, conn *pgx.Conn) (trip, commit time.Duration, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, 0, err
	}
	defer tx.Rollback(ctx)
	begin := time.Now()
	if _, err := tx.Exec(ctx, roundTripSQL); err != nil {
		return 0, 0, err
	}
	trip = time.Since(begin)
	if _, err := tx.Exec(ctx, b.sql(effectSQL), "nobody", []byte("nothing")); err != nil {
		return 0, 0, err
	}
	begin = time.Now()
	err = tx.Commit(ctx)
	return trip, time.Since(begin), err
}
