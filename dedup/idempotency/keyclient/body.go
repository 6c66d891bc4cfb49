package keyclient

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

var errBody = errors.New("read the body of the request")

// body is the body of a request, for all attempts.
type body struct {
	first  io.ReadCloser                 // for the first attempt
	again  func() (io.ReadCloser, error) // for each later one; nil: the request is sent once
	length int64                         // if it was read into memory, else 0
}

// newBody makes the body repeatable if that is wanted and possible.
func newBody(r *http.Request, bytesMax int, repeat bool) (body, error) {
	switch {
	case !repeat:
		return body{first: r.Body}, nil
	case r.Body == nil || r.Body == http.NoBody:
		return body{first: r.Body, again: func() (io.ReadCloser, error) { return r.Body, nil }}, nil
	case r.GetBody != nil:
		return body{first: r.Body, again: r.GetBody}, nil
	case r.ContentLength > int64(bytesMax):
		return body{first: r.Body}, nil
	}
	stop := context.AfterFunc(r.Context(), func() { _ = r.Body.Close() }) // a reader that hangs does not notice ctx
	read, err := io.ReadAll(io.LimitReader(r.Body, int64(bytesMax)+1))
	if !stop() && err == nil {
		err = context.Cause(r.Context())
	}
	switch {
	case err != nil:
		return body{}, fmt.Errorf("%w: %w", errBody, err)
	case len(read) > bytesMax:
		return body{first: struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(read), r.Body), r.Body}}, nil
	}
	if err := r.Body.Close(); err != nil {
		return body{}, fmt.Errorf("%w: %w", errBody, err)
	}
	if len(read) == 0 {
		return body{first: http.NoBody, again: func() (io.ReadCloser, error) { return http.NoBody, nil }}, nil
	}
	again := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(read)), nil }
	first, err := again()
	return body{first: first, again: again, length: int64(len(read))}, err
}

func (b body) apply(r *http.Request) {
	r.Body = b.first
	if b.again == nil {
		return
	}
	if r.GetBody == nil && r.Body != nil {
		r.GetBody = b.again
	}
	if r.ContentLength <= 0 && len(r.Trailer) == 0 { // trailers need chunks
		r.ContentLength = b.length
	}
}

// These bound how much of an unwanted response is read so that its connection can be reused.
const (
	drainBytesMax = 64 << 10
	drainMin      = 100 * time.Millisecond // also if the next attempt follows at once
	drainMax      = time.Second
)

// drain reads the rest of a body, for about as long as the next attempt waits anyway, and closes
// it. The timer of the attempt has stopped: a body that stalls would block forever.
func drain(body io.ReadCloser, wait time.Duration) {
	late := time.AfterFunc(min(max(wait, drainMin), drainMax), func() {
		if a, ok := body.(interface{ cancel() }); ok {
			a.cancel() // first: a body of net/http cannot be closed while its compression header is being read
		}
		_ = body.Close()
	})
	_, _ = io.CopyN(io.Discard, body, drainBytesMax) // beyond that the connection is closed
	late.Stop()
	_ = body.Close()
}

// forgetMax bounds how long the reader of a response waits for PendingStore.Forget.
const forgetMax = 5 * time.Second

// hand makes closing the body end the attempt, and forget the key if ForgetAnswered says so.
func (c *call) hand(response *http.Response, end func()) *http.Response {
	response.Request = c.request // SentKey needs it, and base may not set it
	answer := &answerBody{ReadCloser: response.Body, end: end, had: func() {}}
	if c.name != "" && c.t.cfg.ForgetAnswered && settles(response, c.doubt) {
		answer.had = sync.OnceFunc(c.forget)
	}
	if writer, ok := response.Body.(io.Writer); ok { // 101: the connection
		response.Body = struct {
			*answerBody
			io.Writer
		}{answer, writer}
		return response
	}
	response.Body = answer
	return response
}

func (c *call) forget() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.request.Context()), forgetMax)
	defer cancel()
	if err := c.t.cfg.Pending.Forget(ctx, c.name, c.key); err != nil { // the next request with its name gets this response again
		c.t.cfg.Logger.WarnContext(ctx, "could not forget an answered request: it stays pending", "request", c.name, "error", err)
	}
}

// answerBody is the body of a response.
type answerBody struct {
	io.ReadCloser
	broken atomic.Bool // atomic: drain closes while it reads
	had    func()      // called once the caller has the response
	end    func()
}

// Read implements io.Reader.
func (a *answerBody) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	switch {
	case err == io.EOF: // a wrapped EOF does not mean the end
		if !a.broken.Load() {
			a.had()
		}
	case err != nil:
		a.broken.Store(true)
	}
	return n, err
}

func (a *answerBody) cancel() { a.end() }

// Close implements io.Closer. A caller that closes early has seen enough.
func (a *answerBody) Close() error {
	err := a.ReadCloser.Close()
	if !a.broken.Load() {
		a.had()
	}
	a.end()
	return err
}
