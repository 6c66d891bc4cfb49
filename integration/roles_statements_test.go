package integration_test

import (
	"errors"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	tagged  = regexp.MustCompile(`^-- ([a-z]+\.[a-z_]+)\n`)
	utility = regexp.MustCompile(`^-- \S+\n(LOCK|TRUNCATE|DECLARE)`)
	copies  = regexp.MustCompile(`COPY (\S+) \((.*?)\) FROM STDIN.*`) // needs the right to insert
)

// statementsOf returns the constants of a file that are statements, by their tags. There is one at
// least.
func statementsOf(t *testing.T, path string) map[string]string {
	t.Helper()
	found := taggedIn(t, path)
	require.NotEmpty(t, found, path)
	return found
}

func taggedIn(t *testing.T, path string) map[string]string {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, 0)
	require.NoError(t, err)
	info := &types.Info{Defs: map[*ast.Ident]types.Object{}}
	// Constants need no imports; what does is of no interest here.
	_, _ = (&types.Config{Error: func(error) {}}).Check("queries", files, []*ast.File{file}, info)
	found := map[string]string{}
	for _, object := range info.Defs {
		c, is := object.(*types.Const)
		if !is || c.Val().Kind() != constant.String {
			continue
		}
		sql := constant.StringVal(c.Val())
		if tag := tagged.FindStringSubmatch(sql); tag != nil {
			found[tag[1]] = strings.NewReplacer("%[1]d", "0", "%d", "0", "%%", "%").Replace(sql)
		}
	}
	return found
}

// allowed starts a statement with null for each argument, as far as PostgreSQL checks rights, and
// no further.
func allowed(t *testing.T, tx pgx.Tx, tag, sql string) error {
	t.Helper()
	if utility.MatchString(sql) {
		_, err := tx.Exec(t.Context(), sql)
		return err
	}
	sql = copies.ReplaceAllString(sql, "INSERT INTO $1 ($2) SELECT $2 FROM $1")
	described, err := tx.Prepare(t.Context(), "", sql)
	if err != nil {
		return err
	}
	name := strings.ReplaceAll(tag, ".", "_") // it outlives the transaction where the statement fails
	statement := "PREPARE " + name + " AS " + sql + "; EXPLAIN EXECUTE " + name
	if n := len(described.ParamOIDs); n > 0 {
		statement += "(" + strings.TrimSuffix(strings.Repeat("NULL,", n), ",") + ")"
	}
	_, err = tx.Exec(t.Context(), "SET LOCAL plan_cache_mode = force_generic_plan; "+statement)
	return err
}

// Property: each statement that a part runs is one that its role may run, also those of rare ways:
// a restore, another number of shards, deleted records. Only the upkeep of claims is its owner's.
// Row S7 of guarantees.md.
func TestEachStatementIsAllowed(t *testing.T) {
	t.Parallel()
	p := newParts(t)
	owners := []string{
		"dedup.lease", "dedup.renew", "dedup.lease_done", "dedup.swept", "dedup.sweep", "dedup.holders", "dedup.others", "dedup.other_holders", "dedup.mark",
		"dedup.dropped", "dedup.note_dropped",
	}
	checked := 0
	for part, files := range map[string][]string{
		"publisher": {"outbox/queries.go"},
		"relay":     {"relay/queries.go", "relay/sequence_queries.go", "cmd/outbox-relay/internal/metrics/queries.go", "cmd/outbox-relay/internal/monitor/queries.go", "cmd/outbox-relay/internal/doctor/queries.go"},
		"consumer":  {"consumer/queries.go", "dedup/queries.go", "dedup/fence_queries.go", "outbox/queries.go"},
		"endpoint":  {"dedup/idempotency/queries.go"},
		"operator": {
			"cmd/outbox-relay/internal/doctor/queries.go", "cmd/outbox-relay/internal/queue/dead_queries.go", "cmd/outbox-relay/internal/queue/parked_queries.go", "cmd/outbox-relay/internal/inspect/queries.go", "cmd/outbox-relay/internal/verify/queries.go",
			"relay/operator_queries.go", "relay/repair_queries.go", "relay/sequence_queries.go", "cmd/outbox-relay/internal/replay/queries.go", "cmd/outbox-relay/internal/operator/queries.go", "cmd/outbox-relay/internal/keys/queries.go",
		},
	} {
		pool := p.as(t, part)
		for _, path := range files {
			for tag, sql := range statementsOf(t, "../"+path) {
				if strings.Contains(strings.Join(owners, " ")+" ", tag+" ") {
					continue
				}
				tx, err := pool.Begin(t.Context())
				require.NoError(t, err)
				err = allowed(t, tx, tag, sql)
				require.NoError(t, tx.Rollback(t.Context()))
				var pgErr *pgconn.PgError
				if errors.As(err, &pgErr) {
					assert.Fail(t, err.Error(), "%s: %s", part, sql)
				}
				checked++
			}
		}
	}
	require.Greater(t, checked, 120)
}
