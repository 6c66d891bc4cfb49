package torture

import (
	"context"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
)

// bank is the foreign system: it writes down every call and its key. It loses some answers after it
// acted, and refuses some calls.
type bank struct {
	url    string
	ledger *ledger.Writer
	server *http.Server
}

func openBank(ctx context.Context, dir string) (*bank, error) {
	book, err := ledger.Open(dir, "bank")
	if err != nil {
		return nil, err
	}
	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	b := &bank{url: "http://" + listener.Addr().String(), ledger: book}
	b.server = &http.Server{Handler: http.HandlerFunc(b.answer), ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = b.server.Serve(listener) }() // until close
	return b, nil
}

func (b *bank) answer(w http.ResponseWriter, r *http.Request) {
	key, what := r.Header.Get("Idempotency-Key"), strings.TrimPrefix(r.URL.Path, "/")
	// Which calls go wrong follows from the key's first bytes and the time: no two attempts are alike.
	fate := time.Now().UnixMicro() % 100
	if fate < 3 {
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return
	}
	if err := b.ledger.Write(ledger.Called, key, what); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	switch {
	case fate < 5:
		http.Error(w, "the answer is lost", http.StatusGatewayTimeout)
	case fate < 6:
		panic(http.ErrAbortHandler) // the client's transport repeats the call by itself
	}
}

func (b *bank) close() error {
	_ = b.server.Close()
	return b.ledger.Close()
}
