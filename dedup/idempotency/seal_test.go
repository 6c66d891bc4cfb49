package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

const canary = "4111-1111-1111-1111"

// sealKeys are an old and a new key.
func sealKeys(names ...string) map[string][]byte {
	all := map[string][]byte{"old": bytes.Repeat([]byte("o1"), 16), "new": bytes.Repeat([]byte("n2"), 16)}
	maps.DeleteFunc(all, func(name string, _ []byte) bool { return !strings.Contains(strings.Join(names, " "), name) })
	return all
}

func newSealer(t *testing.T, current string, names ...string) *idempotency.AESSealer {
	t.Helper()
	s, err := idempotency.NewAESSealer(sealKeys(names...), current)
	require.NoError(t, err)
	return s
}

// dump is all that the table holds, as text and as bytes.
func dump(t *testing.T, pool *pgxpool.Pool) (all string) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(k::text || ' '
		|| coalesce(encode(body, 'escape'), '') || coalesce(encode(data, 'escape'), '') || coalesce(encode(request, 'escape'), ''), ' '), '')
		FROM effectonce.idempotency_keys k`).Scan(&all))
	return all
}

// sealedWith counts the rows that have something of a key, as AESSealer's text says.
func sealedWith(t *testing.T, pool *pgxpool.Pool, name string) int {
	t.Helper()
	return count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys WHERE sealed AND $1 = ANY (ARRAY[
		convert_from(substr(body, 3, get_byte(body, 1)), 'UTF8'), convert_from(substr(data, 3, get_byte(data, 1)), 'UTF8'),
		convert_from(substr(request, 3, get_byte(request, 1)), 'UTF8'), (SELECT convert_from(substr(h, 3, get_byte(h, 1)), 'UTF8')
		FROM decode(CASE jsonb_typeof(headers) WHEN 'string' THEN headers #>> '{}' END, 'base64') h)])`, name)
}

// Property: bodies are not in the table in clear; they are replayed with the key that they were
// made with, after it was replaced; without it the request is refused with the key's name, and has
// no second effect. Rows S13, H12 of guarantees.md.
func TestSealedResponsesOutliveRotation(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	pay := func(seal idempotency.Sealer) (idempotency.Response, error) {
		return newOperation(t, pool, idempotency.Config{Seal: seal}).Once(t.Context(), key("a"), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 201, Body: []byte("card " + canary)}, effect(ctx, tx, "a")
		})
	}
	_, err := pay(newSealer(t, "old", "old"))
	require.NoError(t, err)
	for _, seal := range []*idempotency.AESSealer{newSealer(t, "old", "old"), newSealer(t, "old", "old", "new"), newSealer(t, "new", "old", "new")} {
		response, err := pay(seal)
		require.NoError(t, err)
		require.True(t, response.Replayed)
		require.Equal(t, "card "+canary, string(response.Body))
	}
	_, err = pay(newSealer(t, "new", "new"))
	require.ErrorIs(t, err, idempotency.ErrUnknownSealKey)
	require.ErrorContains(t, err, `"old"`)
	_, err = pay(nil)
	require.ErrorContains(t, err, "no Config.Seal")
	require.Equal(t, 1, effects(t, pool, "a"))
	require.NotContains(t, dump(t, pool), canary)
	require.NotContains(t, dump(t, pool), fmt.Sprintf("%x", canary))
	require.Equal(t, 1, sealedWith(t, pool, "old"))
}

// Property: a flow that was begun with one key continues with the next one, in the middle: request,
// state and outcome are read, and none of them is in the table in clear at any time. Row S13 of
// guarantees.md.
func TestFlowOutlivesRotation(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	type state struct{ Card string }
	run := func(seal idempotency.Sealer, fail error) (idempotency.Response, error) {
		flow, err := idempotency.NewFlow(newOperation(t, pool, idempotency.Config{Seal: seal}), idempotency.FlowConfig[state]{StoreRequest: true},
			idempotency.Phase[state]{Name: "read", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[state]) error {
				step.State.Card = string(step.Request)
				return effect(ctx, tx, "read")
			}},
			idempotency.Phase[state]{Name: "note", Write: func(ctx context.Context, tx pgx.Tx, _ *idempotency.Step[state]) error {
				if errors.Is(fail, io.EOF) {
					return fail
				}
				return effect(ctx, tx, "note")
			}},
			idempotency.Phase[state]{Name: "pay", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[state]) error {
				if fail != nil {
					return fail
				}
				step.Finish(idempotency.Response{Status: 201, Body: []byte(step.State.Card)})
				return effect(ctx, tx, "pay")
			}})
		require.NoError(t, err)
		response, err := flow.Do(t.Context(), key("a"), []byte(canary))
		require.NotContains(t, dump(t, pool), canary)
		require.NotContains(t, dump(t, pool), fmt.Sprintf("%x", canary))
		return response, err
	}
	_, err := run(newSealer(t, "old", "old"), io.EOF)
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, 1, sealedWith(t, pool, "old"))
	_, err = run(newSealer(t, "new", "new"), io.ErrShortWrite)
	require.ErrorIs(t, err, idempotency.ErrUnknownSealKey)
	_, err = run(newSealer(t, "new", "old", "new"), io.ErrShortWrite)
	require.ErrorIs(t, err, io.ErrShortWrite)
	require.Equal(t, 1, sealedWith(t, pool, "new"), "what the second phase stored")
	require.Equal(t, 1, sealedWith(t, pool, "old"), "the request")
	response, err := run(newSealer(t, "new", "old", "new"), nil)
	require.NoError(t, err)
	require.Equal(t, canary, string(response.Body))
	require.Zero(t, sealedWith(t, pool, "old"))
	response, err = run(newSealer(t, "new", "new"), nil)
	require.NoError(t, err)
	require.Equal(t, canary, string(response.Body))
	require.Equal(t, []int{1, 1, 1}, []int{effects(t, pool, "read"), effects(t, pool, "note"), effects(t, pool, "pay")})
}

// Property: a text is opened only as it was made, and for what it was made: no bit of it may
// change, nor its row or column; the same text is sealed differently each time; the empty one stays
// what it is.
func TestSealedTextsAreBound(t *testing.T) {
	t.Parallel()
	s := newSealer(t, "old", "old", "new")
	for _, plain := range [][]byte{{}, []byte(canary), bytes.Repeat([]byte("x"), 1<<20)} {
		sealed, err := s.Seal(plain, []byte("row"))
		require.NoError(t, err)
		again, err := s.Seal(plain, []byte("row"))
		require.NoError(t, err)
		require.NotEqual(t, sealed, again)
		opened, err := s.Open(sealed, []byte("row"))
		require.NoError(t, err)
		require.Equal(t, plain, opened)
		_, err = s.Open(sealed, []byte("another row"))
		require.Error(t, err)
		for bit := range 8 * min(len(sealed), 64) {
			changed := bytes.Clone(sealed)
			changed[bit/8] ^= 1 << (bit % 8)
			_, err := s.Open(changed, []byte("row"))
			require.Error(t, err, bit)
		}
		for n := range min(len(sealed), 64) {
			_, err := s.Open(sealed[:n], []byte("row"))
			require.Error(t, err, n)
		}
	}
	// The same key under two names: the name is bound, too.
	both, err := idempotency.NewAESSealer(map[string][]byte{"aaa": sealKeys("old")["old"], "bbb": sealKeys("old")["old"]}, "aaa")
	require.NoError(t, err)
	sealed, err := both.Seal([]byte(canary), nil)
	require.NoError(t, err)
	_, err = both.Open(bytes.Replace(sealed, []byte("aaa"), []byte("bbb"), 1), nil)
	require.Error(t, err)
}

// Property: keys that cannot be right are refused, all at once, by their names, and keys are never
// shown.
func TestWrongSealKeysAreRefused(t *testing.T) {
	t.Parallel()
	_, err := idempotency.NewAESSealer(map[string][]byte{"": sealKeys("old")["old"], "short": []byte(canary), "zero": make([]byte, 32), "a\nb": nil}, "gone")
	for _, want := range []string{`name "" of`, `"short" has 19 bytes: want 32`, `"zero" has 32 bytes: want 32 random`, `name "a\nb" of`, `current encryption key "gone"`} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), canary)
	_, err = idempotency.NewAESSealer(nil, "")
	require.Error(t, err)
	s := newSealer(t, "old", "old")
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%d"} {
		for _, shown := range []string{fmt.Sprintf(verb, s), fmt.Sprintf(verb, *s), fmt.Sprintf(verb, idempotency.Config{Seal: s})} {
			require.NotContains(t, shown, "o1o1")
			require.NotContains(t, shown, "6f316f31")
			require.NotContains(t, shown, "111 49 111 49")
			require.NotContains(t, shown, "0x6f, 0x31")
		}
	}
}

// Property: whatever the table contains, opening it neither panics nor returns another text than
// was sealed.
func FuzzAESSealer(f *testing.F) {
	s, err := idempotency.NewAESSealer(sealKeys("old", "new"), "old")
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, text []byte) {
		plain, err := s.Open(text, nil)
		if err == nil {
			require.Equal(t, canary, string(plain))
		}
	})
}
