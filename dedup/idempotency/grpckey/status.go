package grpckey

import (
	"cmp"
	"errors"
	"net/http"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Domain of the ErrorInfo in a status that this package answers with.
const Domain = "effectonce"

// Reason of the ErrorInfo in a status that this package answers with, instead of the handler. The
// values do not change.
type Reason string

// The reasons, with their codes, and whether there is a RetryInfo.
const (
	ReasonKeyMissing      Reason = "IDEMPOTENCY_KEY_MISSING"       // InvalidArgument
	ReasonKeyMalformed    Reason = "IDEMPOTENCY_KEY_MALFORMED"     // InvalidArgument
	ReasonKeyReused       Reason = "IDEMPOTENCY_KEY_REUSED"        // InvalidArgument: another request has this key
	ReasonUnreadable      Reason = "REQUEST_UNREADABLE"            // InvalidArgument
	ReasonUnauthenticated Reason = "UNAUTHENTICATED"               // Unauthenticated
	ReasonKeyInProgress   Reason = "IDEMPOTENCY_KEY_IN_PROGRESS"   // Aborted, RetryInfo
	ReasonTooManyWaiting  Reason = "IDEMPOTENCY_TOO_MANY_WAITING"  // ResourceExhausted, RetryInfo
	ReasonKeyUndecided    Reason = "IDEMPOTENCY_KEY_UNDECIDED"     // FailedPrecondition: whether it was executed is unknown, or it was given up: a person decides
	ReasonNotKept         Reason = "IDEMPOTENCY_RESPONSE_NOT_KEPT" // FailedPrecondition: it was executed, and its response was too large to be stored
	ReasonKeyExpired      Reason = "IDEMPOTENCY_KEY_EXPIRED"       // FailedPrecondition: it was executed, longer ago than its response is stored
	ReasonUnanswered      Reason = "IDEMPOTENCY_OUTCOME_UNKNOWN"   // Unavailable, RetryInfo: a retry with the same key resolves it
	ReasonUnavailable     Reason = "UNAVAILABLE"                   // Unavailable, RetryInfo: not executed
	ReasonInternal        Reason = "INTERNAL"                      // Internal: not executed
)

// describe returns the code of a reason, and a fixed text: neither keys nor errors reach a client.
func describe(reason Reason) (codes.Code, string) {
	switch reason {
	case ReasonKeyMissing:
		return codes.InvalidArgument, "this call needs the metadata " + Metadata + ": a value of its own, the same at each try"
	case ReasonKeyMalformed:
		return codes.InvalidArgument, "the metadata " + Metadata + " must come once, with 1 to 255 visible ASCII characters"
	case ReasonKeyReused:
		return codes.InvalidArgument, "the idempotency key was used for another request"
	case ReasonUnreadable:
		return codes.InvalidArgument, "the request is not what this method takes"
	case ReasonUnauthenticated:
		return codes.Unauthenticated, "the call has no principal"
	case ReasonKeyInProgress:
		return codes.Aborted, "a call with this idempotency key is being executed: retry later with the same key"
	case ReasonTooManyWaiting:
		return codes.ResourceExhausted, "too many calls wait for this key, or for keys of this caller: retry later with the same key"
	case ReasonKeyUndecided:
		return codes.FailedPrecondition, "the outcome of the call with this key has to be looked into: do not send it again under another key"
	case ReasonNotKept:
		return codes.FailedPrecondition, "the call with this key was executed, and its response was too large to be kept"
	case ReasonKeyExpired:
		return codes.FailedPrecondition, "the call was executed with this key, longer ago than its response is kept: look for what it did"
	case ReasonUnanswered:
		return codes.Unavailable, "the call may have been executed: retry with the same key to find out"
	case ReasonUnavailable:
		return codes.Unavailable, "the call could not be executed now: retry with the same key"
	case ReasonInternal:
	}
	return codes.Internal, "the call was not executed"
}

// refusal returns a status with its reason. A retryAfter of zero adds no RetryInfo.
func refusal(reason Reason, retryAfter time.Duration) error {
	code, text := describe(reason)
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: string(reason), Domain: Domain}}
	if retryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)})
	}
	answer, err := status.New(code, text).WithDetails(details...)
	if err != nil {
		panic(err) // messages of this module
	}
	return answer.Err()
}

// problem returns the reason for an error of the engine, or of a handler if it is not a status.
func (i *Interceptor) problem(err error) (Reason, time.Duration) {
	var busy *idempotency.InProgressError
	var crowded *idempotency.CrowdedError
	switch {
	case errors.As(err, &crowded):
		return ReasonTooManyWaiting, cmp.Or(crowded.RetryAfter, i.cfg.RetryAfter)
	case errors.As(err, &busy):
		return ReasonKeyInProgress, busy.RetryAfter
	case errors.Is(err, idempotency.ErrInProgress):
		return ReasonKeyInProgress, i.cfg.RetryAfter
	case errors.Is(err, idempotency.ErrMismatch):
		return ReasonKeyReused, 0
	case errors.Is(err, idempotency.ErrIndeterminate), errors.Is(err, idempotency.ErrAbandoned):
		return ReasonKeyUndecided, 0
	case errors.Is(err, idempotency.ErrUnanswered), errors.Is(err, idempotency.ErrUnreadable):
		return ReasonUnanswered, i.cfg.RetryAfter
	case serving.Passing(err):
		return ReasonUnavailable, i.cfg.RetryAfter
	}
	return ReasonInternal, 0
}

// stored returns a status in its stored form: encoded, and with the HTTP status of its code for
// people to read. Text that is not UTF-8 cannot be encoded.
func stored(answer *status.Status) (idempotency.Response, error) {
	text := answer.Proto() // a copy
	text.Message = strings.ToValidUTF8(text.GetMessage(), "\ufffd")
	body, err := proto.Marshal(text)
	return idempotency.Response{Status: httpStatus(answer.Code()), Body: body}, err
}

// failed makes the response that Strict and AttemptsMax store for a failure (its status, if the
// handler returned one), and the response for ErrExpired.
func failed(err error) idempotency.Response {
	answer, ok := statusOf(err)
	switch {
	case errors.Is(err, idempotency.ErrExpired):
		answer = status.Convert(refusal(ReasonKeyExpired, 0))
	case !ok:
		answer = status.Convert(refusal(ReasonInternal, 0))
	}
	response, err := stored(answer)
	if err != nil {
		return idempotency.Response{Status: http.StatusInternalServerError}
	}
	return response
}

// statusOf returns the status that a handler failed with, without the text of wrapping errors.
func statusOf(err error) (*status.Status, bool) {
	var of interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &of) || of.GRPCStatus() == nil || of.GRPCStatus().Code() == codes.OK {
		return nil, false
	}
	return of.GRPCStatus(), true
}

// unstored returns the failure that a response contains. A person may have stored another response
// (outbox-relay keys finish).
func unstored(response idempotency.Response) error {
	var answer spb.Status
	if err := proto.Unmarshal(response.Body, &answer); err != nil || codes.Code(answer.GetCode()) == codes.OK {
		return status.Errorf(codes.FailedPrecondition, "the call was finished with status %d", response.Status)
	}
	return status.FromProto(&answer).Err()
}

func httpStatus(code codes.Code) int {
	switch code { //nolint:exhaustive // all others are failures of the server
	case codes.InvalidArgument, codes.FailedPrecondition, codes.OutOfRange:
		return http.StatusBadRequest
	case codes.Unauthenticated:
		return http.StatusUnauthorized
	case codes.PermissionDenied:
		return http.StatusForbidden
	case codes.NotFound:
		return http.StatusNotFound
	case codes.AlreadyExists, codes.Aborted:
		return http.StatusConflict
	case codes.ResourceExhausted:
		return http.StatusTooManyRequests
	case codes.Unimplemented:
		return http.StatusNotImplemented
	}
	return http.StatusInternalServerError
}
