// Package grpckey executes unary gRPC calls once for each idempotency key, and answers retries with the stored response.
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
// The client sends the key as metadata, the same with each try: metadata.AppendToOutgoingContext(ctx, grpckey.Metadata, key).
// Write, key and response are one transaction. A replay has the metadata idempotent-replayed: true.
//
// # What is kept
//
// The response of a call that succeeded, with what the handler wrote. The status, with its details, of one that failed with
// InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, OutOfRange or Unimplemented (see Config.Refuse): what it wrote is
// rolled back. Any other failure stores nothing and frees the key. Headers and trailers that a handler sets are not kept, and are
// sent with a failure, too. What asks other systems belongs into an idempotency.Flow, under Interceptor.Operation.
//
// # What the interceptor answers itself
//
// A status with an ErrorInfo of the domain "effectonce", whose reason is one of the Reasons, and a RetryInfo where trying again
// helps: see Reason. Errors of a handler that are no status reach no client: it gets Unavailable where the database is away or
// busy, else Internal.
//
// # Caveats
//
// Two requests are the same if method and deterministic encoding are. That encoding does not change for the same program; a new
// release of a message with other fields may make a retry across the deployment another request (see Config.Fingerprint). Streams are not
// executed once: grpckey.Tx panics in them. A client's deadline ends a call that has not begun; one that has begins is done, or
// rolled back, whole.
package grpckey
