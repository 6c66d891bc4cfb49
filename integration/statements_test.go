package integration_test

import (
	"errors"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
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

// sources imports packages of this module from their files, and no others: constants of statements
// need none.
type sources struct {
	files    *token.FileSet
	packages map[string]*types.Package
}

const module = "github.com/effectonce/effectonce"

// Import implements types.Importer.
func (s sources) Import(path string) (*types.Package, error) {
	dir, ours := strings.CutPrefix(path, module)
	if !ours {
		return nil, errors.New("not of this module")
	}
	if s.packages[path] == nil {
		pkg, _, err := s.check(filepath.Join("..", dir), &types.Info{})
		if err != nil {
			return nil, err
		}
		s.packages[path] = pkg
	}
	return s.packages[path], nil
}

// check checks the types of a directory's files that are no tests, and returns the files by name.
func (s sources) check(dir string, info *types.Info) (*types.Package, map[string]*ast.File, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, nil, err
	}
	byName, files := map[string]*ast.File{}, []*ast.File{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(s.files, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, nil, err
		}
		byName[filepath.Clean(name)], files = file, append(files, file)
	}
	// What other modules declare is unknown: those errors are expected.
	config := types.Config{Error: func(error) {}, IgnoreFuncBodies: true, Importer: s}
	pkg, _ := config.Check(dir, s.files, files, info)
	pkg.MarkComplete()
	return pkg, byName, nil
}

// taggedIn are the constants with a tag of a file, by tag. They may be put together from constants
// of other files and packages.
func taggedIn(t *testing.T, path string) map[string]string {
	t.Helper()
	info := &types.Info{Defs: map[*ast.Ident]types.Object{}}
	all := sources{files: token.NewFileSet(), packages: map[string]*types.Package{}}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	if !regexp.MustCompile("[`\"]-- [a-z]+\\.").Match(text) {
		return nil
	}
	_, files, err := all.check(filepath.Dir(path), info)
	require.NoError(t, err)
	ours := files[filepath.Clean(path)]
	require.NotNil(t, ours, path)
	found := map[string]string{}
	for name, object := range info.Defs {
		c, is := object.(*types.Const)
		if !is || name.Pos() < ours.FileStart || name.Pos() >= ours.FileEnd || c.Val().Kind() != constant.String {
			continue
		}
		sql := constant.StringVal(c.Val())
		if tag := tagged.FindStringSubmatch(sql); tag != nil {
			found[tag[1]] = strings.NewReplacer("%[1]d", "0", "%d", "0", "%%", "%").Replace(sql)
		}
	}
	ast.Inspect(ours, func(n ast.Node) bool {
		if spec, is := n.(*ast.ValueSpec); is {
			for _, value := range spec.Values {
				if tag := tagged.FindStringSubmatch(firstText(value)); tag != nil {
					require.Contains(t, found, tag[1], "%s: this test cannot tell its text", path)
				}
			}
		}
		return true
	})
	return found
}

// firstText is the literal with which a concatenation begins.
func firstText(value ast.Expr) string {
	for {
		switch e := value.(type) {
		case *ast.BinaryExpr:
			value = e.X
		case *ast.BasicLit:
			text, _ := strconv.Unquote(e.Value)
			return text
		default:
			return ""
		}
	}
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
			"cmd/outbox-relay/internal/doctor/queries.go", "cmd/outbox-relay/internal/held/queries.go", "cmd/outbox-relay/internal/inspect/queries.go", "cmd/outbox-relay/internal/verify/queries.go",
			"relay/operator_queries.go", "relay/shards_queries.go", "relay/repair_queries.go", "relay/sequence_queries.go", "cmd/outbox-relay/internal/replay/queries.go", "cmd/outbox-relay/internal/operator/queries.go", "cmd/outbox-relay/internal/keys/queries.go",
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
