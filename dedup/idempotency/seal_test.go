package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
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
func dump(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return pgtest.Value[string](t, pool, `SELECT coalesce(string_agg(k::text || ' '
		|| coalesce(encode(body, 'escape'), '') || coalesce(encode(data, 'escape'), '') || coalesce(encode(request, 'escape'), ''), ' '), '')
		FROM effectonce.idempotency_keys k`)
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

// Property: a sealed text that was changed, replaced or moved from another row is not replayed, and
// the work does not run again. A row stored in clear, as operators store outcomes, is replayed. Row
// S26 of security.md.
func TestChangedResponsesAreNotReplayed(t *testing.T) {
	t.Parallel()
	pool, cfg := newPool(t), idempotency.Config{Seal: newSealer(t, "old", "old")}
	_, err := payWith(t, pool, cfg, "another", []byte("body"))
	require.NoError(t, err)
	require.NotContains(t, dump(t, pool), canary)
	for forge, readable := range map[string]bool{
		`headers = '{"Location": ["/forged"]}'`: false, `headers = (SELECT headers FROM effectonce.idempotency_keys WHERE key = 'another')`: false,
		`body = 'forged'`: false, `headers = '"no base64!"'`: false, `sealed = false`: false, `sealed = false, headers = '[1]'`: false,
		`sealed = false, body = 'by hand', headers = '{"X-By": ["ana"]}'`: true,
	} {
		_, err := payWith(t, pool, cfg, forge, []byte("body"))
		require.NoError(t, err)
		pgtest.Exec(t, pool, `UPDATE effectonce.idempotency_keys SET `+forge+` WHERE key = $1`, forge)
		response, err := payWith(t, pool, cfg, forge, []byte("body"))
		if readable {
			require.NoError(t, err)
			require.Equal(t, idempotency.Response{Status: 201, Header: map[string][]string{"X-By": {"ana"}}, Body: []byte("by hand"), Replayed: true}, response)
		} else {
			require.ErrorIs(t, err, idempotency.ErrUnreadable, forge)
			require.Empty(t, response.Body)
			require.Empty(t, response.Header)
		}
		require.Equal(t, 1, effects(t, pool, forge))
	}
}

// Property: a program without the key of a flow's texts makes no call; a flow that began before
// there was a Sealer continues.
func TestFlowsWithoutTheirKeyWait(t *testing.T) {
	t.Parallel()
	pool, away := newPool(t), errAway
	flowOf := func(cfg idempotency.Config) *idempotency.Flow[payment] {
		return newFlow(t, newOperation(t, pool, cfg), idempotency.FlowConfig[payment]{StoreRequest: true}, []idempotency.Phase[payment]{calls(false, func(*step) error { return away }), ends("ship")})
	}
	sealed := idempotency.Config{Seal: newSealer(t, "old", "old")}
	for k, cfg := range map[string]idempotency.Config{"a": sealed, "b": {}} {
		_, err := flowOf(cfg).Do(t.Context(), key(k), []byte(canary))
		require.ErrorIs(t, err, errAway)
	}
	away = nil
	passes(t, pool, time.Hour)
	_, err := flowOf(idempotency.Config{Seal: newSealer(t, "new", "new")}).Complete(t.Context())
	require.ErrorIs(t, err, idempotency.ErrUnknownSealKey)
	_, err = flowOf(sealed).Do(t.Context(), key("a"), []byte(canary))
	require.NoError(t, err)
	_, err = flowOf(sealed).Do(t.Context(), key("b"), []byte(canary))
	require.NoError(t, err)
}

// payWith answers with the canary in a header, and maybe without a body.
func payWith(t *testing.T, pool *pgxpool.Pool, cfg idempotency.Config, name string, body []byte) (idempotency.Response, error) {
	t.Helper()
	return newOperation(t, pool, cfg).Once(t.Context(), key(name), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		return idempotency.Response{Status: 201, Header: map[string][]string{"Location": {"/cards/" + canary}, "Link": {"a", "b"}}, Body: body}, effect(ctx, tx, name)
	})
}

// Property: a text is opened only as it was made, and for what it was made: no bit of it may
// change, nor its row or column; the same text is sealed differently each time.
func TestSealedTextsAreBound(t *testing.T) {
	t.Parallel()
	s := newSealer(t, "old", "old", "new")
	for _, plain := range [][]byte{{}, []byte(canary)} {
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
		for bit := range 8 * len(sealed) {
			changed := bytes.Clone(sealed)
			changed[bit/8] ^= 1 << (bit % 8)
			_, err := s.Open(changed, []byte("row"))
			require.Error(t, err, bit)
			_, err = s.Open(sealed[:bit/8], []byte("row"))
			require.Error(t, err, bit)
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

// documentedRest runs the query of docs/how-to/secure.md: for each key of encryption how many rows
// have it, how many of them are unfinished, and how many are kept for ever.
func documentedRest(t *testing.T, pool *pgxpool.Pool) map[string][3]int {
	t.Helper()
	text, err := os.ReadFile("../../docs/how-to/secure.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Rotating the keys that encrypt requests\n")
	require.True(t, found)
	_, sql, found := strings.Cut(section, "```sql\n")
	require.True(t, found)
	sql, _, _ = strings.Cut(sql, ";\n```")
	rows, err := pool.Query(t.Context(), "SELECT name, keys, unfinished, for_ever FROM ("+sql+") q")
	require.NoError(t, err)
	rest, name, n := map[string][3]int{}, "", [3]int{}
	_, err = pgx.ForEachRow(rows, []any{&name, &n[0], &n[1], &n[2]}, func() error { rest[name] = n; return nil })
	require.NoError(t, err)
	return rest
}

// Property: in the documented three deployments each replica, of the earlier or later version,
// reads what the other stored, so that each request is executed once and replayed everywhere; in a
// single deployment an old replica refuses what a new one stored, and executes nothing. The query
// lists the keys still in use: the old key can be dropped when it is no longer listed, and not
// before. Row S13 of guarantees.md.
func TestDocumentedRotation(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ask := func(s *idempotency.AESSealer, value string) (idempotency.Response, error) {
		return payWith(t, pool, idempotency.Config{Seal: s}, value, []byte(canary+value))
	}
	before, both := newSealer(t, "old", "old"), newSealer(t, "old", "old", "new")
	current, after := newSealer(t, "new", "old", "new"), newSealer(t, "new", "new")
	for i, pair := range [][2]*idempotency.AESSealer{{before, both}, {both, before}, {both, current}, {current, both}, {current, after}} {
		value := fmt.Sprint(i)
		for _, s := range []*idempotency.AESSealer{pair[0], pair[0], pair[1]} {
			response, err := ask(s, value)
			require.NoError(t, err, i)
			require.Equal(t, canary+value, string(response.Body))
		}
		require.Equal(t, 1, effects(t, pool, value))
	}
	_, err := ask(before, "4")
	require.ErrorIs(t, err, idempotency.ErrUnknownSealKey)
	require.Equal(t, 1, effects(t, pool, "4"))

	ledger, err := idempotency.New(pool, idempotency.Config{Operation: "ledger", Forever: true, Seal: both})
	require.NoError(t, err)
	insert(t, ledger, "for ever")
	flow := newFlow(t, newOperation(t, pool, idempotency.Config{Seal: both}), idempotency.FlowConfig[payment]{StoreRequest: true}, []idempotency.Phase[payment]{calls(false, func(*step) error { return errAway }), ends("ship")})
	_, err = flow.Do(t.Context(), key("unfinished"), []byte(canary))
	require.ErrorIs(t, err, errAway)
	require.Equal(t, map[string][3]int{"old": {5, 1, 1}, "new": {2, 0, 0}}, documentedRest(t, pool))
	require.NotContains(t, dump(t, pool), canary)
	pgtest.Exec(t, pool, `DELETE FROM effectonce.idempotency_keys WHERE key NOT IN ('3', '4')`)
	require.Equal(t, map[string][3]int{"new": {2, 0, 0}}, documentedRest(t, pool))
}

// Property: under Seal a fingerprint is keyed: a request of few possible values cannot be found by trying. Equal
// requests are told from others as before, whichever key is current, and for rows from before Seal. Without
// the key there is no answer: above all not that the request is another one.
func TestFingerprintsAreKeyed(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ask := func(seal idempotency.Sealer, value string, fingerprint idempotency.Fingerprint) error {
		k := key(value)
		k.Fingerprint = fingerprint
		response, err := newOperation(t, pool, idempotency.Config{Seal: seal}).Once(t.Context(), k, func(context.Context, pgx.Tx) (idempotency.Response, error) {
			return idempotency.Response{Status: 204}, nil // nothing of it is encrypted
		})
		if err == nil && !response.Replayed {
			err = errors.New("executed")
		}
		return err
	}
	ten, eleven := idempotency.NewFingerprint([]byte("10")), idempotency.NewFingerprint([]byte("11"))
	before, both, current, after := newSealer(t, "old", "old"), newSealer(t, "old", "old", "new"), newSealer(t, "new", "old", "new"), newSealer(t, "new", "new")
	require.EqualError(t, ask(before, "a", ten), "executed")
	require.EqualError(t, ask(before, "b", ten), "executed")
	require.EqualError(t, ask(nil, "clear", ten), "executed")
	require.Equal(t, 2, pgtest.Count(t, pool, `SELECT count(DISTINCT fingerprint::bytea) FROM effectonce.idempotency_keys WHERE key <> 'clear' AND octet_length(fingerprint) > 32`), "equal requests look different")
	require.Equal(t, 1, strings.Count(dump(t, pool), fmt.Sprintf("%x", ten[:])), "of the clear one")
	for _, seal := range []idempotency.Sealer{before, both, current} {
		require.NoError(t, ask(seal, "a", ten))
		require.ErrorIs(t, ask(seal, "a", eleven), idempotency.ErrMismatch)
	}
	for _, fingerprint := range []idempotency.Fingerprint{ten, eleven} {
		require.ErrorIs(t, ask(after, "a", fingerprint), idempotency.ErrUnknownSealKey)
		require.ErrorIs(t, ask(nil, "a", fingerprint), idempotency.ErrUnreadable)
	}
	require.NoError(t, ask(current, "clear", ten))
	require.ErrorIs(t, ask(current, "clear", eleven), idempotency.ErrMismatch)
	require.Equal(t, map[string][3]int{"old": {2, 0, 0}}, documentedRest(t, pool))
	_, err := pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET fingerprint = (SELECT fingerprint FROM effectonce.idempotency_keys WHERE key = 'a') WHERE key = 'b'`)
	require.NoError(t, err)
	require.ErrorIs(t, ask(before, "b", ten), idempotency.ErrMismatch, "it is bound to its key")
	require.ErrorContains(t, ask(shortMAC{before}, "c", ten), "Sealer.MAC returned 32 bytes, want 33 to 400")
}

type shortMAC struct{ idempotency.Sealer }

func (shortMAC) MAC([]byte, []byte) ([]byte, error) { return make([]byte, 32), nil }

// mixed are headers of which only Location may be stored.
func mixed() map[string][]string {
	header := map[string][]string{"Location": {"/orders/7"}, "X-\xe4": {canary}}
	for _, name := range []string{
		"Set-Cookie", "set-cookie", "Set-Cookie2", "Cookie", "Authorization", "Authentication-Info", "WWW-Authenticate", "Proxy-Authorization",
		"Proxy-Authenticate", "Proxy-Authentication-Info", "Keep-Alive", "Transfer-Encoding", "Upgrade", "TE", "Trailer", "Proxy-Connection", "Connection", "Date", "cache-control",
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
	once := func(cfg idempotency.Config, err error) func(k idempotency.Key) error {
		return func(k idempotency.Key) error {
			_, failure := newOperation(t, pool, cfg).Once(t.Context(), k, func(context.Context, pgx.Tx) (idempotency.Response, error) { return response, err })
			return failure
		}
	}
	flow := func(call func(s *step) error) func(k idempotency.Key) error {
		return func(k idempotency.Key) error {
			f := newFlow(t, newOperation(t, pool, idempotency.Config{}), idempotency.FlowConfig[payment]{Reconcile: func(context.Context, idempotency.UndecidedKey[payment]) (idempotency.Decision, error) {
				return idempotency.Happened(response), nil
			}}, []idempotency.Phase[payment]{{Name: "charge", AtMostOnce: true, Call: func(_ context.Context, s *step) error { return call(s) }}})
			_, err := f.Do(t.Context(), k, nil)
			if errors.Is(err, idempotency.ErrIndeterminate) {
				passes(t, pool, time.Minute)
				_, err = f.Reconcile(t.Context())
			}
			return err
		}
	}
	for name, do := range map[string]func(k idempotency.Key) error{
		"work":       once(idempotency.Config{}, nil),
		"refusal":    once(idempotency.Config{}, idempotency.Final(response, errors.New("declined"))),
		"strict":     once(idempotency.Config{Strict: true, Failed: func(error) idempotency.Response { return response }}, errors.New("away")),
		"phase":      flow(func(s *step) error { s.Finish(response); return nil }),
		"reconciler": flow(func(*step) error { return errors.New("no answer") }),
	} {
		require.NoError(t, do(key(name)), name)
		again, err := newOperation(t, pool, idempotency.Config{}).Once(t.Context(), key(name), nil)
		require.NoError(t, err, name)
		require.Equal(t, idempotency.Response{Status: 201, Header: map[string][]string{"Location": {"/orders/7"}}, Body: []byte("done"), Replayed: true}, again, name)
	}
	require.NotContains(t, dump(t, pool), canary)
	require.Equal(t, mixed(), response.Header, "the caller's is left as it is")
}

// Property: headers are replayed byte for byte, encrypted or not; a value that the table cannot hold, such
// as Latin-1, is an error with its remedy, and nothing is stored.
func TestHeadersAreReplayedByteForByte(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for name, seal := range map[string]idempotency.Sealer{"plain": nil, "sealed": newSealer(t, "old", "old")} {
		once := func(name string, header map[string][]string) (idempotency.Response, error) {
			return newOperation(t, pool, idempotency.Config{Seal: seal}).Once(t.Context(), key(name), func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
				return idempotency.Response{Status: 201, Header: maps.Clone(header)}, effect(ctx, tx, name)
			})
		}
		header := map[string][]string{"Location": {"/café", "\\u0000", "\uFFFD", "<&>\u2028", `{"base64":"AAAA"}`, ""}, "X-É": {"a"}, "X-Empty": nil}
		for _, replayed := range []bool{false, true} {
			response, err := once(name, header)
			require.NoError(t, err, name)
			require.Equal(t, replayed, response.Replayed)
			require.Equal(t, header, response.Header, name)
		}
		for refused, value := range map[string]string{"Latin-1": "/caf\xe9", "NUL": "\x00"} {
			_, err := once(name+refused, map[string][]string{"Location": {"/", value}})
			require.ErrorContains(t, err, "header Location has a value that is not UTF-8, or has NUL")
			require.Zero(t, effects(t, pool, name+refused))
		}
	}
	require.Equal(t, 2, pgtest.Count(t, pool, `SELECT count(*) FROM effectonce.idempotency_keys`))
}
