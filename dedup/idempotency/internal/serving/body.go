package serving

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// Errors of ReadBody.
var (
	// ErrTooLarge: the body has more than bytesMax bytes.
	ErrTooLarge = errors.New("the body is too large")
	// ErrSlow: the body did not arrive in time, by this limit or by the server's own.
	ErrSlow = errors.New("the body did not arrive in time")
	// ErrUnreadable: the body ended early, or is malformed.
	ErrUnreadable = errors.New("the body cannot be read")
)

// ReadBody returns the body of a request: at most bytesMax bytes, within timeMax.
//
// It never sets a deadline in advance, which would replace an earlier one of
// http.Server.ReadTimeout, and never removes one. When the time is over, and only then, it ends
// reading at once. If the ResponseWriter is wrapped by a type without Unwrap, only the server's own
// timeouts apply. After ErrSlow an HTTP/1 connection is closed after the answer.
func ReadBody(w http.ResponseWriter, r *http.Request, bytesMax int, timeMax time.Duration) ([]byte, error) {
	if r.Body == nil {
		return nil, nil
	}
	tooLarge := fmt.Errorf("%w: want at most %d bytes", ErrTooLarge, bytesMax)
	if r.ContentLength > int64(bytesMax) {
		return nil, tooLarge
	}
	cut, over := false, make(chan struct{})
	timer := time.AfterFunc(timeMax, func() {
		cut = http.NewResponseController(w).SetReadDeadline(time.Now()) == nil
		close(over)
	})
	defer timer.Stop() // a body that panics leaves no deadline behind
	content, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(bytesMax)))
	if !timer.Stop() {
		<-over
	}
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, tooLarge
	case cut, errors.Is(err, os.ErrDeadlineExceeded): // cut as the last byte arrived: the connection is unusable
		if r.ProtoMajor == 1 {
			w.Header().Set("Connection", "close") // the rest of the body is still in it
		}
		return nil, fmt.Errorf("%w: %v, or what the server allows", ErrSlow, timeMax)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return content, nil
}
