package httpkey

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

var (
	// ErrStreaming is returned to a handler that flushes or hijacks: nothing may reach the client
	// before COMMIT. The request fails, whatever the handler does with the error: rolled back,
	// nothing stored, status 500.
	ErrStreaming = errors.New("the response of a request with an idempotency key cannot be streamed: it is sent after COMMIT, in one piece")
	// ErrResponseTooLarge is returned to a handler whose response exceeds 8 MiB, or
	// Operation.ResponseBytesMax if that is larger. The request fails in the same way. A body that is
	// larger than Operation.ResponseBytesMax alone reaches the first client, and is not stored.
	ErrResponseTooLarge = errors.New("the response is larger than 8 MiB, and than Operation.ResponseBytesMax")

	errAfterwards = errors.New("the handler has returned")
	errFailedLate = errors.New("the handler answered with a failure after a success: use Fail, or answer once everything is done")
)

const bufferBytesMax = 8 << 20

// recorder keeps a response until the transaction is committed. It has no Unwrap, so that
// http.ResponseController cannot bypass it, and no ReadFrom: io.Copy goes through Write.
type recorder struct {
	bytesMax int

	mu     sync.Mutex // protects against goroutines that outlive the handler
	header http.Header
	sent   http.Header // header as it was when the status was written
	status int
	body   bytes.Buffer
	err    error
	over   bool
}

var _ http.Hijacker = (*recorder)(nil)

// Header implements http.ResponseWriter.
func (w *recorder) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. Informational responses are dropped; the first other
// status counts. A failure status after a success (http.Error, code that recovers a panic) fails
// the request: half of the work may be missing.
func (w *recorder) WriteHeader(status int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("invalid WriteHeader code %d", status)) // what net/http does
	}
	if status == http.StatusSwitchingProtocols {
		_ = w.refuse(ErrStreaming) // the handler finds out when it writes
	}
	if status >= 400 && w.status != 0 && w.status < 400 {
		_ = w.refuse(errFailedLate)
	}
	if status >= 200 {
		w.write(status)
	}
}

func (w *recorder) write(status int) {
	if w.status == 0 && !w.over {
		w.status, w.sent = status, w.header.Clone()
	}
}

// Write implements http.ResponseWriter.
func (w *recorder) Write(part []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.write(http.StatusOK)
	switch {
	case w.over:
		return 0, errAfterwards
	case w.err != nil:
		return 0, w.err
	case w.status == http.StatusNoContent, w.status == http.StatusNotModified:
		return 0, http.ErrBodyNotAllowed
	case w.body.Len()+len(part) > w.bytesMax:
		return 0, w.refuse(ErrResponseTooLarge)
	}
	return w.body.Write(part)
}

// FlushError is what http.ResponseController calls. There is no Flush, since it could not return an
// error.
func (w *recorder) FlushError() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.refuse(ErrStreaming)
}

// Hijack implements http.Hijacker, to return the reason.
func (w *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return nil, nil, w.refuse(ErrStreaming)
}

func (w *recorder) refuse(err error) error {
	if w.err == nil {
		w.err = err
	}
	return w.err
}

// response returns what the handler answered, with all headers, for the first client.
func (w *recorder) response() (idempotency.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.write(http.StatusOK)
	w.over = true
	return idempotency.Response{Status: w.status, Header: w.sent, Body: w.body.Bytes()}, w.err
}
