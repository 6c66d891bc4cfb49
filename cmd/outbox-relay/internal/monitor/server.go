package monitor

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Limits of the server.
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

// Server serves /healthz, /readyz and /metrics.
type Server struct {
	cfg Config

	mu   sync.Mutex
	pool *pgxpool.Pool // nil until the program has connected
	last answer
}

// New returns a server.
func New(cfg Config) *Server {
	return &Server{cfg: cfg}
}

// Ask sets the database that readiness checks. The server uses the pool until Run has returned.
func (s *Server) Ask(pool *pgxpool.Pool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pool, s.last = pool, answer{}
}

// Run serves until ctx ends, then closes the listener and waits at most a second for responses in
// progress.
func (s *Server) Run(ctx context.Context, listener net.Listener) error {
	server := &http.Server{
		Handler:           s.Handler(),
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
	return http.MaxBytesHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		mux.ServeHTTP(w, r)
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
