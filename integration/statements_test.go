package integration_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
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
		"dedup.lease", "dedup.lease_done", "dedup.swept", "dedup.sweep", "dedup.holders", "dedup.others", "dedup.other_holders", "dedup.mark",
		"dedup.dropped", "dedup.note_dropped",
	}
	checked := 0
	for part, files := range map[string][]string{
		"publisher": {"outbox/queries.go"},
		"relay":     {"relay/queries.go", "relay/dead_queries.go", "relay/scheduled_queries.go", "relay/sequence_queries.go", "cmd/outbox-relay/internal/metrics/queries.go", "cmd/outbox-relay/internal/monitor/state.go", "cmd/outbox-relay/internal/pipeline/queries.go", "cmd/outbox-relay/internal/doctor/queries.go"},
		"consumer":  {"consumer/queries.go", "dedup/queries.go", "outbox/queries.go"},
		"endpoint":  {"dedup/idempotency/queries.go"},
		"operator": {
			"cmd/outbox-relay/internal/pipeline/queries.go", "cmd/outbox-relay/internal/doctor/queries.go", "cmd/outbox-relay/internal/held/queries.go", "cmd/outbox-relay/internal/trace/queries.go",
			"relay/operator_queries.go", "relay/sequence_queries.go", "cmd/outbox-relay/internal/trace/replay.go", "cmd/outbox-relay/internal/operator/operator.go", "cmd/outbox-relay/internal/keys/queries.go",
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

// hostileTypes are those of our columns, parameters and intermediate values.
var hostileTypes = []string{
	"text", "varchar", "name", "int2", "int4", "int8", "uuid", "bytea", "jsonb", "timestamptz", "interval", "xid8", "pg_snapshot", "bool", "float8", "numeric",
	"oid", "regclass", "regrole", "\"char\"", "pg_lsn", "text[]", "uuid[]", "int4[]", "int8[]", "bytea[]", "name[]", "xid8[]",
}

// hostileArity bounds combinations. Calls with more arguments are of functions whose types are
// exact, or which takeAnything names.
const hostileArity = 3

// takeAnything are functions with any number of arguments of any type: a better overload can be
// planted for each call.
var takeAnything = regexp.MustCompile(`(?i)(?:^|[^.a-z_])(format|concat|concat_ws|jsonb_build_object|jsonb_build_array|json_build_object|json_build_array|num_nulls|num_nonnulls)\s*\(`)

// ourStatements are all constants with a tag in files that are no tests, by tag.
func ourStatements(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		for _, skipped := range []string{
			"/bench/", "/demo/", "/checker/", "/examples/", "/pgtest/", "/testdata/", "/servers/", "/hammertest/", "/idempotencytest/", "/consumertest/", "/nodedup/", "/effects/",
			"/migrations/apply.go", "/migrations/lock.go", "/migrations/trusted.go",
		} { // these set the search path first {
			if strings.Contains(filepath.ToSlash(path), skipped) {
				return nil
			}
		}
		for tag, sql := range taggedIn(t, path) {
			all[tag+" in "+strings.TrimPrefix(path, "../")] = sql
		}
		return nil
	}))
	return all
}

// plantOverloads makes, in the schema public, a function for each call that could be meant for
// PostgreSQL's own functions and operators of these names, with argument types that no function of
// PostgreSQL has exactly, but that it would take by a cast. Only their owner may run them.
func plantOverloads(ctx context.Context, t *testing.T, owner *pgx.Conn, names, kinds []string) int {
	t.Helper()
	rows, err := owner.Query(ctx, `
WITH kinds AS (SELECT t.name, p.oid, p.typbasetype AS base, p.typelem <> 0 AND p.typcategory = 'A' AS is_array FROM unnest($2::text[]) AS t (name) JOIN pg_type p ON p.oid = t.name::regtype),
fits AS ( -- which type may be given for which
  SELECT k.name, k.oid AS given, d.oid AS wanted FROM kinds k, pg_type d
  WHERE d.oid IN (k.oid, k.base) OR EXISTS (SELECT FROM pg_cast c WHERE c.castsource IN (k.oid, k.base) AND c.casttarget = d.oid AND c.castcontext = 'i')
    OR d.typname IN ('any', 'anyelement', 'anynonarray', 'anycompatible', 'anycompatiblenonarray') AND (NOT k.is_array OR d.typname IN ('any', 'anyelement', 'anycompatible'))
    OR d.typname IN ('anyarray', 'anycompatiblearray') AND k.is_array),
signatures AS (
  SELECT p.proname AS name, false AS operator, p.proargtypes::oid[] AS args FROM pg_proc p
  WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = ANY ($1) AND p.pronargs BETWEEN 1 AND $3
  UNION
  SELECT o.oprname, true, CASE WHEN o.oprleft = 0 THEN ARRAY[o.oprright] ELSE ARRAY[o.oprleft, o.oprright] END FROM pg_operator o
  WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprleft <> 0),
calls AS (
  SELECT s.name, s.operator, ARRAY[a.given] AS args, a.name AS types FROM signatures s JOIN fits a ON a.wanted = s.args[0 + array_lower(s.args, 1)] WHERE cardinality(s.args) = 1
  UNION
  SELECT s.name, s.operator, ARRAY[a.given, b.given], a.name || ', ' || b.name FROM signatures s JOIN fits a ON a.wanted = s.args[array_lower(s.args, 1)]
    JOIN fits b ON b.wanted = s.args[array_lower(s.args, 1) + 1] WHERE cardinality(s.args) = 2
  UNION
  SELECT s.name, s.operator, ARRAY[a.given, b.given, c.given], a.name || ', ' || b.name || ', ' || c.name FROM signatures s JOIN fits a ON a.wanted = s.args[array_lower(s.args, 1)]
    JOIN fits b ON b.wanted = s.args[array_lower(s.args, 1) + 1] JOIN fits c ON c.wanted = s.args[array_lower(s.args, 1) + 2] WHERE cardinality(s.args) = 3)
SELECT c.name, c.operator, c.types FROM calls c
WHERE NOT EXISTS (SELECT FROM pg_proc p WHERE NOT c.operator AND p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = c.name AND p.proargtypes::oid[]::text = c.args::text
    OR NOT c.operator AND p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = c.name AND p.pronargs = cardinality(c.args) AND ARRAY(SELECT unnest(p.proargtypes))::oid[] = c.args)
  AND NOT EXISTS (SELECT FROM pg_operator o WHERE c.operator AND o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprname = c.name AND ARRAY[o.oprleft, o.oprright] = c.args)
GROUP BY 1, 2, 3`, names, kinds, hostileArity)
	require.NoError(t, err)
	type overload struct {
		Name     string
		Operator bool
		Types    string
	}
	overloads, err := pgx.CollectRows(rows, pgx.RowToStructByPos[overload])
	require.NoError(t, err)
	var sql strings.Builder
	sql.WriteString("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;\n")
	for i, o := range overloads {
		name := o.Name
		if o.Operator {
			name = fmt.Sprintf("%d %s (%s)", i, o.Name, o.Types)
		}
		result := "bool"
		if !o.Operator || !slices.Contains([]string{"=", "<>", "<", ">", "<=", ">=", "~", "~~", "!~", "@>", "<@", "&&", "~*", "!~~"}, o.Name) {
			result = "text"
		}
		fmt.Fprintf(&sql, "CREATE FUNCTION public.%s(%s) RETURNS %s LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''hostile''; END';\n", pgx.Identifier{name}.Sanitize(), o.Types, result)
		if o.Operator {
			left, right, _ := strings.Cut(o.Types, ", ")
			fmt.Fprintf(&sql, "CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.%s);\n", o.Name, left, right, pgx.Identifier{name}.Sanitize())
		}
	}
	_, err = owner.PgConn().Exec(ctx, sql.String()).ReadAll()
	require.NoError(t, err)
	return len(overloads)
}

// ourTypes are the domains, enums, ranges and composite types of the schema, and their arrays. Row
// types of tables and views are not among them.
func ourTypes(ctx context.Context, t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(ctx, `
SELECT t.oid::regtype::text FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A' LEFT JOIN pg_class c ON c.oid = coalesce(e.typrelid, t.typrelid) AND c.oid <> 0
WHERE t.typnamespace = 'effectonce'::regnamespace AND coalesce(c.relkind, 'c') = 'c' ORDER BY 1`)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Contains(t, found, "effectonce.key_state")
	return found
}

// calledIn are the names that statements may call.
func calledIn(statements map[string]string) []string {
	calls, called := regexp.MustCompile(`([a-z_0-9]+)\s*\(`), map[string]bool{}
	for _, sql := range statements {
		for _, m := range calls.FindAllStringSubmatch(sql, -1) {
			called[m[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(called))
}

// hostileDatabase is one where a login without rights planted overloads before anything of ours
// came.
func hostileDatabase(t *testing.T) string {
	t.Helper()
	ctx, address := t.Context(), pgtest.EmptyDatabase(t)
	conn := pgtest.Connect(t, address)
	stranger := pgtest.RolePrefix(t, address) + "_stranger"
	pgtest.Exec(t, conn, "CREATE ROLE "+stranger)
	pgtest.Exec(t, conn, "GRANT CREATE ON SCHEMA public TO "+stranger)
	pgtest.Exec(t, conn, "SET ROLE "+stranger)
	require.Greater(t, plantOverloads(ctx, t, conn, calledIn(ourStatements(t)), hostileTypes), 1000)
	return address
}

// Property: no statement of ours runs, or even finds, a function or operator that another login
// planted in a schema of the search path, under the path that PostgreSQL has by default. Row S8 of
// guarantees.md.
func TestStatementsFindOnlyPostgreSQLsFunctions(t *testing.T) {
	t.Parallel()
	ctx, statements := t.Context(), ourStatements(t)
	require.Greater(t, len(statements), 150)
	for tag, sql := range statements {
		assert.NotRegexp(t, takeAnything, sql, "%s: name PostgreSQL's own with pg_catalog.", tag)
	}
	p := parts{address: pgtest.EmptyDatabase(t)}
	p.prefix = pgtest.RolePrefix(t, p.address)
	conn, err := pgx.Connect(ctx, p.address)
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	owner := p.prefix + "_owner"
	_, err = conn.Exec(ctx, fmt.Sprintf("CREATE ROLE %s_stranger; CREATE ROLE %[2]s; GRANT CREATE ON SCHEMA public TO %[1]s_stranger; CREATE SCHEMA effectonce AUTHORIZATION %[2]s; SET ROLE %[2]s", p.prefix, owner))
	require.NoError(t, err)
	require.NoError(t, migrations.Up(ctx, conn, migrations.Options{}))
	check := func() map[string]error {
		failed := map[string]error{}
		for tag, sql := range statements {
			tx, err := conn.Begin(ctx)
			require.NoError(t, err)
			if err := allowed(t, tx, "s", sql); err != nil { //nolint:contextcheck // it has the test's
				failed[tag] = err
			}
			require.NoError(t, tx.Rollback(ctx))
			_, _ = conn.Exec(ctx, "DEALLOCATE s")
		}
		return failed
	}
	before := check()
	t.Logf("%d of %d statements are not checked: they need arguments or a session of their own: %v", len(before), len(statements), slices.Sorted(maps.Keys(before)))
	require.Less(t, len(before), len(statements)/10)
	// Who has USAGE on the schema, as publishers have, can also plant operators of its types.
	_, err = conn.Exec(ctx, fmt.Sprintf("GRANT USAGE ON SCHEMA effectonce TO %[1]s_stranger; RESET ROLE; SET ROLE %[1]s_stranger", p.prefix))
	require.NoError(t, err)
	planted := plantOverloads(ctx, t, conn, calledIn(statements), append(ourTypes(ctx, t, conn), hostileTypes...))
	require.Greater(t, planted, 1000)
	_, err = conn.Exec(ctx, "RESET ROLE; SET ROLE "+owner)
	require.NoError(t, err)
	for tag, err := range check() {
		if _, was := before[tag]; !was {
			assert.Fail(t, err.Error(), "%s of %d planted overloads: %s", tag, planted, statements[tag])
		}
	}
}
