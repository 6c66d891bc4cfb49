package servers

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"strings"
)

// dumpScript dumps a database and restores it into an empty one. $1 and $2 are their URLs, $3 is the
// directory of the programs; empty: that of the path.
const dumpScript = `set -e
PATH="${3:+$3:}$PATH"
file=$(mktemp)
trap 'rm -f "$file"' EXIT
pg_dump --format=custom --file="$file" --dbname="$1"
pg_restore --exit-on-error --dbname="$2" "$file"`

// dumper runs a script where the programs of PostgreSQL are.
type dumper struct {
	before []string // what comes before the name of a program
	dir    string   // of the programs
}

// dumper finds pg_dump and pg_restore of the server's version: these programs refuse a server that is
// newer than they are. PG_PROGRAMS may name their directory.
func (p *Postgres) dumper(ctx context.Context) (dumper, error) {
	_, version, _ := strings.Cut(p.Description, "PostgreSQL ")
	major, _, _ := strings.Cut(version, ".")
	all := []dumper{{dir: env("PG_PROGRAMS")}, {}, {dir: "/usr/lib/postgresql/" + major + "/bin"}}
	if major == "18" { // that of the image
		all = append(all, dumper{before: []string{"docker", "run", "--rm", "--pull=never", "--network=host", postgresImage}})
	}
	for _, d := range all {
		output, err := d.script(ctx, `PATH="${1:+$1:}$PATH" pg_dump --version`, d.dir).Output()
		if err == nil && strings.Contains(string(output), ") "+major+".") {
			return d, nil
		}
	}
	return dumper{}, fmt.Errorf("there is no pg_dump of PostgreSQL %s on this machine: name its directory in PG_PROGRAMS", major)
}

func (d dumper) script(ctx context.Context, script string, args ...string) *exec.Cmd {
	all := append(append(d.before[:len(d.before):len(d.before)], "sh", "-c", script, "sh"), args...)
	return exec.CommandContext(ctx, all[0], all[1:]...) //nolint:gosec // our own values
}

// CanDump returns why DumpInto would not work; nil: it would.
func (p *Postgres) CanDump(ctx context.Context) error {
	if p.dumpsInside(ctx) {
		return nil
	}
	_, err := p.dumper(ctx)
	return err
}

// dumpsInside reports whether the server's own container has pg_dump.
func (p *Postgres) dumpsInside(ctx context.Context) bool {
	if p.Kind != KindContainer {
		return false
	}
	_, err := p.Exec(ctx, "pg_dump", "--version")
	return err == nil
}

// DumpInto copies a database of the server into an empty one, with pg_dump and pg_restore.
func (p *Postgres) DumpInto(ctx context.Context, from, to string) error {
	u, err := url.Parse(p.URL)
	if err != nil {
		return errors.New("dump a database: the server's address is no URL") // the error would show the password
	}
	inside := p.dumpsInside(ctx)
	at := func(database string) string {
		own := *u
		if own.Path = "/" + database; inside {
			own.Host = "127.0.0.1:5432"
		}
		return own.String()
	}
	if inside {
		_, err := p.Exec(ctx, "sh", "-c", dumpScript, "sh", at(from), at(to), "")
		return p.hide(err)
	}
	d, err := p.dumper(ctx)
	if err != nil {
		return err
	}
	output, err := d.script(ctx, dumpScript, at(from), at(to), d.dir).CombinedOutput()
	if err != nil {
		return p.hide(fmt.Errorf("dump a database: %w: %s", err, tail(output)))
	}
	return nil
}

// hide removes the server's password from an error's text.
func (p *Postgres) hide(err error) error {
	u, parseErr := url.Parse(p.URL)
	if err == nil || parseErr != nil || u.User == nil {
		return err
	}
	password, _ := u.User.Password()
	if password == "" || !strings.Contains(err.Error(), password) {
		return err
	}
	return errors.New(strings.ReplaceAll(err.Error(), password, "..."))
}
