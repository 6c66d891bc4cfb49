package bounds

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Pool refuses a pool that cannot send this module's statements, or not safely.
func Pool(pool *pgxpool.Pool) error {
	if pool == nil {
		return errors.New("pool is nil: want a pool of the primary")
	}
	config := pool.Config().ConnConfig
	if several(config) && config.ValidateConnect == nil {
		return errors.New("pool: several hosts, and nothing says which is the primary, and a standby has other rows: add target_session_attrs=read-write")
	}
	switch mode := config.DefaultQueryExecMode; mode {
	case pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol:
		// pgx cannot send arrays of IDs without asking the server for their type.
		return fmt.Errorf("pool: default_query_exec_mode %v: want cache_statement, or behind PgBouncer cache_describe", mode)
	case pgx.QueryExecModeDescribeExec:
		return fmt.Errorf("pool: default_query_exec_mode %v: want cache_describe: behind a pooler it may execute another client's statement", mode)
	case pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe: // some statements always go in the second
		if config.DescriptionCacheCapacity == 0 {
			return errors.New("pool: description_cache_capacity 0: want at least 1 (default 512)")
		}
	}
	return nil
}

// several reports whether connections may go to different servers, not only with TLS and without.
func several(config *pgx.ConnConfig) bool {
	for _, other := range config.Fallbacks {
		if other.Host != config.Host || other.Port != config.Port {
			return true
		}
	}
	return false
}
