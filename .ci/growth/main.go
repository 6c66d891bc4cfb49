// Command growth measures claims while their table grows, and prints a table in Markdown. IDs with a time go to the
// partition of the day, all others to one partition, which has a fifth as many. Each measurement follows a
// checkpoint, so that the write-ahead log has whole pages.
//
//	go run ./.ci/growth -steps 0,1000000,10000000,50000000
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/servers"
	"github.com/effectonce/effectonce/migrations"
)

const (
	batch   = 500
	workers = 2
	rounds  = 5
	filled  = 1_000_000 // rows of a statement
)

// kind of IDs: how many of a hundred claims have it, and how it is made here and in SQL.
type kind struct {
	share int
	id    func() uuid.UUID
	sql   string
}

func kinds() []kind {
	return []kind{
		{100, func() uuid.UUID { return uuid.Must(uuid.NewV7()) }, `uuidv7()`},
		{20, func() uuid.UUID { id := uuid.New(); id[0] |= 0x80; return id }, `('9' || substr(gen_random_uuid()::text, 2))::uuid`},
	}
}

func main() {
	log.SetFlags(log.Ltime)
	steps := flag.String("steps", "0,1000000,10000000", "how many claims with a time there are at each measurement, ascending")
	claims := flag.Int("claims", 50_000, "how many claims a measurement makes")
	flag.Parse()
	var sizes []int
	for text := range strings.SplitSeq(*steps, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || len(sizes) > 0 && n < sizes[len(sizes)-1] {
			log.Fatalf("-steps %q: want ascending numbers", *steps)
		}
		sizes = append(sizes, n)
	}
	if *claims < batch*workers {
		log.Fatalf("-claims %d: want at least %d", *claims, batch*workers)
	}
	if err := run(context.Background(), sizes, *claims); err != nil {
		log.Fatal(err)
	}
}

type growth struct {
	pool     *pgxpool.Pool
	claims   *dedup.Claims
	consumer dedup.Consumer
	each     int // claims of a measurement
}

func run(ctx context.Context, sizes []int, each int) (err error) {
	server, err := servers.StartPostgres(ctx, servers.PostgresOptions{Own: true, Parameters: map[string]string{"max_wal_size": "4GB"}})
	if err != nil {
		return err
	}
	defer func() { _ = server.Stop(ctx) }()
	g := &growth{each: each}
	if g.pool, err = pgxpool.New(ctx, server.URL); err != nil {
		return err
	}
	defer g.pool.Close()
	conn, err := g.pool.Acquire(ctx)
	if err == nil {
		err = migrations.Up(ctx, conn.Conn(), migrations.Options{})
		conn.Release()
	}
	if err == nil {
		g.claims, err = dedup.New(dedup.Config{})
	}
	if err == nil {
		g.consumer, err = g.claims.Register(ctx, g.pool, dedup.Registration{Name: "growth", Group: "growth", Topics: []string{"growth"}})
	}
	if err != nil {
		return err
	}
	fmt.Printf("Medians of %d times %d claims, %d in a transaction, %d at a time.\n\n", rounds, each, batch, workers)
	fmt.Println("| claims, with / without a time | new /s, with | again /s, with | log, bytes | new /s, without | again /s, without | log, bytes |\n|---|---|---|---|---|---|---|")
	there := make([]int, len(kinds()))
	for _, size := range sizes {
		row := fmt.Sprintf("| %d / %d |", size, size*kinds()[1].share/100)
		for i, k := range kinds() {
			if err := g.fill(ctx, k, size*k.share/100-there[i]); err != nil {
				return err
			}
			there[i] = max(there[i], size*k.share/100) + rounds*each
		}
		for _, k := range kinds() {
			cells, err := g.measure(ctx, k)
			if err != nil {
				return err
			}
			row += cells
		}
		fmt.Println(row)
	}
	return nil
}

// fill adds claims of a kind.
func (g *growth) fill(ctx context.Context, k kind, rows int) error {
	for ; rows > 0; rows -= filled {
		log.Printf("%d claims of %s to add", rows, k.sql)
		_, err := g.pool.Exec(ctx, `INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint)
			SELECT `+k.sql+`, $1, 0 FROM generate_series(1, $2)`, g.consumer.ID(), min(rows, filled))
		if err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	_, err := g.pool.Exec(ctx, `VACUUM ANALYZE effectonce.processed_messages`)
	return err
}

// measure returns the rate of new claims, that of the same again, and the log that a new one takes.
func (g *growth) measure(ctx context.Context, k kind) (cells string, err error) {
	var fresh, again, log []float64
	for range rounds {
		ids := make([]uuid.UUID, g.each)
		for i := range ids {
			ids[i] = k.id()
		}
		if _, err := g.pool.Exec(ctx, `CHECKPOINT`); err != nil {
			return "", err
		}
		before, err := g.wal(ctx)
		if err != nil {
			return "", err
		}
		rate, err := g.claim(ctx, ids, true)
		if err != nil {
			return "", err
		}
		after, err := g.wal(ctx)
		if err != nil {
			return "", err
		}
		repeated, err := g.claim(ctx, ids, false)
		if err != nil {
			return "", err
		}
		fresh, again, log = append(fresh, rate), append(again, repeated), append(log, (after-before)/float64(g.each))
	}
	return fmt.Sprintf(" %.0f | %.0f | %.0f |", median(fresh), median(again), median(log)), nil
}

func (g *growth) wal(ctx context.Context) (bytes float64, err error) {
	err = g.pool.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn`).Scan(&bytes)
	return bytes, err
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// claim returns claims per second. Each must be fresh, or each a duplicate.
func (g *growth) claim(ctx context.Context, ids []uuid.UUID, fresh bool) (rate float64, err error) {
	var group errgroup.Group
	group.SetLimit(workers)
	begun := time.Now()
	for some := range slices.Chunk(ids, batch) {
		group.Go(func() error {
			return pgx.BeginFunc(ctx, g.pool, func(tx pgx.Tx) error {
				messages := make([]dedup.Message, len(some))
				for i, id := range some {
					messages[i].ID = id
				}
				result, err := g.claims.ClaimBatch(ctx, tx, g.consumer, messages)
				if err == nil && slices.Contains(result.Fresh(), !fresh) {
					err = fmt.Errorf("a claim is fresh, or not: want all %v", fresh)
				}
				return err
			})
		})
	}
	err = group.Wait()
	return float64(len(ids)) / time.Since(begun).Seconds(), err
}
