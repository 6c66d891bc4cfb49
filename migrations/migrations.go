package migrations

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// DefaultSchema is the schema that holds every table unless another one is configured.
const DefaultSchema = "effectonce"

// Options of Up, To, All, Status and Check. The zero value works.
type Options struct {
	// Schema holds the tables. Default "effectonce". At most 49 bytes of lower-case letters, digits
	// and underscores, not starting with a digit or "pg_".
	Schema string
	// LockWaitMax bounds how long Up and To retry while other transactions hold locks on the
	// tables. Default 5 minutes; the context may end it earlier.
	LockWaitMax time.Duration
	// Logger of Up and To: it logs the locks that a migration waits for. Default slog.Default().
	Logger *slog.Logger

	next *Migration // behind those of this release; only tests set it
}

var (
	// ErrTooOld is returned by Check: the database lacks migrations that this program needs, or has
	// no effectonce schema at all. Nothing was changed. Remedy: run "outbox-relay migrate up".
	ErrTooOld = errors.New("database schema is too old")
	// ErrTooNew is returned by Check and Up: a newer release migrated the database to a version
	// that this program does not work with (State.Oldest). To returns it for every newer version.
	// Nothing was changed. Remedy: update this program, or migrate down with the newer release.
	ErrTooNew = errors.New("database schema is too new")
)

// Migration is one numbered step, as psql could run it.
type Migration struct {
	Version int
	Name    string
	Up      string
	Down    string
}

// State is what Status reports.
type State struct {
	Schema  string // name of the schema
	Current int    // version of the database; 0: nothing is installed
	Latest  int    // newest version that this program contains
	// Oldest is the oldest version whose programs work with this database. It is read only if
	// Current is above Latest. Otherwise, and if the database does not contain it, it is 0.
	Oldest int
}

// Compatible reports whether a newer release migrated the database and this program still works
// with it.
func (s State) Compatible() bool {
	return s.Current > s.Latest && s.Oldest > 0 && s.Oldest <= s.Latest
}

//go:embed *.sql
var files embed.FS

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,48}$`)

// Resolve returns the schema name to use, or an error that names the bound. Every package of the
// module that takes a schema passes it through here.
func (o Options) Resolve() (string, error) {
	name := cmp.Or(o.Schema, DefaultSchema)
	if !schemaName.MatchString(name) || strings.HasPrefix(name, "pg_") {
		return "", fmt.Errorf("schema %q: want at most 49 lower-case letters, digits and underscores, not starting with a digit or pg_", name)
	}
	return name, nil
}

var schemaWord = regexp.MustCompile(`\b` + DefaultSchema + `\b`)

// InSchema rewrites statements that are written for the default schema: each word "effectonce"
// becomes the quoted name. The name must come from Resolve.
func InSchema(sql, schema string) string {
	if schema == DefaultSchema {
		return sql
	}
	return schemaWord.ReplaceAllLiteralString(sql, pgx.Identifier{schema}.Sanitize())
}

// All returns the migrations in order, for the schema of opts.
func All(opts Options) ([]Migration, error) {
	schema, err := opts.Resolve()
	if err != nil {
		return nil, err
	}
	names, err := fs.Glob(files, "*.up.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	slices.Sort(names)
	all := make([]Migration, 0, len(names))
	for i, name := range names {
		base := strings.TrimSuffix(name, ".up.sql")
		up, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read migration %s: %w", name, err)
		}
		down, err := files.ReadFile(base + ".down.sql")
		if err != nil {
			return nil, fmt.Errorf("read migration %s: %w", base, err)
		}
		all = append(all, Migration{
			Version: i + 1, Name: base,
			Up: InSchema(string(up), schema), Down: InSchema(string(down), schema),
		})
	}
	if o := opts.next; o != nil {
		all = append(all, Migration{Version: len(all) + 1, Name: o.Name, Up: InSchema(o.Up, schema), Down: InSchema(o.Down, schema)})
	}
	return all, nil
}
