package idempotency_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// sealedPay answers with the canary in a header, and maybe without a body.
func sealedPay(t *testing.T, pool *pgxpool.Pool, seal idempotency.Sealer, name string, body []byte) (idempotency.Response, error) {
	t.Helper()
	return payWith(t, pool, idempotency.Config{Seal: seal}, name, body)
}

// acceptingPay is sealedPay where rows of before count.
func acceptingPay(t *testing.T, pool *pgxpool.Pool, seal idempotency.Sealer, name string, body []byte) (idempotency.Response, error) {
	t.Helper()
	return payWith(t, pool, idempotency.Config{Seal: seal, AcceptUnsealed: true}, name, body)
}

func payWith(t *testing.T, pool *pgxpool.Pool, cfg idempotency.Config, name string, body []byte) (idempotency.Response, error) {
	t.Helper()
	return newOperation(t, pool, cfg).Once(t.Context(), key(name), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201, Header: map[string][]string{"Location": {"/cards/" + canary}, "Link": {"a", "b"}}, Body: body}, effect(ctx, tx, name)
	})
}

// Property: headers of a response are not in the table in clear; they are replayed with the key
// that they were made with, after it was replaced, and only with it; they are bound to their row.
// Rows S13, H12 of guarantees.md.
func TestSealedHeaders(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, body := range map[string][]byte{"with": []byte("body"), "without": nil} {
		first, err := sealedPay(t, pool, newSealer(t, "old", "old"), name, body)
		require.NoError(t, err)
		again, err := sealedPay(t, pool, newSealer(t, "new", "old", "new"), name, body)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, first.Header, again.Header)
		require.Equal(t, first.Body, again.Body)
		_, err = sealedPay(t, pool, newSealer(t, "new", "new"), name, body)
		require.ErrorIs(t, err, idempotency.ErrUnknownSealKey)
		_, err = sealedPay(t, pool, nil, name, body)
		require.ErrorContains(t, err, "no Config.Seal")
		require.Equal(t, 1, effects(t, pool, name))
	}
	require.Equal(t, 2, sealedWith(t, pool, "old"), "a key is not left over for a row without a body")
	require.NotContains(t, dump(t, pool), canary)
	require.NotContains(t, dump(t, pool), "Location")
	require.Equal(t, 2, count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE jsonb_typeof(headers) = 'string'
		AND position('4111' IN encode(decode(headers #>> '{}', 'base64'), 'escape')) = 0`))

	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys k SET headers = o.headers
		FROM effectonce.idempotency_keys o WHERE k.key = $1 AND o.key = $2`, key("with").Value, key("without").Value)
	require.NoError(t, err)
	_, err = sealedPay(t, pool, newSealer(t, "old", "old"), "with", nil)
	require.ErrorContains(t, err, "moved here from another row")
}

// Property: responses that older releases stored are replayed: in a sealed row with headers in
// clear, and in one that was stored without a Sealer before there was one.
func TestStoredResponseOfAnOlderRelease(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	want, err := sealedPay(t, pool, newSealer(t, "old", "old"), "sealed", []byte("body"))
	require.NoError(t, err)
	_, err = sealedPay(t, pool, nil, "plain", []byte("body"))
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET headers = '{"Link": ["a", "b"], "Location": ["/cards/`+canary+`"]}'`)
	require.NoError(t, err)
	for _, name := range []string{"sealed", "plain"} {
		_, err := sealedPay(t, pool, newSealer(t, "old", "old"), name, nil)
		require.ErrorIs(t, err, idempotency.ErrUnsealed)
		require.ErrorIs(t, err, idempotency.ErrUnreadable)
		again, err := acceptingPay(t, pool, newSealer(t, "old", "old"), name, nil)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, want.Header, again.Header)
		require.Equal(t, "body", string(again.Body))
	}
	for _, broken := range []string{`"no base64!"`, `"` + strings.Repeat("A", 400) + `"`, `[1]`} {
		_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET headers = $1::text::jsonb`, broken)
		require.NoError(t, err)
		for _, name := range []string{"sealed", "plain"} {
			_, err = sealedPay(t, pool, newSealer(t, "old", "old"), name, nil)
			require.Error(t, err, broken)
		}
	}
	require.Equal(t, []int{1, 1}, []int{effects(t, pool, "sealed"), effects(t, pool, "plain")})
}
