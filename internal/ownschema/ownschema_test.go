package ownschema_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const (
	schema = "effectonce_example"
	maker  = "examples/example"
	tables = `CREATE TABLE IF NOT EXISTS effectonce_example.orders (id int); TRUNCATE effectonce_example.orders;
		CREATE OR REPLACE FUNCTION one() RETURNS int RETURN 1;`
)

// Property: programs that open a database at once, and again, all get the schema; what is written
// there without a schema's name is in it, and not in a user's table of the same name.
func TestNamesWithoutASchemaAreItsOwn(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, `CREATE TABLE orders AS SELECT generate_series(1, 500) AS id`)
	var opening sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		opening.Go(func() {
			pool, err := ownschema.Open(t.Context(), address, schema, maker, tables)
			if err == nil {
				_, err = pool.Exec(t.Context(), `INSERT INTO orders VALUES (0)`)
				pool.Close()
			}
			errs[i] = err
		})
	}
	opening.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	pool, err := ownschema.Connect(t.Context(), address, schema)
	require.NoError(t, err)
	defer pool.Close()
	require.Equal(t, 500, pgtest.Count(t, pool, `SELECT count(*) FROM public.orders`))
	require.Zero(t, pgtest.Count(t, pool, `SELECT count(*) FROM public.orders WHERE id = 0`))
	require.NotZero(t, pgtest.Count(t, pool, `SELECT count(*) FROM orders`))
}

// Property: a schema of the name without the maker's mark is refused with the remedy, and is as it
// was; so is one that another maker marked, and the schema of effectonce itself.
func TestSchemasOfOthersAreRefused(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"no comment":      `SELECT`,
		"another comment": `COMMENT ON SCHEMA effectonce_example IS 'made by hand'`,
		"another maker":   `COMMENT ON SCHEMA effectonce_example IS 'made by examples/other of effectonce, which may empty or drop it'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := pgtest.EmptyDatabase(t)
			conn := pgtest.Connect(t, address)
			pgtest.Exec(t, conn, `CREATE SCHEMA effectonce_example; CREATE TABLE effectonce_example.orders AS SELECT generate_series(1, 500) AS id`)
			pgtest.Exec(t, conn, sql)
			_, err := ownschema.Open(t.Context(), address, schema, maker, tables)
			require.ErrorIs(t, err, ownschema.ErrNotOwn)
			require.ErrorContains(t, err, `ALTER SCHEMA "effectonce_example" RENAME TO`)
			require.ErrorIs(t, ownschema.MakeNew(t.Context(), conn, schema, maker), ownschema.ErrNotOwn)
			var rows, relations int
			require.NoError(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM effectonce_example.orders),
				(SELECT count(*) FROM pg_class WHERE relnamespace = 'effectonce_example'::regnamespace)`).Scan(&rows, &relations))
			require.Equal(t, []int{500, 1}, []int{rows, relations})
		})
	}
}

// Property: MakeNew does not even take a schema that its maker made: another run may be in it.
func TestNewMeansNew(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.EmptyDatabase(t))
	require.NoError(t, ownschema.MakeNew(t.Context(), conn, schema, maker))
	require.ErrorIs(t, ownschema.MakeNew(t.Context(), conn, schema, maker), ownschema.ErrNotOwn)
	require.NoError(t, ownschema.Make(t.Context(), conn, schema, maker))
}

// Property: where the parameter search_path is lost on the way, as in a pooler that ignores it, no
// connection is handed out.
func TestLostSearchPathIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.EmptyDatabase(t)
	pool, err := ownschema.Connect(t.Context(), address, schema) // the schema is missing, so that the path leads nowhere
	require.NoError(t, err)
	defer pool.Close()
	_, err = pool.Exec(t.Context(), `CREATE TABLE orders (id int)`)
	require.ErrorContains(t, err, "search_path")
}
