// Package bodies reads the body of a request whole, within bounds of size and time.
package bodies

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"
)

// Why Read returned no body.
var (
	// ErrTooLarge: it has more bytes than may be.
	ErrTooLarge = errors.New("the body is too large")
	// ErrSlow: it did not arrive in time, by this limit or by the server's own.
	ErrSlow = errors.New("the body did not arrive in time")
)

// Read returns the body of a request: at most bytesMax bytes, within timeMax. Other errors are those of the body.
//
// It never sets a deadline ahead, which would replace an earlier one of http.Server.ReadTimeout, nor takes one back: when
// the time is over, and only then, it ends reading at once. Where the ResponseWriter is wrapped by something without Unwrap,
// only the server's own timeouts count. After ErrSlow the connection of HTTP/1 is closed behind the answer.
func Read(w http.ResponseWriter, r *http.Request, bytesMax int, timeMax time.Duration) ([]byte, error) {
	if r.Body == nil {
		return nil, nil
	}
	if r.ContentLength > int64(bytesMax) {
		return nil, ErrTooLarge
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
		return nil, ErrTooLarge
	case cut, errors.Is(err, os.ErrDeadlineExceeded): // cut as the last byte came: the connection is of no use any more
		if r.ProtoMajor == 1 {
			w.Header().Set("Connection", "close") // the rest of the body is still in it
		}
		return nil, ErrSlow
	}
	return content, err
}
