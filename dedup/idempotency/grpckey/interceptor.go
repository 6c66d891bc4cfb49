package grpckey

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
)

// Metadata is the name under which a client sends its key: once, with 1 to 255 visible ASCII
// characters.
const Metadata = "idempotency-key"

// Replayed is the metadata of a replay, with the value "true".
const Replayed = "idempotent-replayed"

type exchange struct {
	tx  pgx.Tx
	key idempotency.Key
}

type exchangeKey struct{}

// Tx returns the transaction of the call, for the handler's writes and its outbox messages: they
// are committed together with the response, or not at all. It must not be used after the handler
// has returned, nor in two goroutines. Tx panics if the method is not one of Config.Methods:
// without the transaction, the handler's writes would not be protected by the key.
func Tx(ctx context.Context) pgx.Tx { return of(ctx).tx }

// Key returns the key of the call. Key(ctx).ChildID("invoice") is an ID for an outbox message, or a
// key for another system, that is the same at each attempt. It panics if Tx does.
func Key(ctx context.Context) idempotency.Key { return of(ctx).key }

func of(ctx context.Context) *exchange {
	if e, ok := ctx.Value(exchangeKey{}).(*exchange); ok {
		return e
	}
	panic("grpckey: no transaction: add the method to Config.Methods, and Interceptor.Unary to the server")
}

// Unary is a grpc.UnaryServerInterceptor: it executes the handler once for each key, in one
// transaction with the key and the response. The handler may run more than once (after a
// serialization failure or a deadlock that it returned, or after an attempt that stored nothing);
// only one of the runs has effects. A panic rolls back and is passed on. Put it behind
// authentication.
func (i *Interceptor) Unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	result, ok := i.methods[info.FullMethod]
	if !ok {
		return handler(ctx, request)
	}
	key, err := i.key(ctx, info.FullMethod, request)
	if err != nil {
		return nil, err
	}
	detached, begun, end := serving.Detach(ctx, i.cfg.HandlerTimeout)
	defer end()
	var answered any // by the handler's last run
	var failure error
	response, err := i.op.Once(detached, key, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		answered, failure = nil, nil
		if !begun() {
			return idempotency.Response{}, context.Canceled
		}
		run := proto.Clone(request.(proto.Message)) //nolint:forcetypeassert // key has looked; a run must not see what an earlier one has changed
		answered, failure = handler(context.WithValue(ctx, exchangeKey{}, &exchange{tx, key}), run)
		if failure != nil {
			return i.failed(tx, failure)
		}
		message, ok := answered.(proto.Message)
		if !ok {
			return idempotency.Response{}, fmt.Errorf("the handler of %s answered with a %T: want a protocol buffer", info.FullMethod, answered)
		}
		body, err := proto.Marshal(message)
		return idempotency.Response{Status: http.StatusOK, Body: body}, err
	})
	switch {
	case err != nil:
		return nil, i.fail(ctx, key, err, failure != nil || ctx.Err() == nil)
	case !response.Replayed && failure == nil:
		return answered, nil
	case response.Replayed:
		_ = grpc.SetHeader(ctx, metadata.Pairs(Replayed, "true")) // a client that is gone gets none
	}
	return i.replay(ctx, key, response, result)
}

// key reads the key of a call before any SQL, or returns the status with the reason why it cannot.
func (i *Interceptor) key(ctx context.Context, method string, request any) (idempotency.Key, error) {
	scope, err := i.scope(ctx)
	switch {
	case errors.Is(err, ErrUnauthenticated):
		return idempotency.Key{}, refusal(ReasonUnauthenticated, 0)
	case err == nil:
		err = i.op.Key(scope, "-", idempotency.Fingerprint{}).Validate()
	}
	if err != nil {
		i.log.ErrorContext(ctx, "the scope of a call is unknown: it is refused", "error", err)
		return idempotency.Key{}, refusal(ReasonInternal, 0)
	}
	var value string
	switch values := metadata.ValueFromIncomingContext(ctx, Metadata); {
	case len(values) == 0 && i.cfg.Optional:
		value = idempotency.NewKey()
	case len(values) == 0:
		return idempotency.Key{}, refusal(ReasonKeyMissing, 0)
	default:
		value = values[0]
		invisible := func(r rune) bool { return r <= ' ' || r > '~' }
		if len(values) > 1 || value == "" || len(value) > 255 || strings.ContainsFunc(value, invisible) {
			return idempotency.Key{}, refusal(ReasonKeyMalformed, 0)
		}
	}
	message, ok := request.(proto.Message)
	if !ok {
		i.log.ErrorContext(ctx, "a request is not a protocol buffer message: it is refused", "method", method, "type", fmt.Sprintf("%T", request))
		return idempotency.Key{}, refusal(ReasonInternal, 0)
	}
	content, err := i.cfg.Fingerprint(method, message)
	if err != nil {
		return idempotency.Key{}, refusal(ReasonUnreadable, 0)
	}
	return i.op.Key(scope, value, idempotency.NewFingerprint([]byte(method), content)).Watch(), nil
}

// failed returns the outcome of a handler that failed, if that is an outcome.
func (i *Interceptor) failed(tx pgx.Tx, failure error) (idempotency.Response, error) {
	answer, ok := statusOf(failure)
	if !ok || !i.cfg.Refuse(answer.Code()) {
		return idempotency.Response{}, &serving.GivenUpError{Err: failure, Cut: tx.Conn().IsClosed()}
	}
	response, err := stored(answer)
	if err != nil {
		return idempotency.Response{}, fmt.Errorf("encode a status: %w", err)
	}
	return idempotency.Response{}, idempotency.Final(response, failure)
}

// fail returns the status for a call without an outcome: the handler's own, if it failed with one.
// told: the error is worth logging.
func (i *Interceptor) fail(ctx context.Context, key idempotency.Key, err error, told bool) error {
	if answer, ok := statusOf(err); ok && !errors.Is(err, idempotency.ErrIndeterminate) {
		return answer.Err()
	}
	reason, retryAfter := i.problem(err)
	if code, _ := describe(reason); told && (code == codes.Internal || code == codes.Unavailable) {
		i.log.ErrorContext(ctx, "a call has no outcome", "key", key, "reason", reason, "error", err)
	}
	return refusal(reason, retryAfter)
}

// replay returns what is stored of a call.
func (i *Interceptor) replay(ctx context.Context, key idempotency.Key, response idempotency.Response, result protoreflect.MessageType) (any, error) {
	switch {
	case response.BodyDropped:
		return nil, refusal(ReasonNotKept, 0)
	case response.Status >= http.StatusMultipleChoices:
		return nil, unstored(response)
	}
	message := result.New().Interface()
	if err := proto.Unmarshal(response.Body, message); err != nil {
		i.log.ErrorContext(ctx, "the stored response of a call is not of its method's type", "key", key, "error", err)
		return nil, status.Error(codes.Internal, "the call was executed, and its stored response cannot be read")
	}
	return message, nil
}
