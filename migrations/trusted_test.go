package migrations_test

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/migrations"
)

// squatter creates a login whose only right is to create in the schema public, and a table in which
// its code leaves a trace.
func squatter(t *testing.T, conn *pgx.Conn) (role string, as func(sql string)) {
	t.Helper()
	role = pgtest.RolePrefix(t, conn.Config().ConnString()) + "_squatter"
	pgtest.Exec(t, conn, "CREATE ROLE "+role+"; GRANT CREATE ON SCHEMA public TO "+role)
	pgtest.Exec(t, conn, "GRANT CREATE ON DATABASE "+pgx.Identifier{conn.Config().Database}.Sanitize()+" TO "+role)
	return role, func(sql string) {
		t.Helper()
		pgtest.Exec(t, conn, "SET SESSION AUTHORIZATION "+role)
		defer pgtest.Exec(t, conn, "RESET SESSION AUTHORIZATION")
		pgtest.Exec(t, conn, sql)
	}
}

// hostile are functions and operators whose types fit better than those of PostgreSQL when a
// migration, a role script or a function calls format, set_bit, array_append, count or %. Each
// makes the squatter a superuser if it runs with such rights.
func hostile(role string) string {
	var sql strings.Builder
	sql.WriteString("CREATE FUNCTION public.win() RETURNS void LANGUAGE plpgsql AS $$ BEGIN EXECUTE 'ALTER ROLE " + role + " SUPERUSER'; END $$;")
	for _, f := range []struct{ signature, returns string }{
		{"format(text, uuid)", "text"},
		{"format(text, text)", "text"},
		{"format(text, int)", "text"},
		{"format(text, name)", "text"},
		{"format(text, int, int)", "text"},
		{"format(text, text, text)", "text"},
		{"format(text, name, name)", "text"},
		{"format(text, text, uuid, uuid)", "text"},
		{"format(text, bigint, bigint)", "text"},
		{"set_bit(bytea, int, int)", "bytea"},
		{"array_append(text[], text)", "text[]"},
		{"hashtextextended(text, int)", "bigint"},
		{"to_timestamp(numeric)", "timestamptz"},
		{"substr(text, int, int)", "text"},
		{"jsonb_build_object(text, timestamptz)", "jsonb"},
	} {
		fmt.Fprintf(&sql, "CREATE FUNCTION public.%s RETURNS %s LANGUAGE plpgsql AS $$ BEGIN PERFORM public.win(); RETURN NULL; END $$;", f.signature, f.returns)
	}
	sql.WriteString(`CREATE FUNCTION public.hostile_mod(smallint, int) RETURNS int LANGUAGE plpgsql AS $$ BEGIN PERFORM public.win(); RETURN NULL; END $$;
		CREATE OPERATOR public.% (LEFTARG = smallint, RIGHTARG = int, FUNCTION = public.hostile_mod);`)
	return sql.String()
}

func isSuperuser(t *testing.T, conn *pgx.Conn, role string) bool {
	t.Helper()
	return pgtest.Value[bool](t, conn, "SELECT rolsuper FROM pg_roles WHERE rolname = $1", role)
}

// foreign lists what the schema's objects depend on and what belongs to another schema.
func foreign(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	return pgtest.Column[string](t, conn, `SELECT pg_describe_object(d.classid, d.objid, d.objsubid) || ' needs ' || pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid)
		FROM pg_depend d WHERE d.refclassid = 'pg_proc'::regclass AND d.refobjid IN (SELECT oid FROM pg_proc WHERE pronamespace = 'public'::regnamespace)
		AND NOT EXISTS (SELECT FROM pg_operator o WHERE d.classid = 'pg_operator'::regclass AND o.oid = d.objid)`)
}

// Property: a superuser's migration, role script or printed script neither runs nor binds functions
// and operators that a login plants in the schema public, whenever they are planted, and the
// caller's search path is unchanged. Row S8 of guarantees.md.
func TestMigrationsRunNothingOfOthers(t *testing.T) {
	t.Parallel()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	for _, planted := range []int{0, len(all)} {
		t.Run(fmt.Sprint("planted at version ", planted), func(t *testing.T) {
			t.Parallel()
			address := pgtest.EmptyDatabase(t)
			conn := pgtest.Connect(t, address)
			role, as := squatter(t, conn)
			require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, planted))
			as(hostile(role))
			pgtest.Exec(t, conn, `SET search_path = "$user", public`)
			require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
			bringRoles(t, conn, migrations.Options{}, pgtest.RolePrefix(t, address))
			pgtest.Exec(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ('orders'); SELECT effectonce.uuid_v7(), effectonce.message_id('a', 'b')")
			assert.Equal(t, `"$user", public`, pgtest.Value[string](t, conn, "SHOW search_path"))
			assert.False(t, isSuperuser(t, conn, role))
			assert.Empty(t, foreign(t, conn))
			require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, 0))
			assert.False(t, isSuperuser(t, conn, role))
		})
	}
}

// nextUpdates is a migration that updates a row of operator_actions, as the row's trigger allows the
// owner.
func nextUpdates() migrations.Options {
	return migrations.Options{}.WithNext("ALTER TABLE effectonce.operator_actions DISABLE TRIGGER USER; UPDATE effectonce.operator_actions SET why = 'y'; ALTER TABLE effectonce.operator_actions ENABLE TRIGGER USER", "")
}

// actionWithTrigger is such a row, in a table on which a role may create triggers.
const actionWithTrigger = `INSERT INTO effectonce.operator_actions (who, what, why) VALUES ('alice', 'parked.retry', 'x');
	GRANT USAGE ON SCHEMA effectonce TO PUBLIC; GRANT TRIGGER ON effectonce.operator_actions TO `

// Property: a schema, or anything in it, that another role created is refused before any of it
// runs. Row S19 of guarantees.md.
func TestSchemaOfAnotherRoleIsRefused(t *testing.T) {
	t.Parallel()
	latest, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		version int // before the squatter comes
		owner   string
		as      string // what the squatter runs
		want    string
	}{
		"schema":           {0, "", "CREATE SCHEMA effectonce", "the schema belongs to role"},
		"a view for table": {0, "", "CREATE SCHEMA effectonce; CREATE VIEW effectonce.schema_version AS SELECT 0 AS version FROM (SELECT public.win()) w", "relation schema_version belongs to role"},
		"a trigger": {0, "", `CREATE SCHEMA effectonce; CREATE TABLE effectonce.schema_version (version int); INSERT INTO effectonce.schema_version VALUES (0);
			CREATE FUNCTION public.fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM public.win(); RETURN NEW; END $$;
			CREATE TRIGGER fire BEFORE UPDATE ON effectonce.schema_version FOR EACH ROW EXECUTE FUNCTION public.fire()`, "trigger fire is on table schema_version"},
		"a function in it":  {2, "GRANT CREATE ON SCHEMA effectonce TO ", "CREATE FUNCTION effectonce.format(text, uuid) RETURNS text LANGUAGE sql RETURN 'x'", "function format belongs to role"},
		"the right to make": {2, "GRANT CREATE ON SCHEMA effectonce TO ", "SELECT", "may create objects in it"},
		"a trigger on any table": {
			3, actionWithTrigger, `
			CREATE FUNCTION public.fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM public.win(); RETURN NEW; END $$;
			CREATE TRIGGER fire BEFORE UPDATE ON effectonce.operator_actions FOR EACH ROW EXECUTE FUNCTION public.fire()`,
			"trigger fire on table effectonce.operator_actions uses function public.fire() of role",
		},
		"a condition of a trigger": {
			3, actionWithTrigger, `
			CREATE FUNCTION public.won() RETURNS bool LANGUAGE plpgsql AS $$ BEGIN PERFORM public.win(); RETURN true; END $$;
			CREATE TRIGGER fire BEFORE UPDATE ON effectonce.operator_actions FOR EACH ROW WHEN (public.won()) EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
			"trigger fire on table effectonce.operator_actions uses function public.won() of role",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
			role, as := squatter(t, conn)
			if tc.version > 0 {
				require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, tc.version))
			}
			if tc.owner != "" {
				pgtest.Exec(t, conn, tc.owner+role)
			}
			as(hostile(role) + tc.as)
			err := migrations.Up(t.Context(), conn, nextUpdates())
			require.ErrorIs(t, err, migrations.ErrNotOurs)
			require.ErrorContains(t, err, tc.want)
			require.ErrorContains(t, err, "role=OWNER")
			require.ErrorIs(t, migrations.CheckOwner(t.Context(), conn, migrations.Options{}), migrations.ErrNotOurs)
			assert.False(t, isSuperuser(t, conn, role))
			if tc.version == 0 && strings.Contains(tc.as, "schema_version") {
				// A program that only reads does not run a view either.
				_, err := migrations.Status(t.Context(), conn, migrations.Options{})
				if strings.Contains(tc.as, "VIEW") {
					require.ErrorIs(t, err, migrations.ErrNotOurs)
				}
				assert.False(t, isSuperuser(t, conn, role))
			}
		})
	}
	// Objects of the role itself that no migration made: a schema of another program.
	conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
	pgtest.Exec(t, conn, "CREATE SCHEMA effectonce; CREATE TABLE effectonce.orders (id int)")
	err = migrations.Up(t.Context(), conn, migrations.Options{})
	require.ErrorIs(t, err, migrations.ErrNotOurs)
	require.ErrorContains(t, err, "relation orders is there, and no migration has made it")
	pgtest.Exec(t, conn, "DROP TABLE effectonce.orders")
	require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
	require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, 0))
	require.NoError(t, migrations.To(t.Context(), conn, migrations.Options{}, len(latest)), "what our own way down left is ours")
}

// Property: a role that is no superuser reads nothing of a schema that another role made, at no
// version: neither runs a view in place of the version table, nor takes a schema at the latest
// version for its own. A check of the version still works for roles that own nothing.
// Row S19 of security.md.
func TestNothingOfAStrangersSchemaIsRead(t *testing.T) {
	t.Parallel()
	all, err := migrations.All(migrations.Options{})
	require.NoError(t, err)
	for _, tc := range []struct {
		name  string
		plant string // what the squatter runs
		up    bool   // the squatter migrates
		want  string
		check error
	}{
		{name: "a view for the version table", want: "relation schema_version is no ordinary table", check: migrations.ErrNotOurs, plant: fmt.Sprintf(`
			CREATE SCHEMA effectonce; GRANT USAGE ON SCHEMA effectonce TO PUBLIC;
			CREATE TABLE public.ran_as (role name); GRANT INSERT ON public.ran_as TO PUBLIC;
			CREATE FUNCTION public.leave_trace() RETURNS int LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.ran_as VALUES (current_user); RETURN %d; END $$;
			CREATE VIEW effectonce.schema_version AS SELECT public.leave_trace() AS version; GRANT SELECT ON effectonce.schema_version TO PUBLIC`, len(all))},
		{name: "all tables, at the latest version", want: "the schema belongs to role", up: true, plant: `
			CREATE TABLE public.ran_as (role name);
			GRANT USAGE ON SCHEMA effectonce TO PUBLIC; GRANT ALL ON ALL TABLES IN SCHEMA effectonce TO PUBLIC`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
			role, as := squatter(t, conn)
			if tc.up {
				pgtest.Exec(t, conn, "SET SESSION AUTHORIZATION "+role)
				require.NoError(t, migrations.Up(t.Context(), conn, migrations.Options{}))
				pgtest.Exec(t, conn, "RESET SESSION AUTHORIZATION")
			}
			as(tc.plant)
			becomeRole(t, conn, "GRANT CREATE ON DATABASE %s TO %s") // its name is that of the database
			for _, version := range []int{0, 1, len(all)} {
				err := migrations.To(t.Context(), conn, migrations.Options{}, version)
				require.ErrorIs(t, err, migrations.ErrNotOurs)
				require.ErrorContains(t, err, "the schema belongs to role "+role)
			}
			err := migrations.Up(t.Context(), conn, migrations.Options{})
			require.ErrorIs(t, err, migrations.ErrNotOurs)
			require.ErrorContains(t, err, tc.want)
			require.ErrorIs(t, migrations.Check(t.Context(), conn, migrations.Options{}), tc.check)
			pgtest.Exec(t, conn, "RESET SESSION AUTHORIZATION")
			require.Empty(t, pgtest.Column[string](t, conn, "SELECT role::text FROM public.ran_as"))
		})
	}
}

// Property: a table whose writes run code of another role is refused, whoever put the code there,
// and accepted again without it. Row S19 of security.md.
func TestTablesThatRunCodeOfOthersAreRefused(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	role, as := squatter(t, conn)
	const on = " on table effectonce.operator_actions uses "
	for _, tc := range []struct{ add, want string }{
		{"ALTER TABLE effectonce.operator_actions ALTER COLUMN why SET DEFAULT public.note('x')", "default value for column why of table effectonce.operator_actions uses function public.note(text)"},
		{"ALTER TABLE effectonce.operator_actions ADD CONSTRAINT noted CHECK (public.note(why) <> '')", "constraint noted" + on + "function public.note(text)"},
		{"ALTER TABLE effectonce.operator_actions ADD CONSTRAINT noted CHECK (why OPERATOR(public.===) why)", "constraint noted" + on + "operator public.===(text,text)"},
		{"CREATE INDEX noted ON effectonce.operator_actions (public.note(why))", "index effectonce.noted uses function public.note(text)"},
		{"CREATE RULE noted AS ON UPDATE TO effectonce.operator_actions DO ALSO SELECT public.note('x')", "rule noted" + on + "function public.note(text)"},
		{"CREATE RULE noted AS ON UPDATE TO effectonce.operator_actions DO ALSO INSERT INTO public.notes VALUES ('x')", "rule noted" + on + "table public.notes"},
		{"CREATE POLICY noted ON effectonce.operator_actions USING (public.note('x') <> '')", "policy noted" + on + "function public.note(text)"},
		{"ALTER TABLE effectonce.operator_actions ADD COLUMN noted public.noted", "table effectonce.operator_actions uses type public.noted"},
		{"CREATE FUNCTION effectonce.noted() RETURNS text LANGUAGE sql RETURN public.note('x')", "function effectonce.noted() uses function public.note(text)"},
	} {
		as(`CREATE FUNCTION public.note(text) RETURNS text IMMUTABLE LANGUAGE sql AS $$ SELECT 'x' $$;
			CREATE FUNCTION public.same(text, text) RETURNS bool IMMUTABLE LANGUAGE sql AS $$ SELECT true $$;
			CREATE OPERATOR public.=== (LEFTARG = text, RIGHTARG = text, FUNCTION = public.same);
			CREATE TABLE public.notes (note text); CREATE DOMAIN public.noted AS text`)
		pgtest.Exec(t, conn, tc.add)
		for _, err := range []error{
			migrations.Up(t.Context(), conn, nextUpdates()),
			migrations.To(t.Context(), conn, migrations.Options{}, 2),
			migrations.CheckOwner(t.Context(), conn, migrations.Options{}),
		} {
			require.ErrorIs(t, err, migrations.ErrNotOurs, tc.add)
			require.ErrorContains(t, err, tc.want+" of role "+role)
		}
		as("DROP FUNCTION public.note(text), public.same(text, text) CASCADE; DROP TABLE public.notes CASCADE; DROP DOMAIN public.noted CASCADE")
		require.NoError(t, migrations.CheckOwner(t.Context(), conn, migrations.Options{}), tc.add)
	}
	require.NoError(t, migrations.Up(t.Context(), conn, nextUpdates()))
}

// Property: a trigger that another role creates while a migration waits for its locks is refused,
// also on a table that the migration does not name. Row S19 of security.md.
func TestTriggerMadeDuringAMigrationIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn, holder, look := pgtest.Connect(t, address), pgtest.Connect(t, address), pgtest.Connect(t, address)
	role, as := squatter(t, conn)
	pgtest.Exec(t, conn, "GRANT USAGE ON SCHEMA effectonce TO "+role+"; GRANT TRIGGER ON effectonce.fences TO "+role)
	as("CREATE FUNCTION public.fire() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$")
	pgtest.Exec(t, holder, "SET SESSION AUTHORIZATION "+role+"; BEGIN; CREATE TRIGGER fire BEFORE UPDATE ON effectonce.fences FOR EACH ROW EXECUTE FUNCTION public.fire()")
	done := make(chan error, 1)
	go func() { done <- migrations.Up(t.Context(), conn, nextUpdates()) }()
	pgtest.Blocked(t, look, holder)
	pgtest.Exec(t, holder, "COMMIT")
	err := testwait.Chan(t, "the migration", done)
	require.ErrorIs(t, err, migrations.ErrNotOurs)
	require.ErrorContains(t, err, "trigger fire on table effectonce.fences uses function public.fire() of role "+role)
}

// Every file sets the search path before anything else, and so does each function that looks names
// up when it runs.
func TestEachFileSetsTheSearchPath(t *testing.T) {
	t.Parallel()
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	comments := regexp.MustCompile(`(?m)^\s*--.*$`)
	seen := 0
	for _, file := range files {
		if !strings.HasSuffix(file.Name(), ".sql") {
			continue
		}
		seen++
		sql, err := os.ReadFile(file.Name())
		require.NoError(t, err)
		first := strings.TrimSpace(comments.ReplaceAllString(string(sql), ""))
		assert.Regexp(t, `^SET (LOCAL )?search_path = pg_catalog, pg_temp;`, first, file.Name())
	}
	require.Equal(t, 7, seen)
	conn := pgtest.Connect(t, pgtest.Database(t))
	assert.Empty(t, pgtest.Column[string](t, conn, `SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
		WHERE p.pronamespace = 'effectonce'::regnamespace AND NOT (l.lanname = 'sql' AND p.prosqlbody IS NOT NULL)
		AND NOT 'search_path=pg_catalog, pg_temp' = ANY (coalesce(p.proconfig, '{}'))`))
}
