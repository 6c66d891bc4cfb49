package handlertx_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/handlertx"
)

// Property: statements end where PostgreSQL ends them: not in a comment, a literal, a name or a body.
func TestStatements(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string][]string{
		`SELECT 1`:                        {`SELECT 1`},
		`;`:                               nil,
		`SELECT 1; ROLLBACK TO a -- back`: {`SELECT 1`, `ROLLBACK TO a`},
		"-- lock; set it; release it\nUPDATE t SET a = 1;": {`UPDATE t SET a = 1`},
		`/* a; /* set b; */ c; */ SELECT 1`:                {`SELECT 1`},
		`SELECT 'it''s; set', "a;""b", 2; SET x = 1`:       {`SELECT 'it''s; set', "a;""b", 2`, `SET x = 1`},
		`SELECT E'a\'; set b', e'\\'; SELECT 'a\'; SET b`:  {`SELECT E'a\'; set b', e'\\'`, `SELECT 'a\'`, `SET b`},
		`SELECT type'a;b'; SELECT 1`:                       {`SELECT type'a;b'`, `SELECT 1`},
		`DO $$ BEGIN SET x = 1; END $$; SELECT $1`:         {`DO $$ BEGIN SET x = 1; END $$`, `SELECT $1`},
		`SELECT $f$ ; $$ ; $f$; SELECT a$b$; SELECT c$b$`:  {`SELECT $f$ ; $$ ; $f$`, `SELECT a$b$`, `SELECT c$b$`},
		`SELECT 'open; set`:                                {`SELECT 'open; set`},
		`SELECT 1 /* open; set`:                            {`SELECT 1`},
	} {
		require.Equal(t, want, handlertx.Statements(sql), sql)
	}
	for sql, want := range map[string][2]bool{
		"-- lock; set it\nUPDATE t SET a = 1": {false, false},
		`INSERT INTO t VALUES ('a; set b')`:   {false, false},
		`SELECT 1; SET LOCAL ROLE x`:          {true, false},
		`SELECT 1; SET ROLE x; SELECT 2`:      {true, true},
	} {
		changes, lasts := handlertx.Session(sql)
		require.Equal(t, want, [2]bool{changes, lasts}, sql)
	}
}
