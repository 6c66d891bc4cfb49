package grpckey

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/bounds"
)

// Scope returns the tenant, or the principal, that made a call, as authentication determined it:
// the same key in two scopes is two keys. An error that wraps ErrUnauthenticated is answered with
// Unauthenticated; any other error, and an empty scope, with Internal.
type Scope func(ctx context.Context) (string, error)

// ErrUnauthenticated is for Scope: the call has no principal.
var ErrUnauthenticated = errors.New("the call is not authenticated")

// Config of an Interceptor. The zero value works, except that Operation.Operation and Methods are
// required.
type Config struct {
	// Operation configures the keys: the name, which is required, window, waiting, encryption.
	// Failed returns a response of status 200 to 299 with an encoded message, or of another status
	// with an encoded google.rpc.Status; default: the failure's status. It is not called for
	// idempotency.ErrExpired.
	Operation idempotency.Config
	// Methods are executed once, each given by its full name: "/shop.Orders/Create". All others
	// pass through. At least one; their messages must be linked into the program.
	Methods []string
	// Optional accepts calls without a key. They get a random one, so that the handler still has
	// its transaction. Default: InvalidArgument.
	Optional bool
	// HandlerTimeout is how long claim and handler may take together, whether or not the client
	// waits. More than Operation.WaitMax; 1 ms to 1 h; default 30 s.
	HandlerTimeout time.Duration
	// Refuse reports the codes whose status is stored as the outcome. Default: Refused.
	Refuse func(code codes.Code) bool
	// Fingerprint returns the part of a request that distinguishes it from others of the method.
	// Default: its deterministic encoding.
	Fingerprint func(method string, request proto.Message) ([]byte, error)
	// RetryAfter is sent to clients if no better value is known. 1 s to 1 h; default 1 s.
	RetryAfter time.Duration
}

// Refused is the default of Config.Refuse: codes of failures that a retry would get again.
func Refused(code codes.Code) bool {
	switch code { //nolint:exhaustive // all others may pass
	case codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented:
		return true
	}
	return false
}

// Interceptor executes calls once for each key. It is safe for concurrent use.
type Interceptor struct {
	op      *idempotency.Operation
	scope   Scope
	cfg     Config
	methods map[string]protoreflect.MessageType // of their responses
	log     *slog.Logger
}

// New returns an interceptor, or all problems of its configuration at once. It opens no connection.
// The caller owns the pool, which must connect to the primary.
func New(pool *pgxpool.Pool, scope Scope, cfg Config) (*Interceptor, error) {
	problems := bounds.Durations(
		bounds.Duration{Field: "HandlerTimeout", Value: &cfg.HandlerTimeout, Default: 30 * time.Second, Min: time.Millisecond, Max: time.Hour},
		bounds.Duration{Field: "RetryAfter", Value: &cfg.RetryAfter, Default: time.Second, Min: time.Second, Max: time.Hour},
	)
	if scope == nil {
		problems = append(problems, errors.New("scope is nil: want a function that returns the tenant of a call"))
	}
	if len(cfg.Methods) == 0 {
		problems = append(problems, bounds.Problem("Methods", cfg.Methods, `at least one, such as "/shop.Orders/Create"`))
	}
	i := &Interceptor{scope: scope, methods: map[string]protoreflect.MessageType{}}
	for _, method := range cfg.Methods {
		response, err := responseOf(method)
		if err != nil {
			problems = append(problems, bounds.Problem("Methods", fmt.Sprintf("%q", method), fmt.Sprintf("the full name of a unary method that is linked into the program: %v", err)))
		}
		i.methods[method] = response
	}
	if cfg.Refuse == nil {
		cfg.Refuse = Refused
	}
	if cfg.Fingerprint == nil {
		cfg.Fingerprint = func(_ string, request proto.Message) ([]byte, error) {
			return proto.MarshalOptions{Deterministic: true}.Marshal(request)
		}
	}
	given := cfg.Operation.Failed
	cfg.Operation.Failed = func(err error) idempotency.Response {
		if given == nil || errors.Is(err, idempotency.ErrExpired) {
			return failed(err)
		}
		return given(err)
	}
	op, err := idempotency.New(pool, cfg.Operation)
	if err != nil {
		problems = append(problems, err)
	} else if wait := op.Config().WaitMax; wait >= cfg.HandlerTimeout {
		problems = append(problems, bounds.Problem("HandlerTimeout", cfg.HandlerTimeout, fmt.Sprintf("more than Operation.WaitMax, %v", wait)))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	i.op, i.cfg, i.log = op, cfg, op.Config().Logger
	return i, nil
}

// Operation returns the operation that stores the keys: for idempotency.Operation.Run, and for
// flows.
func (i *Interceptor) Operation() *idempotency.Operation { return i.op }

// responseOf returns the type of a method's response.
func responseOf(method string) (protoreflect.MessageType, error) {
	service, name, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + name))
	if err != nil {
		return nil, err
	}
	descriptor, ok := found.(protoreflect.MethodDescriptor)
	if !ok || !strings.HasPrefix(method, "/") || descriptor.IsStreamingClient() || descriptor.IsStreamingServer() {
		return nil, errors.New("not a unary method")
	}
	return protoregistry.GlobalTypes.FindMessageByName(descriptor.Output().FullName())
}
