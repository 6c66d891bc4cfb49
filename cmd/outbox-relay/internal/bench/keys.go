package bench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

const (
	keyClients       = 32 // requests at a time, each with a connection
	keyResponseBytes = 200
	keysReplayed     = 1000 // finished keys that replays ask for
)

// keysBench is one run of Keys.
type keysBench struct {
	*site

	clients   *pgxpool.Pool
	operation *idempotency.Operation
	flow      *idempotency.Flow[int] // of a call that takes no time, and the work
	response  []byte
}

// Keys measures how many requests per second are executed without idempotency keys, under the
// textbook's, under Once and as a flow, and how many are answered by a replay. It also measures what
// a key takes, and how fast keys are forgotten.
func Keys(ctx context.Context, opts Options) (_ *Report, err error) {
	s, err := newSite(ctx, opts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	if err := s.exec(ctx, "create the benchmark's tables", tablesSQL); err != nil {
		return nil, err
	}
	b := &keysBench{site: s, response: make([]byte, keyResponseBytes)}
	if b.clients, err = b.newPool(ctx, keyClients); err != nil {
		return nil, err
	}
	defer b.clients.Close()
	if b.operation, err = idempotency.New(b.clients, idempotency.Config{Schema: b.Schema, Operation: "order", WaitMax: time.Minute}); err != nil {
		return nil, err
	}
	if b.flow, err = idempotency.NewFlow(
		b.operation, idempotency.FlowConfig[int]{},
		idempotency.Phase[int]{Name: "charged", Call: func(context.Context, *idempotency.Step[int]) error { return nil }},
		idempotency.Phase[int]{Name: "ordered", Write: b.write},
	); err != nil {
		return nil, err
	}
	effects := b.Requests * (b.Statements - 1)
	if err := b.rounds(
		b.variant(ctx, "without", effects, b.without),
		b.variant(ctx, "textbook", effects, b.textbook),
		func(round int) error {
			return errors.Join(b.variant(ctx, "once", effects, b.once)(round), b.forget(ctx))
		},
		b.variant(ctx, "flow", effects, b.phases),
		func(int) error { return b.turn(ctx, "replay", keysReplayed*(b.Statements-1), b.replay) },
	); err != nil {
		return nil, err
	}
	b.compare("once", "without", b.Requests, "bytes_per_key", "wal_bytes_per_key")
	for round, took := range b.took["once"] {
		b.samples.add("xids_per_key", float64(took.xids-b.took["without"][round].xids)/float64(b.Requests))
	}
	return newReport([]Figure{
		{Key: "textbook", Text: "key and response in one transaction", Unit: requestRate},
		{Key: "without", Text: "no keys", Unit: requestRate},
		{Key: "once", Text: "Operation.Once", Unit: requestRate},
		{Key: "flow", Text: "Flow.Do, a call and a write", Unit: requestRate},
		{Key: "replay", Text: "a stored response", Unit: requestRate},
		{Key: "bytes_per_key", Text: "table and indexes", Unit: "bytes"},
		{Key: "wal_bytes_per_key", Text: "write-ahead log of Once", Unit: "bytes"},
		{Key: "xids_per_key", Text: "of Once beside the work's own", Unit: "transaction IDs", Digits: 2},
		{Key: "forgotten", Text: "the reaper", Unit: "keys/s"},
	}, s.samples).sized("requests", opts.Requests, requestsTelling, opts.Rounds), nil
}

// variant executes new requests.
func (b *keysBench) variant(ctx context.Context, key string, effects int, run func(ctx context.Context, request int) error) func(int) error {
	return func(int) error {
		return b.turn(ctx, key, effects, func(ctx context.Context) (float64, error) { return b.each(ctx, b.Requests, run) })
	}
}

// each executes the requests 1 to n and returns the rate. The first tenth does not count: statements
// are prepared then.
func (b *keysBench) each(ctx context.Context, n int, run func(ctx context.Context, request int) error) (float64, error) {
	var begin time.Time
	for _, part := range [][2]int{{1, n / 10}, {n/10 + 1, n}} {
		begin = time.Now()
		group, ctx := errgroup.WithContext(ctx)
		var done atomic.Int64
		for range keyClients {
			group.Go(func() error {
				for {
					i := part[0] + int(done.Add(1)) - 1
					if i > part[1] {
						return nil
					}
					if err := run(ctx, i); err != nil {
						return fmt.Errorf("request %d: %w", i, err)
					}
				}
			})
		}
		if err := group.Wait(); err != nil {
			return 0, err
		}
	}
	return float64(n-n/10) / time.Since(begin).Seconds(), nil
}

// work is what a request does: inserts, and an update of one of 10,000 accounts.
func (b *keysBench) work(ctx context.Context, tx pgx.Tx, request int) error {
	for i := range b.Statements - 1 {
		if _, err := tx.Exec(ctx, b.sql(effectSQL), "account", body(request*StatementsMax+i)); err != nil {
			return err
		}
	}
	_, err := tx.Exec(ctx, b.sql(bookSQL), request*7919%10000)
	return err
}

// without is the work alone.
func (b *keysBench) without(ctx context.Context, request int) error {
	return pgx.BeginFunc(ctx, b.clients, func(tx pgx.Tx) error { return b.work(ctx, tx, request) })
}

// textbook is the table of keys from articles: in one transaction the key is inserted, the work done
// and the response stored.
func (b *keysBench) textbook(ctx context.Context, request int) error {
	return pgx.BeginFunc(ctx, b.clients, func(tx pgx.Tx) error {
		key := idempotency.NewKey()
		claimed, err := tx.Exec(ctx, b.sql(textbookKeySQL), key, body(request))
		if err != nil || claimed.RowsAffected() == 0 {
			return err
		}
		if err := b.work(ctx, tx, request); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, b.sql(textbookResponseSQL), key, b.response)
		return err
	})
}

func (b *keysBench) once(ctx context.Context, request int) error {
	return b.request(ctx, idempotency.NewKey(), request)
}

func (b *keysBench) request(ctx context.Context, key string, request int) error {
	_, err := b.operation.Once(ctx, b.key(key, request), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: http.StatusCreated, Body: b.response}, b.work(ctx, tx, request)
	})
	return err
}

func (b *keysBench) key(value string, request int) idempotency.Key {
	return b.operation.Key("tenant", value, idempotency.NewFingerprint(body(request)))
}

func (b *keysBench) phases(ctx context.Context, request int) error {
	_, err := b.flow.Do(ctx, b.key(idempotency.NewKey(), request), []byte(strconv.Itoa(request)))
	return err
}

func (b *keysBench) write(ctx context.Context, tx pgx.Tx, step *idempotency.Step[int]) error {
	request, err := strconv.Atoi(string(step.Request))
	if err != nil {
		return err
	}
	step.Finish(idempotency.Response{Status: http.StatusCreated, Body: b.response})
	return b.work(ctx, tx, request)
}

// forget measures how fast the keys of a run are forgotten.
func (b *keysBench) forget(ctx context.Context) error {
	if err := b.exec(ctx, "end the window of all keys", expireSQL); err != nil {
		return err
	}
	begin := time.Now()
	reaped, err := idempotency.Reap(ctx, b.pool, b.Schema)
	if err != nil {
		return err
	}
	b.samples.add("forgotten", float64(reaped.Forgotten)/time.Since(begin).Seconds())
	return nil
}

// replay asks for finished keys.
func (b *keysBench) replay(ctx context.Context) (float64, error) {
	replayed := func(ctx context.Context, request int) error {
		request %= keysReplayed
		return b.request(ctx, strconv.Itoa(request), request)
	}
	if _, err := b.each(ctx, keysReplayed, replayed); err != nil {
		return 0, err
	}
	return b.each(ctx, b.Requests, replayed)
}
