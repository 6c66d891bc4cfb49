package idempotency_test

import (
	"context"
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// mixed are headers of which only Location may be stored.
func mixed() map[string][]string {
	header := map[string][]string{"Connection": {"close, X-Hop"}, "X-Hop": {canary}, "Location": {"/orders/7"}, "X-\xe4": {canary}}
	for _, name := range []string{
		"Set-Cookie", "set-cookie", "Set-Cookie2", "Cookie", "Authorization", "Authentication-Info", "WWW-Authenticate", "Proxy-Authorization",
		"Proxy-Authenticate", "Proxy-Authentication-Info", "Keep-Alive", "Transfer-Encoding", "Upgrade", "TE", "Trailer", "Proxy-Connection",
		"X-Auth-Token", "x-api-key", "X-Amz-Security-Token",
	} {
		header[name] = []string{canary}
	}
	return header
}

// Property: cookies, credentials and headers of a connection are not stored, wherever an outcome
// comes from: work, a refusal, Config.Failed, a phase, a reconciler. Row H12 of guarantees.md.
func TestSomeHeadersAreNeverStored(t *testing.T) {
	t.Parallel()
	response := idempotency.Response{Status: 201, Header: mixed(), Body: []byte("done")}
	pool := newPool(t)
	ask := func(cfg idempotency.Config, err error) func(k idempotency.Key) error {
		return func(k idempotency.Key) error {
			_, failure := newOperation(t, pool, cfg).Once(t.Context(), k, func(context.Context, pgx.Tx) (idempotency.Response, error) { return response, err })
			return failure
		}
	}
	flow := func(phase idempotency.Phase[int], reconcile bool) func(k idempotency.Key) error {
		return func(k idempotency.Key) error {
			phase.Name = "only"
			var cfg idempotency.FlowConfig[int]
			if reconcile {
				cfg.Reconcile = func(context.Context, idempotency.UndecidedKey[int]) (idempotency.Decision, error) {
					return idempotency.Happened(response), nil
				}
			}
			f, err := idempotency.NewFlow(newOperation(t, pool, idempotency.Config{}), cfg, phase)
			require.NoError(t, err)
			_, err = f.Do(t.Context(), k, nil)
			if reconcile {
				require.ErrorIs(t, err, idempotency.ErrIndeterminate)
				passes(t, pool, time.Minute)
				_, err = f.Reconcile(t.Context())
			}
			return err
		}
	}
	failed := func(error) idempotency.Response { return response }
	for name, do := range map[string]func(k idempotency.Key) error{
		"work":     ask(idempotency.Config{}, nil),
		"refusal":  ask(idempotency.Config{}, idempotency.Final(response, errors.New("declined"))),
		"strict":   ask(idempotency.Config{Strict: true, Failed: failed}, errors.New("away")),
		"attempts": ask(idempotency.Config{AttemptsMax: 1, Failed: failed}, errors.New("away")),
		"phase": flow(idempotency.Phase[int]{Call: func(_ context.Context, step *idempotency.Step[int]) error {
			step.Finish(response)
			return nil
		}}, false),
		"refused phase": flow(idempotency.Phase[int]{Call: func(context.Context, *idempotency.Step[int]) error {
			return idempotency.Final(response, errors.New("declined"))
		}}, false),
		"reconciler": flow(idempotency.Phase[int]{AtMostOnce: true, Call: func(context.Context, *idempotency.Step[int]) error {
			return errors.New("no answer")
		}}, true),
	} {
		require.NoError(t, do(key(name)), name)
		again, err := newOperation(t, pool, idempotency.Config{}).Once(t.Context(), key(name), nil)
		require.NoError(t, err, name)
		require.Equal(t, idempotency.Response{
			Status: 201, Header: map[string][]string{"Location": {"/orders/7"}}, Body: []byte("done"), Replayed: true,
		}, again, name)
	}
	require.NotContains(t, dump(t, pool), canary)
	require.Equal(t, mixed(), response.Header, "the caller's is left as it is")
}

// Property: a header whose name reads like a credential is one, however it is spelled; what
// describes an answer is none, also where a part of its name looks like it. Row H12 of
// guarantees.md.
func TestNamesOfCredentials(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"Set-Cookie", "SET_COOKIE", "X-Cookie-Consent", "Authorization", "X-Authorization", "X-Authentication", "X-Auth", "X-OAuth2-User", " X-Auth-User ",
		"X-Auth-Token", "x-auth-token", "X_AUTH_TOKEN", "XAuthToken", "X-Access-Token", "X-Refreshtoken", "X-Amz-Security-Token", "X-Vault-Token",
		"X-Api-Key", "Api-Key", "apikey", "X.Api.Key", "X-Goog-Api-Key", "Ocp-Apim-Subscription-Key", "X-Functions-Key", "X-Access-Key", "X-Signing-Key", "X-Master-Key",
		"X-Secret", "Client-Secret", "X-Password", "X-Passwd", "X-Pwd", "X-Passphrase", "X-Credential", "X-Session-Id", "Sessionid", "Sid", "X-Otp",
		"X-Jwt", "X-Goog-Iap-Jwt-Assertion", "X-CSRF-Token", "X-Csrf", "X-XSRF", "DPoP", "Replay-Nonce", "Bearer", "X-SAML-Response",
	} {
		require.True(t, idempotency.NeverStored(name), name)
	}
	for _, name := range []string{
		"ETag", "Location", "Content-Type", "X-Request-Id", "Idempotency-Key", "Author", "X-Author-Name", "X-Authority", "Authorship", "X-Partition-Key", "X-Key",
		"X-Keyword", "Sort-Key", "X-Sidebar", "X-Passenger", "X-Compass", "Access-Control-Allow-Credentials", "Access-Control-Allow-Headers",
		"Signature", "Signature-Input", "Digest", "X-Order-Id", "X-Therapy-Name", "X-Total-Count", "Sunset", "",
	} {
		require.False(t, idempotency.NeverStored(name), name)
	}
}

// Property: headers are replayed byte for byte, encrypted or not, also those that JSON cannot hold:
// Latin-1, as names of files have it, and NUL.
func TestHeadersAreReplayedByteForByte(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	header := map[string][]string{
		"Content-Disposition": {"attachment; filename=\"r\xe9sum\xe9.pdf\""},
		"Location":            {"/caf\xe9", "/café", "\x00", "\\u0000", "\xff\xfe", "\uFFFD", "<&>\u2028", `{"base64":"AAAA"}`, ""},
		"X-É":                 {"a"},
		"X-Empty":             nil,
	}
	want := maps.Clone(header)
	for name, seal := range map[string]idempotency.Sealer{"plain": nil, "sealed": newSealer(t, "old", "old")} {
		ask := func() idempotency.Response {
			response, err := newOperation(t, pool, idempotency.Config{Seal: seal}).Once(t.Context(), key(name), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				return idempotency.Response{Status: 201, Header: header}, effect(ctx, tx, name)
			})
			require.NoError(t, err, name)
			return response
		}
		require.False(t, ask().Replayed)
		again := ask()
		require.True(t, again.Replayed)
		require.Equal(t, want, again.Header, name)
		require.Equal(t, 1, effects(t, pool, name))
	}
}
