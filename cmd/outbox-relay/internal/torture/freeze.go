package torture

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
)

// someSessionSQL prefers what a statement runs in.
const someSessionSQL = `-- torture.some_session
SELECT pid, application_name FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^(producer|relay|consumer|service)-' ORDER BY state = 'active' DESC, random() LIMIT 1`

// freezeBackend freezes a server process of PostgreSQL, whatever it holds.
func (n *nemesis) freezeBackend(ctx context.Context, f Fault) (string, error) {
	var pid int
	var whose string
	if err := n.pool.QueryRow(ctx, someSessionSQL).Scan(&pid, &whose); errors.Is(err, pgx.ErrNoRows) {
		return "", errSkipped
	} else if err != nil {
		return "", err
	}
	role, _, _ := strings.Cut(whose, "-") // it cannot answer, as if it were frozen itself
	if err := n.ledger.Write(ledger.Frozen, role); err != nil {
		return whose, err
	}
	n.servers.Lock()
	err := n.arena.signal(ctx, "STOP", pid)
	n.servers.Unlock()
	if err != nil {
		return whose, err
	}
	pause.For(ctx, f.For)
	n.servers.Lock()
	defer n.servers.Unlock()
	_ = n.arena.signal(context.WithoutCancel(ctx), "CONT", pid) // it may be gone, with its server
	return "that of " + whose, nil
}

// signal sends a signal to a process of the database's server.
func (a *arena) signal(ctx context.Context, name string, pid int) error {
	if a.postgres.Kind == servers.KindContainer {
		_, err := a.postgres.Exec(ctx, "sh", "-c", fmt.Sprintf("kill -%s %d", name, pid))
		return err
	}
	return exec.CommandContext(ctx, "kill", "-"+name, strconv.Itoa(pid)).Run() //nolint:gosec // our own values
}
