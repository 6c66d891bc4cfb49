package httpkey

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Handler executes next once for each key, in one transaction with the key and the response: see
// Tx. next may run more than once (after a serialization failure or a deadlock that it reported by
// Fail, or after an attempt that stored nothing); only one of the runs has effects. Nothing reaches
// the client before COMMIT. A panic of next rolls back and is passed on. See the package's text for
// its place in the chain of handlers.
func (m *Middleware) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keyless := len(r.Header.Values(keyHeader)) == 0 && (r.Method == http.MethodPut || r.Method == http.MethodDelete)
		// Inside of another middleware, which holds the key already, this one would wait for it.
		if keyless || serving.Safe(r.Method) || serving.From(r.Context()) != nil {
			next.ServeHTTP(w, r)
			return
		}
		key, body, problem := m.readRequest(w, r)
		if problem != "" {
			refuse(w, problem, 0)
			return
		}
		m.serve(w, r, next, key, body)
	})
}

// readRequest reads key and body before any SQL, or returns why it cannot.
func (m *Middleware) readRequest(w http.ResponseWriter, r *http.Request) (key idempotency.Key, body []byte, problem serving.Problem) {
	scope, err := m.scope(r)
	if problem := serving.CheckScope(r.Context(), m.op, scope, err); problem != "" {
		return key, nil, problem
	}
	value, err := ParseKey(r.Header)
	switch {
	case errors.Is(err, ErrNoKey):
		return key, nil, serving.KeyMissing
	case err != nil:
		return key, nil, serving.KeyMalformed
	}
	if body, err = serving.ReadBody(w, r, m.cfg.RequestBytesMax, m.cfg.ReadTimeout); err != nil {
		problem, _ := serving.ProblemOf(err)
		return key, nil, problem
	}
	if len(body) == 0 && (r.ContentLength > 0 || len(r.PostForm) > 0 || r.MultipartForm != nil) { // a form of the query alone does not count
		m.op.Config().Logger.ErrorContext(r.Context(), "the body of a request was read before this middleware, which needs it to distinguish requests: it is refused; "+
			"put the middleware in front of what reads the body")
		return key, nil, serving.Internal
	}
	fingerprint, err := m.fingerprint(r, body)
	if err != nil {
		return key, nil, serving.Unreadable
	}
	return m.op.Key(scope, value, fingerprint), body, ""
}

// serve executes the request and answers it.
func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler, key idempotency.Key, body []byte) {
	outer := w.Header().Clone()
	var answered, kept idempotency.Response // answered by the handler's last run, and what of it may be stored
	ctx, cancel := serving.Outliving(r.Context(), m.cfg.HandlerTimeout)
	defer cancel()
	stored, err := m.op.Once(ctx, key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		answered, kept = idempotency.Response{}, idempotency.Response{} // an earlier run was rolled back
		e := &serving.Exchange{Tx: tx, Key: key}
		recorded := &recorder{header: outer.Clone(), bytesMax: max(bufferBytesMax, m.cfg.Operation.ResponseBytesMax)}
		run := again(serving.With(ctx, e), r, body)
		defer removeFiles(run, r)
		next.ServeHTTP(recorded, run)
		response, err := recorded.response()
		if err := errors.Join(e.Err, err); err != nil {
			return idempotency.Response{}, m.final(err)
		}
		answered = response
		response.Header = m.kept(response.Header)
		kept = response
		switch stored, committed := outcome(response.Status); {
		case committed:
			return response, nil
		case stored:
			return response, idempotency.Final(response, &forgottenError{response})
		}
		return response, &forgottenError{response}
	})
	var forgotten *forgottenError
	switch {
	case errors.As(err, &forgotten):
		first(w, answered)
	case err != nil:
		m.fail(w, r, key, err, false)
	case stored.Replayed:
		replay(w, stored)
	case answered.Status != 0 && serving.Same(stored, kept):
		first(w, answered)
	default: // an outcome made by Fail, or misuse of the transaction
		write(w, stored)
	}
}

// final drops headers that must not be stored.
func (m *Middleware) final(err error) error {
	var final *idempotency.FinalError
	if !errors.As(err, &final) {
		return err
	}
	response := final.Response
	response.Header = m.kept(response.Header)
	return idempotency.Final(response, err)
}

// again returns the request for one run of the handler: a run must not see what an earlier one read
// or changed.
func again(ctx context.Context, r *http.Request, body []byte) *http.Request {
	run := r.Clone(ctx)
	run.Body = io.NopCloser(bytes.NewReader(body))
	run.ContentLength = int64(len(body))
	run.TransferEncoding = nil
	return run
}

// removeFiles removes the files that a run created when it parsed a form: net/http knows only those
// of its own request. As in net/http, files of a copy of the run (WithContext) belong to the code
// that made the copy.
func removeFiles(run, r *http.Request) {
	if run.MultipartForm != nil && r.MultipartForm == nil { // otherwise they belong to r, and the next run needs them
		_ = run.MultipartForm.RemoveAll() // as net/http does
	}
}

// fail answers an error of the engine, or of a handler that called Fail.
func (m *Middleware) fail(w http.ResponseWriter, r *http.Request, key idempotency.Key, err error, flow bool) {
	problem, retryAfter := serving.ProblemOf(err)
	if flow && problem == serving.Internal { // an error of a phase is no outcome: the flow can be resumed
		problem, retryAfter = serving.Unavailable, serving.RetryAfter
	}
	if problem.Describe().Status >= http.StatusInternalServerError {
		m.op.Config().Logger.ErrorContext(r.Context(), "a request is answered without an outcome", "key", key, "problem", problem, "error", err)
	}
	refuse(w, problem, retryAfter)
}
