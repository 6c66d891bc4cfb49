package command

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/metrics"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/monitor"
	"github.com/effectonce/effectonce/relay"
)

// watchConnections are database connections for metrics and readiness, so that neither waits for
// the relay's connections, nor takes them from it.
const watchConnections = 2

// watch serves health and metrics until the relay has stopped. Nil does nothing: --listen off.
type watch struct {
	at      net.Addr
	state   *monitor.State
	metrics *metrics.Metrics
	server  *monitor.Server
	pool    *pgxpool.Pool // nil until begin

	stops []context.CancelFunc
	work  sync.WaitGroup
}

// openWatch listens before anything else happens, so that probes see a starting replica.
func (r *runner) openWatch(ctx context.Context, logger *slog.Logger) (*watch, error) {
	if r.endpoints.addr == "" {
		return nil, nil //nolint:nilnil // see watch
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", r.endpoints.addr)
	switch {
	case err != nil && r.endpoints.listen.Changed:
		return nil, fmt.Errorf("cannot listen on %s: %w: give another --listen, or off", r.endpoints.addr, err)
	case err != nil:
		// The address is only the default: another relay on this machine must not prevent
		// publishing.
		logger.WarnContext(ctx, "no /healthz, /readyz and /metrics: the default address is in use; give --listen", "error", err)
		return nil, nil //nolint:nilnil // see watch
	}
	state := monitor.NewState()
	w := &watch{at: listener.Addr(), state: state, metrics: metrics.New(metrics.Config{
		Relay: r.Relay, Schema: r.Schema, Version: readVersion().Version, Every: r.endpoints.every, Logger: logger, State: state,
	})}
	w.server = monitor.New(monitor.Config{Relay: r.Relay, Schema: r.Schema, State: w.state, Metrics: w.metrics.Handler(), Logger: logger})
	if r.endpoints.pprof != "" {
		profiles, err := config.Listen(ctx, "tcp", r.endpoints.pprof)
		if err != nil {
			_ = listener.Close()
			return nil, fmt.Errorf("cannot listen on %s: %w: give another --pprof-address", r.endpoints.pprof, err)
		}
		w.serve(ctx, logger, "/debug/pprof/", profiles, w.server.RunProfiles)
		logger.InfoContext(ctx, "listening for /debug/pprof/", "pprof_address", profiles.Addr().String())
	}
	w.serve(ctx, logger, "/healthz, /readyz and /metrics", listener, w.server.Run)
	return w, nil
}

func (w *watch) serve(ctx context.Context, logger *slog.Logger, what string, listener net.Listener, run func(context.Context, net.Listener) error) {
	lives := w.lives(ctx)
	w.work.Go(func() {
		if err := run(lives, listener); err != nil {
			logger.ErrorContext(ctx, what+" stopped", "error", err)
		}
	})
}

// lives returns a context that close ends, later than the relay's.
func (w *watch) lives(ctx context.Context) context.Context {
	lives, stop := context.WithCancel(context.WithoutCancel(ctx))
	w.stops = append(w.stops, stop)
	return lives
}

func (w *watch) hooks() relay.Hooks {
	if w == nil {
		return relay.Hooks{}
	}
	return w.metrics.Hooks()
}

// begin also starts to watch the database of the relay's pool.
func (w *watch) begin(ctx context.Context, pool *pgxpool.Pool, logger *slog.Logger) error {
	if w == nil {
		return nil
	}
	reach := "this machine"
	if !loopback(w.at) {
		reach = "other machines too"
	}
	logger.InfoContext(ctx, "listening for /healthz, /readyz and /metrics", "address", w.at.String(), "reachable_from", reach)
	config := pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = watchConnections, 0, 0
	lives := w.lives(ctx)
	own, err := pgxpool.NewWithConfig(lives, config)
	if err != nil {
		return err
	}
	w.pool = own
	w.server.Ask(own)
	w.work.Go(func() { w.metrics.Watch(lives, own) })
	w.state.Running()
	context.AfterFunc(ctx, w.state.Draining)
	return nil
}

// close stops everything. Call it after the relay has stopped.
func (w *watch) close() {
	if w == nil {
		return
	}
	for _, stop := range w.stops {
		stop()
	}
	w.work.Wait()
	if w.pool != nil {
		w.pool.Close()
	}
}
