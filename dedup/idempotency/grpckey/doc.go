// Package grpckey executes unary gRPC calls once for each idempotency key, and answers retries with
// the stored response.
//
//	once, err := grpckey.New(pool, tenant, grpckey.Config{
//		Operation: idempotency.Config{Operation: "orders-api"},
//		Methods:   []string{orderspb.Orders_Create_FullMethodName},
//	})
//	if err != nil {
//		log.Fatal(err)
//	}
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(authenticate, once.Unary))
//
//	func (s *orders) Create(ctx context.Context, request *orderspb.CreateRequest) (*orderspb.Order, error) {
//		id := grpckey.Key(ctx).ChildID("order")
//		if _, err := grpckey.Tx(ctx).Exec(ctx, `INSERT INTO orders (id) VALUES ($1)`, id); err != nil {
//			return nil, err // as it is: a serialization failure runs the handler again
//		}
//		return &orderspb.Order{Id: id.String()}, nil
//	}
//
// The client sends the key as metadata, the same at each attempt:
// metadata.AppendToOutgoingContext(ctx, grpckey.Metadata, key). Writes, key and response are one
// transaction. A replay has the metadata idempotent-replayed: true.
//
// # What is stored
//
// The response of a call that succeeded is stored together with the handler's writes. For a call
// that failed with InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, OutOfRange or
// Unimplemented (see Config.Refuse), the status is stored with its details, and the handler's
// writes are rolled back. Any other failure stores nothing and frees the key. Headers and trailers
// that a handler sets are not stored, and are sent with a failure, too. Calls to other systems
// belong in an idempotency.Flow, under Interceptor.Operation.
//
// # What the interceptor answers itself
//
// It answers with a status that has an ErrorInfo of the domain "effectonce", whose reason is one of
// the Reasons, and a RetryInfo if a retry helps: see Reason. Errors of a handler that are not a
// status do not reach the client: it gets Unavailable if the database is unavailable or busy, else
// Internal.
//
// # Caveats
//
// Two requests are the same if their methods and deterministic encodings are. That encoding is
// stable for the same program; a new release of a message with other fields may make a retry across
// the deployment another request (see Config.Fingerprint). Streams are not executed once:
// grpckey.Tx panics in them. A client's deadline ends a call that has not begun; a call that has
// begun is committed, or rolled back, as a whole.
package grpckey
