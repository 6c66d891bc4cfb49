package httpkey

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/bounds"
)

// FlowHandler is an endpoint whose work runs in phases because it calls other systems: it claims
// the key and answers with the flow's outcome, as Middleware.Handler does with a transaction's.
// Make the flow with m.Operation(); a second flow needs a Middleware of another operation. Pass only headers to Step.Finish that may be shown again.
//
// request converts a request, whose body is read already, to the input of the phases; nil: the body
// is the input. Nothing is stored at that point: an error is answered with 400, or with the
// response of an idempotency.Final. A failure of a phase is answered with 503 and Retry-After: the
// next attempt continues at that phase.
//
// A client that disconnects does not end the flow; Config.HandlerTimeout does, between two phases,
// and the flow can be resumed. The call of an AtMostOnce phase, and the writes of a phase, are not
// interrupted: FlowConfig.CallMax bounds them.
//
// It must not be inside the Handler of a Middleware of the same operation: there it would wait for
// the key that the request's own transaction holds. Such a request is refused with 500.
//
// The error lists all problems at once: a flow of another operation, and a FlowConfig.CallMax that
// is not less than Config.HandlerTimeout, which would interrupt its calls.
func FlowHandler[S any](m *Middleware, flow *idempotency.Flow[S], request func(r *http.Request) ([]byte, error)) (http.Handler, error) {
	var problems []error
	if ours, its := m.op.Config(), flow.Operation().Config(); ours.Operation != its.Operation || ours.Schema != its.Schema {
		problems = append(problems, fmt.Errorf("flow is of operation %q in schema %q: want one of this Middleware's Operation, %q in %q", its.Operation, its.Schema, ours.Operation, ours.Schema))
	}
	if callMax := flow.Config().CallMax; callMax >= m.cfg.HandlerTimeout {
		problems = append(problems, bounds.Problem("FlowConfig.CallMax", callMax, fmt.Sprintf("less than Config.HandlerTimeout, %v, which ends a call", m.cfg.HandlerTimeout)))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if e := serving.From(r.Context()); e != nil && e.Key.Operation == m.cfg.Operation.Operation {
			m.op.Config().Logger.ErrorContext(r.Context(), "a FlowHandler is inside of Middleware.Handler: its requests are refused; take the route out of it")
			refuse(w, serving.Internal, 0)
			return
		}
		key, body, problem := m.readRequest(w, r)
		if problem != "" {
			refuse(w, problem, 0)
			return
		}
		if request != nil {
			var ok bool
			if body, ok = convert(w, r, body, request); !ok {
				return
			}
		}
		ctx, cancel := serving.Outliving(r.Context(), m.cfg.HandlerTimeout)
		defer cancel()
		response, err := flow.Do(ctx, key, body)
		switch {
		case err != nil:
			m.fail(w, r, key, err, true)
		case response.Replayed:
			replay(w, response)
		default:
			write(w, response)
		}
	}), nil
}

// convert returns the input of the phases, or answers with the reason why it cannot.
func convert(w http.ResponseWriter, r *http.Request, body []byte, request func(r *http.Request) ([]byte, error)) ([]byte, bool) {
	run := again(r.Context(), r, body)
	defer removeFiles(run, r)
	input, err := request(run)
	var final *idempotency.FinalError
	switch {
	case errors.As(err, &final):
		write(w, final.Response)
	case err != nil:
		refuse(w, serving.Unreadable, 0)
	}
	return input, err == nil
}
