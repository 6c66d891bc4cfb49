package grpckey_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/dedup/idempotency/grpckey"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolWith(t, `CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL)`)
}

func effects(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effects`)
}

func keys(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`)
}

// tenantOf replaces authentication.
func tenantOf(ctx context.Context) (string, error) {
	switch values := metadata.ValueFromIncomingContext(ctx, "tenant"); {
	case len(values) == 0:
		return "acme", nil
	case values[0] == "stranger":
		return "", fmt.Errorf("token: %w", grpckey.ErrUnauthenticated)
	case values[0] == "broken":
		return "acme", errors.New("canary")
	default:
		return values[0], nil
	}
}

// service executes UnaryCall once, and EmptyCall as it comes.
type service struct {
	testpb.UnimplementedTestServiceServer

	unary func(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error)
}

func (s *service) UnaryCall(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
	return s.unary(ctx, request)
}

func (s *service) EmptyCall(ctx context.Context, _ *testpb.Empty) (*testpb.Empty, error) {
	defer func() { _ = recover() }()
	grpckey.Tx(ctx)
	return nil, errors.New("it has a transaction")
}

func insert(ctx context.Context, request *testpb.SimpleRequest) error {
	_, err := grpckey.Tx(ctx).Exec(ctx, `INSERT INTO effects (name) VALUES ($1)`, string(request.GetPayload().GetBody()))
	return err
}

type client struct{ testpb.TestServiceClient }

// serve starts a server with the interceptor, and a client of it over loopback.
func serve(t *testing.T, pool *pgxpool.Pool, cfg grpckey.Config, unary func(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error)) client {
	t.Helper()
	cfg.Methods = []string{testpb.TestService_UnaryCall_FullMethodName}
	cfg.Operation.Operation = "orders"
	once, err := grpckey.New(pool, tenantOf, cfg)
	require.NoError(t, err)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(once.Unary))
	testpb.RegisterTestServiceServer(server, &service{unary: unary})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, conn.Close())
		server.Stop()
		assert.NoError(t, <-served)
	})
	return client{testpb.NewTestServiceClient(conn)}
}

// answer is what a client sees.
type answer struct {
	response *testpb.SimpleResponse
	err      error
	replayed bool
}

func (c client) ask(ctx context.Context, key, body string, pairs ...string) (a answer) {
	if key != "" {
		pairs = append(pairs, grpckey.Metadata, key)
	}
	var header metadata.MD
	a.response, a.err = c.UnaryCall(metadata.AppendToOutgoingContext(ctx, pairs...), &testpb.SimpleRequest{Payload: &testpb.Payload{Body: []byte(body)}}, grpc.Header(&header))
	a.replayed = strings.Join(header.Get(grpckey.Replayed), ",") == "true"
	return a
}

// requireRefused checks a status of the package itself.
func requireRefused(t *testing.T, err error, code codes.Code, reason string) (retryAfter time.Duration) {
	t.Helper()
	answer := status.Convert(err)
	require.Equal(t, code, answer.Code(), err)
	require.NotContains(t, answer.Message(), "canary")
	found := ""
	for _, detail := range answer.Details() {
		switch of := detail.(type) {
		case *errdetails.ErrorInfo:
			require.Equal(t, grpckey.Domain, of.GetDomain())
			found = of.GetReason()
		case *errdetails.RetryInfo:
			retryAfter = of.GetRetryDelay().AsDuration()
		}
	}
	require.Equal(t, reason, found)
	return retryAfter
}

// Property: a hundred calls at once with one key have one effect and one response; a retry replays
// it, in each tenant on its own, and another request under the key is refused.
func TestCallIsExecutedOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var ran atomic.Int64
	c := serve(t, pool, grpckey.Config{Operation: idempotency.Config{WaitMax: 10 * time.Second}}, func(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
		return &testpb.SimpleResponse{Username: grpckey.Key(ctx).ChildID("order").String(), ServerId: fmt.Sprint(ran.Add(1))}, insert(ctx, request)
	})
	answers := make([]answer, 100)
	var group sync.WaitGroup
	for n := range answers {
		group.Go(func() { answers[n] = c.ask(t.Context(), "k", "a") })
	}
	group.Wait()
	first := 0
	for _, a := range answers {
		require.NoError(t, a.err)
		require.True(t, proto.Equal(answers[0].response, a.response))
		if !a.replayed {
			first++
		}
	}
	require.Equal(t, 1, first)
	require.Equal(t, 1, effects(t, pool))
	require.True(t, c.ask(t.Context(), "k", "a").replayed)
	requireRefused(t, c.ask(t.Context(), "k", "b").err, codes.InvalidArgument, "IDEMPOTENCY_KEY_REUSED")
	other := c.ask(t.Context(), "k", "b", "tenant", "other")
	require.NoError(t, other.err)
	require.False(t, other.replayed)
	require.Equal(t, 2, effects(t, pool))
}

// Property: the code of a failure decides whether it is the outcome, with its details, or frees the
// key; its effects are rolled back in any case.
func TestCodeDecidesWhatIsKept(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	var ran atomic.Int64
	var fails atomic.Pointer[error]
	c := serve(t, pool, grpckey.Config{}, func(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
		ran.Add(1)
		if err := insert(ctx, request); err != nil {
			return nil, err
		}
		return &testpb.SimpleResponse{}, *fails.Load()
	})
	kept := []codes.Code{codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition, codes.OutOfRange, codes.Unimplemented}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		detailed, err := status.New(code, "of the handler").WithDetails(&errdetails.ErrorInfo{Reason: "LIMIT"})
		require.NoError(t, err)
		failure := fmt.Errorf("wrapped: %w", detailed.Err())
		fails.Store(&failure)
		ran.Store(0)
		for try := range 2 {
			a := c.ask(t.Context(), code.String(), "a")
			got := status.Convert(a.err)
			require.Equal(t, code, got.Code())
			require.Equal(t, "of the handler", got.Message())
			require.Len(t, got.Details(), 1)
			require.Equal(t, try == 1 && slices.Contains(kept, code), a.replayed, code)
		}
		want := int64(2)
		if slices.Contains(kept, code) {
			want = 1
		}
		require.Equal(t, want, ran.Load(), code)
	}
	require.Zero(t, effects(t, pool))
	require.Equal(t, 6, keys(t, pool))
}

// Property: an error of the database that a handler returns as it is runs it again where that
// helps, and reaches no client.
func TestErrorsOfTheDatabase(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	failures := map[string]error{"conflict": &pgconn.PgError{Code: "40001"}, "away": &pgconn.PgError{Code: "57P01"}, "other": errors.New("canary")}
	var ran atomic.Int64
	c := serve(t, pool, grpckey.Config{}, func(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
		body := string(request.GetPayload().GetBody())
		request.Payload.Body = []byte("what a run changes, a later one must not see")
		if n := ran.Add(1); body != "conflict" || n == 1 {
			return nil, errors.Join(insert(ctx, request), fmt.Errorf("canary: %w", failures[body]))
		}
		return &testpb.SimpleResponse{}, insert(ctx, request)
	})
	require.NoError(t, c.ask(t.Context(), "k", "conflict").err)
	require.EqualValues(t, 2, ran.Load())
	require.Equal(t, time.Second, requireRefused(t, c.ask(t.Context(), "l", "away").err, codes.Unavailable, "UNAVAILABLE"))
	requireRefused(t, c.ask(t.Context(), "m", "other").err, codes.Internal, "INTERNAL")
	require.Equal(t, 1, effects(t, pool))
	require.Equal(t, 1, keys(t, pool))
}

// Property: a call without a usable key or tenant is refused without a database; a method that is
// not listed passes.
func TestRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	c := serve(t, pgtest.NoPool(t), grpckey.Config{Fingerprint: func(_ string, request proto.Message) ([]byte, error) {
		if string(request.(*testpb.SimpleRequest).GetPayload().GetBody()) == "odd" {
			return nil, errors.New("canary")
		}
		return nil, nil
	}}, nil)
	for name, of := range map[string]struct {
		key, body string
		pairs     []string
		code      codes.Code
		reason    string
	}{
		"no key":       {"", "a", nil, codes.InvalidArgument, "IDEMPOTENCY_KEY_MISSING"},
		"blank":        {"a b", "a", nil, codes.InvalidArgument, "IDEMPOTENCY_KEY_MALFORMED"},
		"long":         {strings.Repeat("k", 256), "a", nil, codes.InvalidArgument, "IDEMPOTENCY_KEY_MALFORMED"},
		"two":          {"a", "a", []string{grpckey.Metadata, "b"}, codes.InvalidArgument, "IDEMPOTENCY_KEY_MALFORMED"},
		"odd":          {"a", "odd", nil, codes.InvalidArgument, "REQUEST_UNREADABLE"},
		"stranger":     {"", "a", []string{"tenant", "stranger"}, codes.Unauthenticated, "UNAUTHENTICATED"},
		"broken scope": {"a", "a", []string{"tenant", "broken"}, codes.Internal, "INTERNAL"},
		"no tenant":    {"a", "a", []string{"tenant", ""}, codes.Internal, "INTERNAL"},
		"well":         {"a", "a", nil, codes.Unavailable, "UNAVAILABLE"}, // only this one asks the database
	} {
		a := c.ask(t.Context(), of.key, of.body, of.pairs...)
		t.Log(name)
		requireRefused(t, a.err, of.code, of.reason)
	}
	_, err := c.EmptyCall(t.Context(), &testpb.Empty{})
	require.NoError(t, err)
}

// Property: each error of the engine has its code and its reason, and the time of a retry if one
// helps.
func TestReasons(t *testing.T) {
	t.Parallel()
	once, err := grpckey.New(pgtest.NoPool(t), tenantOf, grpckey.Config{
		Operation: idempotency.Config{Operation: "orders"}, Methods: []string{testpb.TestService_UnaryCall_FullMethodName},
	})
	require.NoError(t, err)
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason string
		after  time.Duration
	}{
		{&idempotency.InProgressError{Crowded: true, RetryAfter: time.Minute}, codes.ResourceExhausted, "IDEMPOTENCY_TOO_MANY_WAITING", time.Minute},
		{&idempotency.InProgressError{RetryAfter: time.Second}, codes.Aborted, "IDEMPOTENCY_KEY_IN_PROGRESS", time.Second},
		{idempotency.ErrMismatch, codes.InvalidArgument, "IDEMPOTENCY_KEY_REUSED", 0},
		{idempotency.ErrIndeterminate, codes.FailedPrecondition, "IDEMPOTENCY_KEY_UNDECIDED", 0},
		{idempotency.ErrAbandoned, codes.FailedPrecondition, "IDEMPOTENCY_KEY_UNDECIDED", 0},
		{idempotency.ErrUnanswered, codes.Unavailable, "IDEMPOTENCY_OUTCOME_UNKNOWN", time.Second},
		{idempotency.ErrUnreadable, codes.Unavailable, "IDEMPOTENCY_OUTCOME_UNKNOWN", time.Second},
		{&pgconn.PgError{Code: "53300"}, codes.Unavailable, "UNAVAILABLE", time.Second},
		{errors.New("canary"), codes.Internal, "INTERNAL", 0},
	} {
		require.Equal(t, c.after, requireRefused(t, once.Answer(t.Context(), fmt.Errorf("once: %w", c.err)), c.code, c.reason))
	}
}

// Property: a client that comes when its key is forgotten learns that its call was executed, and
// does not execute it again.
func TestAfterTheWindow(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolWith(t, `CREATE TABLE orders (id uuid PRIMARY KEY)`)
	c := serve(t, pool, grpckey.Config{}, func(ctx context.Context, _ *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
		tag, err := grpckey.Tx(ctx).Exec(ctx, `INSERT INTO orders (id) VALUES ($1) ON CONFLICT DO NOTHING`, grpckey.Key(ctx).ChildID("order"))
		if err == nil && tag.RowsAffected() == 0 {
			err = idempotency.ErrExpired
		}
		return &testpb.SimpleResponse{}, err
	})
	require.NoError(t, c.ask(t.Context(), "k", "a").err)
	_, err := pool.Exec(t.Context(), `DELETE FROM effectonce.idempotency_keys`)
	require.NoError(t, err)
	for _, replayed := range []bool{false, true} {
		a := c.ask(t.Context(), "k", "a")
		requireRefused(t, a.err, codes.FailedPrecondition, "IDEMPOTENCY_KEY_EXPIRED")
		require.Equal(t, replayed, a.replayed)
	}
	require.Equal(t, 1, pgtest.Count(t, pool, `SELECT count(*) FROM orders`))
}

// Property: New reports everything that is wrong at once.
func TestNewReportsAllProblems(t *testing.T) {
	t.Parallel()
	_, err := grpckey.New(nil, nil, grpckey.Config{
		HandlerTimeout: 2 * time.Hour,
		Methods:        []string{testpb.TestService_UnaryCall_FullMethodName, "/none.Service/Call", "grpc.testing.TestService/UnaryCall", testpb.TestService_FullDuplexCall_FullMethodName},
	})
	for _, part := range []string{
		"scope is nil", "pool is nil", "Operation", "HandlerTimeout 2h0m0s", `Methods "/none.Service/Call": want the full name`,
		`Methods "grpc.testing.TestService/UnaryCall"`, `Methods "/grpc.testing.TestService/FullDuplexCall"`,
	} {
		require.ErrorContains(t, err, part)
	}
	require.NotContains(t, err.Error(), `"/grpc.testing.TestService/UnaryCall"`)
	_, err = grpckey.New(pgtest.NoPool(t), tenantOf, grpckey.Config{Operation: idempotency.Config{Operation: "a"}, HandlerTimeout: 100 * time.Millisecond})
	require.ErrorContains(t, err, "HandlerTimeout 100ms: want more than Operation.WaitMax, 250ms")
	require.ErrorContains(t, err, "Methods []: want at least one")
}

// Property: a response that is too large to be kept is sent once and not executed again; what Strict
// made of a failure, and what a person stored, is the outcome. What is not UTF-8 in a text becomes
// U+FFFD.
func TestOtherOutcomes(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	c := serve(t, pool, grpckey.Config{Operation: idempotency.Config{ResponseBytesMax: 200, Strict: true}}, func(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
		switch string(request.GetPayload().GetBody()) {
		case "fails":
			return nil, errors.New("canary")
		case "refuses":
			return nil, status.Error(codes.InvalidArgument, "no account \xff!")
		}
		return &testpb.SimpleResponse{Username: strings.Repeat("a", 201)}, insert(ctx, request)
	})
	require.NoError(t, c.ask(t.Context(), "k", "large").err)
	requireRefused(t, c.ask(t.Context(), "k", "large").err, codes.FailedPrecondition, "IDEMPOTENCY_RESPONSE_NOT_KEPT")
	for range 2 {
		requireRefused(t, c.ask(t.Context(), "strict", "fails").err, codes.Internal, "INTERNAL")
		require.ErrorContains(t, c.ask(t.Context(), "odd", "refuses").err, "no account \ufffd!")
	}
	require.Equal(t, 1, effects(t, pool))
	for _, person := range []struct {
		status     int
		body, says string
		code       codes.Code
	}{
		{204, "", "", codes.OK}, {200, "no protocol buffer", "", codes.Internal}, {409, "withdrawn", "finished with status 409", codes.FailedPrecondition}, {409, "", "finished with status 409", codes.FailedPrecondition},
	} {
		_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET status = $1, body = $2, body_dropped = false WHERE key = 'k'`, person.status, []byte(person.body))
		require.NoError(t, err)
		err = c.ask(t.Context(), "k", "large").err
		require.Equal(t, person.code, status.Code(err))
		require.Contains(t, status.Convert(err).Message(), person.says)
	}
}

// Property: an answer whose work was rolled back, and stored as a failure, does not reach the client:
// what the handler swallowed fails the first call as it does the second.
func TestAnswerThatWasRolledBackIsNotReturned(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `ALTER TABLE effects ADD CONSTRAINT once UNIQUE (name) DEFERRABLE INITIALLY DEFERRED`)
	require.NoError(t, err)
	misuses := map[string]func(ctx context.Context){
		"a failed statement": func(ctx context.Context) { _, _ = grpckey.Tx(ctx).Exec(ctx, `SELECT 1/0`) },
		"open rows":          func(ctx context.Context) { _, _ = grpckey.Tx(ctx).Query(ctx, `SELECT generate_series(1, 10)`) },
		"a late constraint": func(ctx context.Context) {
			_, _ = grpckey.Tx(ctx).Exec(ctx, `INSERT INTO effects (name) VALUES ('a late constraint')`)
		},
	}
	c := serve(t, pool, grpckey.Config{Operation: idempotency.Config{Strict: true}}, func(ctx context.Context, request *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
		err := insert(ctx, request)
		misuses[string(request.GetPayload().GetBody())](ctx)
		return &testpb.SimpleResponse{Username: "done"}, err
	})
	for name := range misuses {
		for _, replayed := range []bool{false, true} {
			a := c.ask(t.Context(), strings.ReplaceAll(name, " ", "-"), name)
			requireRefused(t, a.err, codes.Internal, "INTERNAL")
			require.Equal(t, replayed && name != "open rows", a.replayed, "%s: a connection with open rows stores nothing", name)
		}
	}
	require.Zero(t, effects(t, pool))
}

func TestMain(m *testing.M) { pgtest.Main(m) }
