package monitor

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Limits of the server. Profiles set a later write deadline themselves.
const (
	headerMax      = 5 * time.Second
	readMax        = 10 * time.Second
	writeMax       = 30 * time.Second
	idleMax        = 2 * time.Minute
	headerBytesMax = 16 << 10
	bodyBytesMax   = 1 << 10
	shutdownMax    = time.Second
)

// Config of a Server.
type Config struct {
	Relay   string // name of the relay
	Schema  string
	State   *State
	Metrics http.Handler
	Logger  *slog.Logger
}

// Server serves /healthz, /readyz and /metrics, and profiles on another listener.
type Server struct {
	cfg      Config
	database *database
}

// New returns a server.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, database: &database{relay: cfg.Relay, schema: cfg.Schema}}
}

// Ask sets the database that readiness checks. The server uses the pool until Run has returned.
func (s *Server) Ask(pool *pgxpool.Pool) { s.database.use(pool) }

// Run serves until ctx ends, then closes the listener and waits at most a second for responses in
// progress.
func (s *Server) Run(ctx context.Context, listener net.Listener) error {
	return s.serve(ctx, listener, s.Handler())
}

// RunProfiles serves /debug/pprof/ in the same way. It asks for no password: listen on a loopback
// address.
func (s *Server) RunProfiles(ctx context.Context, listener net.Listener) error {
	return s.serve(ctx, listener, Profiles())
}

func (s *Server) serve(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: headerMax,
		ReadTimeout:       readMax,
		WriteTimeout:      writeMax,
		IdleTimeout:       idleMax,
		MaxHeaderBytes:    headerBytesMax,
		ErrorLog:          slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	stopped := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		defer close(stopped)
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownMax)
		defer cancel()
		if server.Shutdown(limited) != nil {
			_ = server.Close() // readers had their time
		}
	})
	err := server.Serve(listener)
	if cancel() {
		return fmt.Errorf("serve on %s: %w", listener.Addr(), err)
	}
	<-stopped
	return nil
}

// Handler serves all paths, and only GET and HEAD.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", s.health)
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		v := s.readiness(r.Context())
		s.answer(w, v.Ready, v)
	})
	mux.Handle("GET /metrics", s.cfg.Metrics)
	return careful(mux)
}

// Profiles serves /debug/pprof/, and only GET and HEAD. It leaves out /cmdline: flags may contain
// passwords. Index serves the other profiles by name.
func Profiles() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return careful(mux)
}

func careful(handler http.Handler) http.Handler {
	return http.MaxBytesHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		handler.ServeHTTP(w, r)
	}), bodyBytesMax)
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	stuck := s.cfg.State.stuck()
	reasons := []string{}
	if stuck != "" {
		reasons = append(reasons, stuck)
	}
	s.answer(w, stuck == "", map[string]any{"alive": stuck == "", "reasons": reasons})
}

func (s *Server) answer(w http.ResponseWriter, well bool, v any) {
	w.Header().Set("Content-Type", "application/json")
	if !well {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	if err := json.NewEncoder(w).Encode(v); err != nil {
		s.cfg.Logger.Debug("response could not be written", "error", err)
	}
}
