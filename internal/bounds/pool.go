package bounds

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Pool refuses a pool whose way to send statements is not safe, or not able, to send those of this module.
func Pool(pool *pgxpool.Pool) error {
	if pool == nil {
		return errors.New("pool is nil: want a pool of the primary")
	}
	switch mode := pool.Config().ConnConfig.DefaultQueryExecMode; mode {
	case pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol:
		// Without asking the server, pgx cannot send arrays of IDs.
		return fmt.Errorf("pool: default_query_exec_mode %v: want cache_statement, or behind PgBouncer cache_describe", mode)
	case pgx.QueryExecModeDescribeExec:
		return fmt.Errorf("pool: default_query_exec_mode %v: want cache_describe: behind a pooler it may execute another client's statement", mode)
	case pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe:
	}
	return nil
}
