//go:build linux || darwin

package servers

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// StartStandby starts a streaming standby of an embedded PostgreSQL, with the same settings and
// logins, and returns once it answers queries. It crashes and restarts the primary to copy its
// files. The caller has to call Stop. Promote it with pg_promote.
func StartStandby(ctx context.Context, primary *Postgres) (*Postgres, error) {
	source, ok := primary.backend.(*cluster)
	if !ok {
		return nil, fmt.Errorf("start a standby: the primary is %s, want %s", primary.Kind, KindEmbedded)
	}
	u, err := url.Parse(primary.URL)
	if err != nil {
		return nil, errors.New("start a standby: the primary's address is no URL") // the error would show the password
	}
	p := &Postgres{Server: Server{Kind: KindEmbedded}}
	p.ready = p.connect
	err = launch(ctx, func(port int) (*Server, error) {
		if err := primary.Kill(ctx); err != nil {
			return nil, err
		}
		copied, err := source.copy(ctx, u)
		if err = errors.Join(err, primary.Restart(ctx)); err != nil {
			return nil, err
		}
		copied.flags = append(slices.Clone(source.flags), "-c", fmt.Sprintf("port=%d", port)) // the last one counts
		own := *u
		own.Host = fmt.Sprintf("127.0.0.1:%d", port)
		p.URL, p.backend = own.String(), copied
		return &p.Server, nil
	})
	if err != nil {
		return nil, fmt.Errorf("start a standby: %w", err)
	}
	return p, nil
}

// copy copies the files of a cluster that does not run, to be a standby of it at its address.
func (c *cluster) copy(ctx context.Context, primary *url.URL) (_ *cluster, err error) {
	dir, err := os.MkdirTemp("", "effectonce-postgres-data-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	second := &cluster{dir: dir, binaries: c.binaries, clock: c.clock}
	if output, err := exec.CommandContext(ctx, "cp", "-a", c.data(), second.data()).CombinedOutput(); err != nil { //nolint:gosec // with its owner; both are ours
		return nil, fmt.Errorf("copy the primary's files: %w: %s", err, output)
	}
	// ALTER SYSTEM changes this file, so primary_conninfo can be changed while the standby runs.
	password, _ := primary.User.Password()
	settings := fmt.Sprintf("primary_conninfo = 'host=%s port=%s user=%s password=%s'\n", primary.Hostname(), primary.Port(), primary.User.Username(), password)
	for name, text := range map[string]string{"standby.signal": "", "postgresql.auto.conf": settings} {
		file := filepath.Join(second.data(), name)
		if err := errors.Join(os.WriteFile(file, []byte(text), 0o600), giveAway(file)); err != nil {
			return nil, err
		}
	}
	if err := os.Remove(filepath.Join(second.data(), "postmaster.pid")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return second, giveAway(dir)
}
