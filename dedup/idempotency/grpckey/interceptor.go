package grpckey

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/internal/serving"
	"github.com/effectonce/effectonce/internal/bounds"
)

// A client sends its key under Metadata, once, with 1 to 255 visible ASCII characters. A replay has
// Replayed, with the value "true". Domain is in the ErrorInfo of this package's own answers.
const (
	Metadata = "idempotency-key"
	Replayed = "idempotent-replayed"
	Domain   = "effectonce"
	unlisted = "grpckey: no transaction: add the method to Config.Methods, and Interceptor.Unary to the server"
)

// Scope returns the tenant, or the principal, that made a call: see httpkey.Scope. An error that
// wraps ErrUnauthenticated is answered with Unauthenticated; any other, and an empty scope, with Internal.
type Scope func(ctx context.Context) (string, error)

// ErrUnauthenticated is for Scope: the call has no principal.
var ErrUnauthenticated = serving.ErrUnauthenticated

// Config of an Interceptor. Operation.Operation and Methods are required.
type Config struct {
	// Operation configures the keys. Failed is not allowed: with Strict a failure's status is stored.
	Operation idempotency.Config
	// Methods are executed once, each given by its full name: "/shop.Orders/Create". All others
	// pass through. At least one; their messages must be linked into the program.
	Methods []string
	// HandlerTimeout is that of httpkey.Config. 1 ms to 1 h; default 30 s.
	HandlerTimeout time.Duration
	// Fingerprint returns the part of a request that distinguishes it from others of the method.
	// Default: its deterministic encoding.
	Fingerprint func(method string, request proto.Message) ([]byte, error)
}

// Interceptor executes calls once for each key. It is safe for concurrent use.
type Interceptor struct {
	op      *idempotency.Operation
	scope   Scope
	cfg     Config
	methods map[string]protoreflect.MessageType // of their responses
}

// New returns an interceptor, or all problems of its configuration at once. It opens no connection.
// The caller owns the pool, which must connect to the primary.
func New(pool *pgxpool.Pool, scope Scope, cfg Config) (*Interceptor, error) {
	problems := bounds.Durations(
		bounds.Duration{Field: "HandlerTimeout", Value: &cfg.HandlerTimeout, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
	)
	if len(cfg.Methods) == 0 {
		problems = append(problems, bounds.Problem("Methods", cfg.Methods, `at least one, such as "/shop.Orders/Create"`))
	}
	methods := map[string]protoreflect.MessageType{}
	for _, method := range cfg.Methods {
		if methods[method] = responseOf(method); methods[method] == nil {
			problems = append(problems, bounds.Problem("Methods", fmt.Sprintf("%q", method), "the full name of a unary method that is linked into the program"))
		}
	}
	op, err := serving.New(pool, cfg.Operation, failed, scope != nil, cfg.HandlerTimeout)
	if err := errors.Join(append(problems, err)...); err != nil {
		return nil, err
	}
	return &Interceptor{op: op, scope: scope, cfg: cfg, methods: methods}, nil
}

// Operation returns the operation that stores the keys: for its Run, and for flows.
func (i *Interceptor) Operation() *idempotency.Operation { return i.op }

// responseOf returns the type of a unary method's response, or nil.
func responseOf(method string) protoreflect.MessageType {
	name, rooted := strings.CutPrefix(method, "/")
	found, _ := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.Replace(name, "/", ".", 1)))
	descriptor, ok := found.(protoreflect.MethodDescriptor)
	if !ok || !rooted || descriptor.IsStreamingClient() || descriptor.IsStreamingServer() {
		return nil
	}
	response, _ := protoregistry.GlobalTypes.FindMessageByName(descriptor.Output().FullName())
	return response
}

// Tx returns the transaction of the call: see httpkey.Tx. It panics if the method is not one of
// Config.Methods: without the transaction, the handler's writes would not be protected by the key.
func Tx(ctx context.Context) pgx.Tx { return serving.Of(ctx, unlisted).Tx }

// Key returns the key of the call: see httpkey.Key. It panics if Tx does.
func Key(ctx context.Context) idempotency.Key { return serving.Of(ctx, unlisted).Key }

// Unary is a grpc.UnaryServerInterceptor: it executes the handler once for each key, in one
// transaction with the key and the response. The handler may run more than once; only one run has
// effects. A panic rolls back and is passed on. Put it behind authentication.
func (i *Interceptor) Unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	result, ok := i.methods[info.FullMethod]
	if !ok {
		return handler(ctx, request)
	}
	message := request.(proto.Message) //nolint:forcetypeassert // New has looked at the method
	key, problem := i.key(ctx, info.FullMethod, message)
	if problem != "" {
		return nil, refusal(problem, 0)
	}
	var answered any              // by the handler's last run
	var made idempotency.Response // what of it is to be stored
	outliving, cancel := serving.Outliving(ctx, i.cfg.HandlerTimeout)
	defer cancel()
	response, err := i.op.Once(outliving, key, func(ctx context.Context, tx pgx.Tx) (_ idempotency.Response, err error) {
		made = idempotency.Response{} // an earlier run was rolled back
		run := proto.Clone(message)   // an earlier run may have changed its own
		if answered, err = handler(serving.With(ctx, &serving.Exchange{Tx: tx, Key: key}), run); err != nil {
			if answer := statusOf(err); refused[answer.Code()] != 0 {
				return made, idempotency.Final(stored(answer), err)
			}
			return made, err
		}
		message, ok := answered.(proto.Message)
		if !ok {
			return made, fmt.Errorf("the handler of %s answered with a %T: want a protocol buffer", info.FullMethod, answered)
		}
		body, err := proto.Marshal(message)
		made = idempotency.Response{Status: http.StatusOK, Body: body}
		return made, err
	})
	switch {
	case err != nil:
		return nil, i.fail(ctx, key, err)
	case response.Replayed:
		_ = grpc.SetHeader(ctx, metadata.Pairs(Replayed, "true")) // a client that is gone gets none
	case made.Status != 0 && serving.Same(response, made): // otherwise a failure is stored, and the run was rolled back
		return answered, nil
	}
	if response.BodyDropped {
		return nil, refusal(serving.ResponseDropped, 0)
	}
	if response.Status >= http.StatusMultipleChoices {
		failure := status.New(codes.OK, "").Proto()
		if err := proto.Unmarshal(response.Body, failure); err != nil || failure.GetCode() == 0 { // a person stored it: outbox-relay keys finish
			return nil, status.Errorf(codes.FailedPrecondition, "the call was finished with status %d", response.Status)
		}
		return nil, status.FromProto(failure).Err()
	}
	replay := result.New().Interface()
	if err := proto.Unmarshal(response.Body, replay); err != nil {
		i.op.Config().Logger.ErrorContext(ctx, "the stored response of a call is not of its method's type", "key", key, "error", err)
		return nil, status.Error(codes.Internal, "the call was executed, and its stored response cannot be read")
	}
	return replay, nil
}

// key reads the key of a call before any SQL, or returns why it cannot.
func (i *Interceptor) key(ctx context.Context, method string, request proto.Message) (idempotency.Key, serving.Problem) {
	scope, err := i.scope(ctx)
	problem := serving.CheckScope(ctx, i.op, scope, err)
	values := metadata.ValueFromIncomingContext(ctx, Metadata)
	switch {
	case problem != "":
		return idempotency.Key{}, problem
	case len(values) == 0:
		return idempotency.Key{}, serving.KeyMissing
	case len(values) > 1 || !serving.ValidKey(values[0]):
		return idempotency.Key{}, serving.KeyMalformed
	}
	content, err := proto.MarshalOptions{Deterministic: true}.Marshal(request)
	if i.cfg.Fingerprint != nil {
		content, err = i.cfg.Fingerprint(method, request)
	}
	if err != nil {
		return idempotency.Key{}, serving.Unreadable
	}
	return i.op.Key(scope, values[0], idempotency.NewFingerprint([]byte(method), content)), ""
}

// fail returns the status for a call without an outcome: the handler's own, if it failed with one.
func (i *Interceptor) fail(ctx context.Context, key idempotency.Key, err error) error {
	if answer := statusOf(err); answer != nil && !errors.Is(err, idempotency.ErrIndeterminate) {
		return answer.Err()
	}
	problem, retryAfter := serving.ProblemOf(err)
	if problem.Describe().Status >= http.StatusInternalServerError {
		i.op.Config().Logger.ErrorContext(ctx, "a call has no outcome", "key", key, "problem", problem, "error", err)
	}
	return refusal(problem, retryAfter)
}

//nolint:gochecknoglobals // tables
var (
	codeOf = map[int]codes.Code{ // of a problem, by its status of HTTP
		400: codes.InvalidArgument, 401: codes.Unauthenticated, 409: codes.FailedPrecondition, 410: codes.FailedPrecondition,
		422: codes.InvalidArgument, 429: codes.ResourceExhausted, 500: codes.Internal, 503: codes.Unavailable,
	}
	refused = map[codes.Code]int{ // failures that a retry would get again, with a status of HTTP for people to read
		codes.InvalidArgument: 400, codes.FailedPrecondition: 400, codes.OutOfRange: 400, codes.NotFound: 404, codes.AlreadyExists: 409, codes.Unimplemented: 501,
	}
)

// refusal returns the status for a problem. A retryAfter of zero adds no RetryInfo.
func refusal(problem serving.Problem, retryAfter time.Duration) error {
	text := problem.Describe()
	code := codeOf[text.Status]
	if problem == serving.KeyInProgress {
		code = codes.Aborted
	}
	answer, err := status.New(code, text.Detail).WithDetails(&errdetails.ErrorInfo{Reason: strings.ToUpper(strings.ReplaceAll(string(problem), "-", "_")), Domain: Domain})
	if err == nil && retryAfter > 0 {
		answer, err = answer.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)})
	}
	if err != nil {
		panic(err) // messages of this module
	}
	return answer.Err()
}

// stored returns a status in its stored form, without a body if it cannot be encoded.
func stored(answer *status.Status) idempotency.Response {
	text := answer.Proto() // a copy
	text.Message = strings.ToValidUTF8(text.GetMessage(), "\ufffd")
	body, _ := proto.Marshal(text)
	return idempotency.Response{Status: cmp.Or(refused[answer.Code()], http.StatusInternalServerError), Body: body}
}

// failed makes the response for ErrExpired, and the one that Strict stores for a failure.
func failed(err error) idempotency.Response {
	answer := statusOf(err)
	if errors.Is(err, idempotency.ErrExpired) {
		answer = status.Convert(refusal(serving.KeyExpired, 0))
	}
	return stored(cmp.Or(answer, status.Convert(refusal(serving.Internal, 0))))
}

// statusOf returns the status that a handler failed with, without the text of wrapping errors, or nil.
func statusOf(err error) *status.Status {
	var of interface{ GRPCStatus() *status.Status }
	if errors.As(err, &of) && of.GRPCStatus().Code() != codes.OK {
		return of.GRPCStatus()
	}
	return nil
}
