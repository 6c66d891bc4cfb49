package servers

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// Pooler is a running PgBouncer.
type Pooler struct {
	Server
	// URL leads through it to the database of PoolerOptions.DatabaseURL, as that one's user.
	URL     string
	Version string // as 1.24.1
}

// PoolerOptions describe a PgBouncer.
type PoolerOptions struct {
	// DatabaseURL of a user with a password, who may also use PgBouncer's console. Other databases of
	// the server are reached under their names.
	DatabaseURL string
	Logins      map[string]string // passwords of others who may connect, by name
	Settings    []string          // lines of [pgbouncer]; the last of several for one setting counts
}

// ErrNoPooler means that there is no PgBouncer on this machine.
var ErrNoPooler = errors.New("there is no pgbouncer on this machine: install it (Debian: apt-get install pgbouncer), or name one in PGBOUNCER")

// FindPooler returns the PgBouncer that the variable PGBOUNCER names, or the one of this machine, and
// its version. Without one the error is ErrNoPooler.
func FindPooler(ctx context.Context) (binary, version string, err error) {
	binary = env("PGBOUNCER")
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} { // not in every user's path
		if binary != "" {
			break
		}
		if found, err := exec.LookPath(name); err == nil {
			binary = found
		}
	}
	if binary == "" {
		return "", "", ErrNoPooler
	}
	output, err := exec.CommandContext(ctx, binary, "--version").Output()
	if err != nil {
		return "", "", fmt.Errorf("run %s: %w", binary, err)
	}
	line, _, _ := strings.Cut(string(output), "\n")
	return binary, strings.TrimPrefix(line, "PgBouncer "), nil
}

// PoolerPrepares reports whether a PgBouncer of a version knows prepared statements in transaction
// mode (max_prepared_statements), as 1.21 and later do.
func PoolerPrepares(version string) bool {
	var major, minor int
	_, err := fmt.Sscanf(version, "%d.%d", &major, &minor)
	return err == nil && (major > 1 || minor >= 21)
}
