package dedup_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
)

// goldenWithSecret must never change: a release that computes other IDs would publish and call a
// second time.
var goldenWithSecret = [3]string{
	"019aa4b6-457b-728a-8795-2b692fea3e2c",
	"cc0cadc8-7250-8b00-acca-7a105781344a",
	"d9508f88-29d3-88b9-a228-9ebd17d2c756",
}

// Without secrets IDs are the documented ones. With secrets they differ, and depend only on the
// message's time: each attempt has the same IDs before, during and after a rotation. The values
// were computed by another program (HMAC-SHA-256).
func TestSecretsDeriveOtherIDs(t *testing.T) {
	t.Parallel()
	first, second := time.UnixMilli(1763000000000), time.UnixMilli(1764000000000)
	keys := [][]byte{bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)}
	at := time.UnixMilli(1763700000123)
	one, err := dedup.NewSecrets(dedup.Secret{From: first, Key: keys[0]})
	require.NoError(t, err)
	both, err := dedup.NewSecrets(dedup.Secret{From: first, Key: keys[0]}, dedup.Secret{From: second, Key: keys[1]})
	require.NoError(t, err)
	timed := func(at time.Time) uuid.UUID { return dedup.ChildID(uuid.UUID{}, "", at) }
	hashed := dedup.MessageID("orders", []byte("order-4711"))
	derive := func(s *dedup.Secrets, parent uuid.UUID, record time.Time) [3]string {
		return [3]string{
			s.ChildID(parent, "charge", at, record).String(), s.CallKey("billing", parent, "charge", record).String(), s.LaterID(parent, "charge", record).String(),
		}
	}
	for _, tc := range []struct {
		name   string
		parent uuid.UUID
		record time.Time
		secret int // 0: none
	}{
		{"by the ID's time, before", timed(first.Add(-time.Millisecond)), second, 0},
		{"by the ID's time, at the first moment", timed(first), time.Time{}, 1},
		{"by the ID's time, the second one", timed(second), first, 2},
		{"by the record's time, before", hashed, first.Add(-time.Nanosecond), 0},
		{"by the record's time", hashed, first, 1},
		{"by the record's time, the second one", hashed, second.Add(time.Hour), 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			plain := [3]string{
				dedup.ChildID(tc.parent, "charge", at).String(), dedup.CallKey("billing", tc.parent, "charge").String(),
				dedup.MessageID("effectonce:later", append(tc.parent[:], "charge"...)).String(),
			}
			assert.Equal(t, plain, derive(nil, tc.parent, tc.record), "no secrets")
			with := derive(both, tc.parent, tc.record)
			if tc.secret == 0 {
				assert.Equal(t, plain, with)
				return
			}
			for i := range with {
				assert.NotEqual(t, plain[i], with[i])
			}
			if tc.secret == 1 {
				assert.Equal(t, derive(one, tc.parent, tc.record), with, "a rotation changes nothing for messages from before it")
				return
			}
			assert.NotEqual(t, derive(one, tc.parent, tc.record), with)
		})
	}

	golden := derive(one, uuid.MustParse("019aa4b6-457b-7abc-9def-0123456789ab"), time.Time{})
	assert.Equal(t, goldenWithSecret, golden)
	child := uuid.MustParse(golden[0])
	carried, ok := dedup.Time(child)
	assert.True(t, ok && carried.Equal(at), "a child carries its time")
	for _, id := range golden[1:] {
		_, ok := dedup.Time(uuid.MustParse(id))
		assert.False(t, ok, "calls and messages for later carry none")
	}
}

// Invalid secrets are refused, all problems at once, and no key is in the text.
func TestWrongSecretsAreRefused(t *testing.T) {
	t.Parallel()
	_, err := dedup.NewSecrets()
	require.ErrorContains(t, err, "one at least")
	at, key := time.UnixMilli(1763000000000), bytes.Repeat([]byte("k"), 32)
	_, err = dedup.NewSecrets(dedup.Secret{From: at, Key: []byte("short")}, dedup.Secret{From: at, Key: key}, dedup.Secret{From: at.Add(1), Key: key},
		dedup.Secret{From: at.Add(2), Key: bytes.Repeat([]byte("k"), 1025)})
	require.Error(t, err)
	for _, want := range []string{"secret 0 has a Key of 5 bytes: want 32 to 1024", "secret 1 has a From that is not after", "secrets 1 and 2 have the same Key", "secret 3 has a Key of 1025"} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), "short")
	require.NotContains(t, err.Error(), "kkkk")
}

// A secret is in no log, error or report, however it is printed; and the caller may overwrite the
// key that it passed.
func TestSecretsAreNeverPrinted(t *testing.T) {
	t.Parallel()
	key := []byte("correct horse battery staple, twice")
	secret := dedup.Secret{From: time.UnixMilli(1), Key: key}
	secrets, err := dedup.NewSecrets(secret)
	require.NoError(t, err)
	type config struct {
		Secret  dedup.Secret
		Secrets *dedup.Secrets
	}
	var out bytes.Buffer
	for _, value := range []any{secret, &secret, secrets, config{secret, secrets}, &config{secret, secrets}, []dedup.Secret{secret}, map[string]any{"a": secret}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			fmt.Fprintf(&out, verb+"\n", value)
		}
		slog.New(slog.NewTextHandler(&out, nil)).Info("text", "value", value)
		slog.New(slog.NewJSONHandler(&out, nil)).Info("json", "value", value)
		text, err := json.Marshal(value)
		require.NoError(t, err)
		out.Write(text)
	}
	for _, trace := range []string{string(key), hex.EncodeToString(key), strings.Trim(fmt.Sprintf("%d", key), "[]"), "0x63, 0x6f", "Y29ycmVjdC"} {
		assert.NotContains(t, out.String(), trace)
	}
	assert.Contains(t, out.String(), "(secret)")

	before := secrets.CallKey("s", uuid.UUID{1}, "step", time.UnixMilli(1<<46))
	clear(key)
	assert.Equal(t, before, secrets.CallKey("s", uuid.UUID{1}, "step", time.UnixMilli(1<<46)))
}
