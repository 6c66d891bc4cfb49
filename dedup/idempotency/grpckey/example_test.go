package grpckey_test

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/grpckey"
)

type orders struct {
	testpb.UnimplementedTestServiceServer
}

// UnaryCall writes an order in the transaction of its call.
func (orders) UnaryCall(ctx context.Context, _ *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
	id := grpckey.Key(ctx).ChildID("order")
	if _, err := grpckey.Tx(ctx).Exec(ctx, `INSERT INTO orders (id) VALUES ($1)`, id); err != nil {
		return nil, err // as it is: a serialization failure runs the handler again
	}
	return &testpb.SimpleResponse{Username: id.String()}, nil
}

// A server behind authentication, and a client that makes its key before the first attempt.
func ExampleInterceptor_Unary() {
	server := func(pool *pgxpool.Pool, authenticate grpc.UnaryServerInterceptor, tenant grpckey.Scope) (*grpc.Server, error) {
		once, err := grpckey.New(pool, tenant, grpckey.Config{
			Operation: idempotency.Config{Operation: "orders-api"},
			Methods:   []string{testpb.TestService_UnaryCall_FullMethodName},
		})
		if err != nil {
			return nil, err
		}
		s := grpc.NewServer(grpc.ChainUnaryInterceptor(authenticate, once.Unary))
		testpb.RegisterTestServiceServer(s, orders{})
		return s, nil
	}
	client := func(ctx context.Context, of testpb.TestServiceClient, key string) (*testpb.SimpleResponse, error) {
		return of.UnaryCall(metadata.AppendToOutgoingContext(ctx, grpckey.Metadata, key), &testpb.SimpleRequest{})
	}
	_, _ = server, client
}
