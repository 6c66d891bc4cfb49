package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// WaitingSeqs returns what the statement behind every count finds, for each relay.
func WaitingSeqs(ctx context.Context, db Querier, schema string, limit int) (map[string][]int64, error) {
	all, err := ReadProgress(ctx, db, schema)
	if err != nil {
		return nil, err
	}
	found := map[string][]int64{}
	for _, p := range all {
		rows, err := db.Query(ctx, inSchema("SELECT seq FROM ("+waitingRows+") w ORDER BY seq", schema), p.waiting().args(limit)...)
		if err != nil {
			return nil, err
		}
		if found[p.relay], err = pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// ExplainWaiting runs the same statement and returns its plan.
func ExplainWaiting(ctx context.Context, db Querier, schema string, limit int) ([]byte, error) {
	all, err := ReadProgress(ctx, db, schema)
	if err != nil {
		return nil, err
	}
	var plan []byte
	sql := inSchema("EXPLAIN (ANALYZE, FORMAT JSON) SELECT count(*), min(created_at) FROM ("+waitingRows+") w", schema)
	err = db.QueryRow(ctx, sql, all[0].waiting().args(limit)...).Scan(&plan)
	return plan, err
}
