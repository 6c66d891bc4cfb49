package webhook_test

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/httpkey/webhook"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// The standard's own example secret, and another one.
const (
	secret      = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	otherSecret = "whsec_b3RoZXItc2VjcmV0LW90aGVyLXNlY3JldA=="
)

// sender is a scheme, and code that signs for it which shares nothing with it.
type sender struct {
	scheme func(secrets ...string) webhook.Scheme
	// sign makes the headers of a delivery; body holds the ID for Stripe.
	sign func(tb testing.TB, secret, id string, at time.Time, body []byte) http.Header
	// signature is the header that holds it.
	signature string
	timed     bool
}

func hexMAC(secret, text string) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(text))
	return hex.EncodeToString(mac.Sum(nil))
}

func senders() map[string]sender {
	return map[string]sender{
		"standard": {
			scheme: webhook.StandardWebhooks, signature: "Webhook-Signature", timed: true,
			sign: func(tb testing.TB, secret, id string, at time.Time, body []byte) http.Header {
				tb.Helper()
				library, err := standardwebhooks.NewWebhook(secret)
				require.NoError(tb, err)
				signature, err := library.Sign(id, at, body)
				require.NoError(tb, err)
				return http.Header{"Webhook-Id": {id}, "Webhook-Timestamp": {strconv.FormatInt(at.Unix(), 10)}, "Webhook-Signature": {signature}}
			},
		},
		"stripe": {
			scheme: webhook.Stripe, signature: "Stripe-Signature", timed: true,
			sign: func(_ testing.TB, secret, _ string, at time.Time, body []byte) http.Header {
				return http.Header{"Stripe-Signature": {fmt.Sprintf("t=%d,v1=%s", at.Unix(), hexMAC(secret, fmt.Sprintf("%d.%s", at.Unix(), body)))}}
			},
		},
		"github": {
			scheme: webhook.GitHub, signature: "X-Hub-Signature-256",
			sign: func(_ testing.TB, secret, id string, _ time.Time, body []byte) http.Header {
				return http.Header{"X-Hub-Signature-256": {"sha256=" + hexMAC(secret, string(body))}, "X-Github-Delivery": {id}, "X-Github-Event": {"invoice.paid"}}
			},
		},
	}
}

func bodyOf(id string) []byte {
	return []byte(`{"id":"` + id + `","type":"invoice.paid","data":{"amount":100}}`)
}

// Property: what the senders publish as examples is accepted, and what we compute is what others
// compute: GitHub's and the standard's published vectors; Stripe publishes none, this one is
// Python's hmac's.
func TestPublishedVectors(t *testing.T) {
	t.Parallel()
	for name, vector := range map[string]struct {
		scheme webhook.Scheme
		header http.Header
		body   string
		want   webhook.Event
	}{
		"GitHub": {
			webhook.GitHub("It's a Secret to Everybody"),
			http.Header{
				"X-Hub-Signature-256": {"sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"},
				"X-Github-Delivery":   {"72d3162e-cc78-11e3-81ab-4c9367dc0958"}, "X-Github-Event": {"push"},
			},
			"Hello, World!",
			webhook.Event{ID: "72d3162e-cc78-11e3-81ab-4c9367dc0958", Type: "push"},
		},
		"Standard Webhooks": {
			webhook.StandardWebhooks(secret),
			http.Header{
				"Webhook-Id": {"msg_p5jXN8AQM9LWM0D4loKWxJek"}, "Webhook-Timestamp": {"1614265330"},
				"Webhook-Signature": {"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
			},
			`{"test": 2432232314}`,
			webhook.Event{ID: "msg_p5jXN8AQM9LWM0D4loKWxJek", Timestamp: time.Unix(1614265330, 0).UTC()},
		},
		"Stripe": {
			webhook.Stripe("whsec_test_secret"),
			http.Header{"Stripe-Signature": {"t=1492774577,v1=f7a632a9ffdbb1ced2fc48e44c374ec2cb4292469db292862c06ae703e2befbd,v0=6ffbb59b2300aae63f272406069a9788598b792a944a07aba816edb039989a39"}},
			`{"id":"evt_1","type":"invoice.paid"}`,
			webhook.Event{ID: "evt_1", Type: "invoice.paid", Timestamp: time.Unix(1492774577, 0).UTC()},
		},
	} {
		event, err := vector.scheme.Verify(vector.header, []byte(vector.body))
		require.NoError(t, err, name)
		require.Equal(t, vector.want, event, name)
	}
}

// Property: whatever prints a configuration prints no secret. Row H12 of guarantees.md.
func TestSecretsAreNotShown(t *testing.T) {
	t.Parallel()
	raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	require.NoError(t, err)
	for name, s := range senders() {
		cfg := webhook.Config{Sender: "s", Name: "n", Scheme: s.scheme(secret)}
		var logged bytes.Buffer
		slog.New(slog.NewTextHandler(&logged, nil)).Info("x", "config", cfg, "scheme", cfg.Scheme)
		shown := []string{logged.String()}
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			shown = append(shown, fmt.Sprintf(verb, cfg), fmt.Sprintf(verb, &cfg.Scheme))
		}
		for _, shown := range shown {
			for _, form := range []string{secret, secret[6:], string(raw), strings.Trim(fmt.Sprintf("%d", raw), "[]"), fmt.Sprintf("%x", raw), fmt.Sprintf("%x", secret)} {
				require.NotContains(t, shown, form, name)
			}
		}
	}
}

// Property: secrets that cannot be right are refused at start, all at once, by their place, and are
// not shown.
func TestWrongSecretsAreRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		scheme webhook.Scheme
		want   []string
	}{
		{webhook.Stripe(), []string{"Stripe: 0 secrets: want 1 to 16"}},
		{webhook.Stripe("ok", "canary\n", ""), []string{"Stripe: secret 2", "Stripe: secret 3"}},
		{webhook.GitHub(make([]string, 17)...), []string{"GitHub: 17 secrets", "GitHub: secret 17"}},
		{webhook.StandardWebhooks(), []string{"0 secrets"}},
		{webhook.StandardWebhooks("canary", "whsec_canary!", "whsec_Y2FuYXJ5", "whpk_Y2FuYXJ5", secret+"\n"), []string{"secret 1: want", "secret 2: want", "secret 3: want", "secret 4: want", "secret 5: want"}},
		{webhook.Scheme{}, []string{"Scheme is empty"}},
		{webhook.SchemeOf(nil), []string{"Scheme is empty"}},
	} {
		_, err := webhook.New(nil, webhook.Config{Sender: "", Scheme: c.scheme}, nil)
		for _, want := range append(c.want, "Sender: ", "Name: ", "handler is nil", "pool is nil") {
			require.ErrorContains(t, err, want)
		}
		require.NotContains(t, err.Error(), "canary")
		require.NotContains(t, err.Error(), "Y2FuYXJ5")
	}
}

// Property: settings out of bounds, and those that do not go together, are refused with field,
// value and bound.
func TestWrongSettingsAreRefused(t *testing.T) {
	t.Parallel()
	change := map[string]func(*webhook.Config){
		"Tolerance 1ms: want":                                func(c *webhook.Config) { c.Tolerance = time.Millisecond },
		"Idempotency.WaitMax 30s: want less than 30s":        func(c *webhook.Config) { c.Idempotency.WaitMax = 30 * time.Second },
		"BodyBytesMax -1: want":                              func(c *webhook.Config) { c.BodyBytesMax = -1 },
		"Idempotency.Window 10m0s: want more than twice the": func(c *webhook.Config) { c.Idempotency.Window = 10 * time.Minute },
		"Idempotency.Strict: want false":                     func(c *webhook.Config) { c.Idempotency.Strict = true },
	}
	for want := range maps.Keys(change) {
		cfg := webhook.Config{Sender: "s", Name: "n", Scheme: webhook.GitHub("secret")}
		change[want](&cfg)
		_, err := webhook.New(pgtest.NoPool(t), cfg, nil)
		require.ErrorContains(t, err, want)
	}
}

// Property: of a signed delivery nothing may be changed: each byte of each signed header, of the
// body, the secret; headers missing, empty, twice, huge.
func TestForgeriesAreRefused(t *testing.T) {
	t.Parallel()
	for name, s := range senders() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			body, at := bodyOf("evt_1"), time.Unix(1_700_000_000, 0)
			good, scheme := s.sign(t, secret, "evt_1", at, body), s.scheme(secret)
			event, err := scheme.Verify(good, body)
			require.NoError(t, err)
			require.Equal(t, []string{"evt_1", "invoice.paid"}, []string{event.ID, event.Type})
			refused := func(what string, header http.Header, body []byte) {
				t.Helper()
				_, err := scheme.Verify(header, body)
				if !errors.Is(err, webhook.ErrSignature) && !errors.Is(err, webhook.ErrMalformed) {
					t.Fatalf("%s is accepted: %v (error %v)", what, header, err)
				}
				require.NotContains(t, err.Error(), secret)
			}
			for field := range good {
				value := good.Get(field)
				for what, values := range map[string][]string{"no": nil, "two of": {value, value}, "an empty": {""}, "a huge": {strings.Repeat("v1,a ", 1_000_000)}} {
					header := good.Clone()
					header[field] = values
					refused(what+" "+field, header, body)
				}
				if !s.timed && field != s.signature {
					continue // GitHub signs its body alone
				}
				for n := range 256 * len(value) {
					changed, header := []byte(value), good.Clone()
					if changed[n/256] = byte(n); string(changed) != value {
						header.Set(field, string(changed))
						refused(fmt.Sprintf("byte %d of %s as %q", n/256, field, byte(n)), header, body)
					}
				}
			}
			for i := range body {
				changed := bytes.Clone(body)
				changed[i] ^= 1
				refused(fmt.Sprintf("byte %d of the body", i), good, changed)
			}
			refused("a shorter body", good, body[:len(body)-1])
			refused("a longer body", good, append(bytes.Clone(body), ' '))
			_, err = s.scheme(otherSecret).Verify(good, body)
			require.ErrorIs(t, err, webhook.ErrSignature)
		})
	}
	// A delivery whose body begins like a time, read with the border one full stop further.
	header := senders()["standard"].sign(t, secret, "evt_1", time.Unix(1, 0), []byte("1700000000.{}"))
	header.Set("Webhook-Id", "evt_1.1")
	header.Set("Webhook-Timestamp", "1700000000")
	_, err := webhook.StandardWebhooks(secret).Verify(header, []byte("{}"))
	require.ErrorIs(t, err, webhook.ErrMalformed)
}

// Property: while secrets are rotated, on either side, deliveries that are signed with one of them,
// or with several, are accepted.
func TestSecretsAreRotated(t *testing.T) {
	t.Parallel()
	body, at := bodyOf("evt_1"), time.Unix(1_700_000_000, 0)
	accepted := func(scheme webhook.Scheme, header http.Header) {
		t.Helper()
		_, err := scheme.Verify(header, body)
		require.NoError(t, err)
	}
	for _, name := range []string{"standard", "stripe", "github"} {
		s := senders()[name]
		for _, with := range []string{secret, otherSecret} {
			accepted(s.scheme(otherSecret, secret), s.sign(t, with, "evt_1", at, body))
		}
		both, next := s.sign(t, secret, "evt_1", at, body), s.sign(t, otherSecret, "evt_1", at, body).Get(s.signature)
		switch name {
		case "standard":
			both.Set(s.signature, "v1,AAAA v2,b "+both.Get(s.signature)+" "+next)
		case "stripe":
			_, mac, _ := strings.Cut(next, ",")
			both.Set(s.signature, both.Get(s.signature)+","+mac+",v2=a")
		}
		accepted(s.scheme(secret), both)
	}
}

// Property: whatever the headers and the body contain, a delivery is accepted only if they contain,
// unchanged, the signature that other code computes for it, and then with a time and an ID that can
// be stored.
func FuzzStandardWebhooks(f *testing.F) {
	s := senders()["standard"]
	good := s.sign(f, secret, "evt_1", time.Unix(1_700_000_000, 0), bodyOf("evt_1"))
	f.Add("evt_1", "1700000000", good.Get(s.signature), bodyOf("evt_1"))
	f.Add("evt_1", "1700000000", "v1, v1a, v1,x "+good.Get(s.signature), bodyOf("evt_1"))
	f.Add("evt_1.1", "+1700000000", "v1a,"+strings.Repeat("A", 86)+"==", []byte(nil))
	scheme := webhook.StandardWebhooks(secret)
	key, err := base64.StdEncoding.DecodeString(secret[6:])
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, id, stamp, signature string, body []byte) {
		event, err := scheme.Verify(http.Header{"Webhook-Id": {id}, "Webhook-Timestamp": {stamp}, "Webhook-Signature": {signature}}, body)
		if err != nil {
			return
		}
		mac, err := hex.DecodeString(hexMAC(string(key), id+"."+stamp+"."+string(body)))
		require.NoError(t, err)
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
