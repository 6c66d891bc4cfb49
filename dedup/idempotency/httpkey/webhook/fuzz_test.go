package webhook_test

import (
	"encoding/base64"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
)

// Property: whatever the headers and the body contain, a delivery is accepted only if they contain,
// unchanged, the signature that other code computes for it, and then with a time and an ID that can
// be stored.
func FuzzStandardWebhooks(f *testing.F) {
	s := senders()["standard"]
	good := s.sign(f, secret, "evt_1", time.Unix(1_700_000_000, 0), bodyOf("evt_1"))
	f.Add("evt_1", "1700000000", good.Get(s.signature), bodyOf("evt_1"))
	f.Add("evt_1", "1700000000", "v1, v1a, v1,x "+good.Get(s.signature), bodyOf("evt_1"))
	f.Add("evt_1.1", "+1700000000", "v1a,"+strings.Repeat("A", 86)+"==", []byte(nil))
	scheme := webhook.StandardWebhooks(secret, public())
	key, err := base64.StdEncoding.DecodeString(secret[6:])
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, id, stamp, signature string, body []byte) {
		event, err := scheme.Verify(http.Header{"Webhook-Id": {id}, "Webhook-Timestamp": {stamp}, "Webhook-Signature": {signature}}, body)
		if err != nil {
			return
		}
		mac := unhex(t, hexMAC(string(key), id+"."+stamp+"."+string(body)))
		require.Contains(t, strings.Split(signature, " "), "v1,"+base64.StdEncoding.EncodeToString(mac))
		requireTime(t, stamp, event.Timestamp)
		require.Equal(t, id, event.ID)
	})
}

// Property: as above.
func FuzzStripe(f *testing.F) {
	s := senders()["stripe"]
	good := s.sign(f, "secret", "", time.Unix(1_700_000_000, 0), bodyOf("evt_1")).Get(s.signature)
	f.Add(good, bodyOf("evt_1"))
	f.Add("v0=a,v1=,"+good+",t", bodyOf("evt_1"))
	f.Add(s.sign(f, "secret", "", time.Unix(0, 0), []byte(`{"id":1}`)).Get(s.signature), []byte(`{"id":1}`))
	f.Add("t=1,t=2,v1=", []byte("{}"))
	scheme := webhook.Stripe("secret")
	f.Fuzz(func(t *testing.T, signature string, body []byte) {
		event, err := scheme.Verify(http.Header{"Stripe-Signature": {signature}}, body)
		if err != nil {
			return
		}
		items := strings.Split(signature, ",")
		stamp := strconv.FormatInt(event.Timestamp.Unix(), 10)
		i := slices.IndexFunc(items, func(item string) bool { return strings.HasPrefix(item, "t=") && len(item) > 2 })
		requireTime(t, items[i][2:], event.Timestamp)
		require.Contains(t, items, "v1="+hexMAC("secret", items[i][2:]+"."+string(body)), stamp)
		require.NotEmpty(t, event.ID)
	})
}

// Property: as above.
func FuzzGitHub(f *testing.F) {
	s := senders()["github"]
	good := s.sign(f, "secret", "id", time.Time{}, []byte("body")).Get(s.signature)
	f.Add("id", good, []byte("body"))
	f.Add("id", strings.ToUpper(good), []byte("body"))
	f.Add("", "sha1=", []byte(nil))
	scheme := webhook.GitHub("secret")
	f.Fuzz(func(t *testing.T, id, signature string, body []byte) {
		event, err := scheme.Verify(http.Header{"X-Hub-Signature-256": {signature}, "X-Github-Delivery": {id}, "X-Github-Event": {"push"}}, body)
		if err != nil {
			return
		}
		require.Equal(t, "sha256="+hexMAC("secret", string(body)), signature)
		require.Equal(t, id, event.ID)
		require.NotEmpty(t, id)
	})
}

func requireTime(t *testing.T, text string, is time.Time) {
	t.Helper()
	require.LessOrEqual(t, len(text), 12)
	n, err := strconv.ParseUint(text, 10, 63)
	require.NoError(t, err)
	require.Equal(t, int64(n), is.Unix())
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	raw := make([]byte, len(text)/2)
	for i := range raw {
		n, err := strconv.ParseUint(text[2*i:2*i+2], 16, 8)
		require.NoError(t, err)
		raw[i] = byte(n)
	}
	return raw
}
