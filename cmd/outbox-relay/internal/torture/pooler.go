package torture

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/servers"
)

// poolerKinds are the faults of a scene with a pooler.
func poolerKinds() []kind {
	return []kind{{"kill-pooler", 5, 0, 2 * time.Second, func(s scene.Scene, _ Abilities) bool { return s.Pooler > 0 }}}
}

// startPooler starts the pooler of a scene that has one. Its connections to the server are short-lived, so that
// each process meets those of others all the time.
func (c *crew) startPooler(ctx context.Context, s *site, sc scene.Scene) (err error) {
	if sc.Pooler == 0 {
		return nil
	}
	_, version, err := servers.FindPooler(ctx)
	if err != nil {
		return err
	}
	settings := []string{fmt.Sprintf("default_pool_size = %d", sc.Pooler), "server_lifetime = 3", "server_idle_timeout = 1", "log_connections = 0", "log_disconnections = 0"}
	if servers.PoolerPrepares(version) {
		settings = append(settings, "max_prepared_statements = 100")
	}
	passwords := map[string]string{}
	for _, login := range logins {
		passwords[loginPrefix+login] = s.secret
	}
	c.pooler, err = servers.StartPooler(ctx, servers.PoolerOptions{DatabaseURL: s.databaseURL, Logins: passwords, Settings: settings})
	return err
}

// pooled lets a process use the pooler, if there is one.
func (c *crew) pooled(j *worker.Job) error {
	if c.pooler == nil {
		return nil
	}
	through, err := url.Parse(c.pooler.URL)
	if err != nil {
		return err
	}
	u, err := url.Parse(j.DatabaseURL)
	if err != nil {
		return err
	}
	u.Host = through.Host
	if query := u.Query(); !servers.PoolerPrepares(c.pooler.Version) {
		query.Set("default_query_exec_mode", "cache_describe")
		u.RawQuery = query.Encode()
	}
	j.DatabaseURL = u.String()
	return nil
}

// killPooler ends the pooler like a crash, and starts it again.
func (n *nemesis) killPooler(ctx context.Context, lasts time.Duration) error {
	n.servers.Lock()
	defer n.servers.Unlock()
	err := n.pooler.Kill(ctx)
	pause.For(ctx, lasts)
	return errors.Join(err, n.pooler.Restart(ctx))
}

// sessionsEndMax bounds the end of the sessions of a pooler that is gone.
const sessionsEndMax = 5 * time.Second

// endSessionsOfPooler ends the pooler when no process is left, and waits for the end of its idle sessions.
// What stays after that is for the judge.
func (r *round) endSessionsOfPooler(ctx context.Context) error {
	if r.pooler == nil {
		return nil
	}
	if err := r.stopPooler(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, sessionsEndMax)
	defer cancel()
	for left := 1; left > 0 && pause.For(ctx, 20*time.Millisecond); {
		if err := r.site.pool.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename ^@ $1`, loginPrefix).Scan(&left); err != nil {
			return err
		}
	}
	return nil
}
