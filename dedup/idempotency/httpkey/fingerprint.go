package httpkey

import (
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// fingerprint distinguishes requests. It uses the target as the client sent it: behind a router
// that strips prefixes, two routes would otherwise look the same, and the response of one would be
// replayed for the other.
func (m *Middleware) fingerprint(r *http.Request, body []byte) (idempotency.Fingerprint, error) {
	target, err := url.ParseRequestURI(r.RequestURI)
	if err != nil {
		target = r.URL
	}
	content, err := m.cfg.Fingerprint(r, body)
	if err != nil {
		return idempotency.Fingerprint{}, err
	}
	return idempotency.NewFingerprint([]byte(r.Method), []byte(target.EscapedPath()), []byte(target.RawQuery), []byte(mediaType(r)), content), nil
}

// mediaType drops parameters: clients and proxies write charsets in many ways.
func mediaType(r *http.Request) string {
	header := r.Header.Get("Content-Type")
	if media, _, err := mime.ParseMediaType(header); err == nil {
		return media
	}
	return header
}

// Canonical is the default of Config.Fingerprint. JSON that differs only in whitespace, order of
// members and escapes is the same request (RFC 8785). Numbers count as written, because
// 9007199254740993 and 9007199254740992 are two amounts but one float64. A body that is not JSON, or
// has an object with a member twice, counts byte for byte.
func Canonical(r *http.Request, body []byte) ([]byte, error) {
	if media := mediaType(r); media != "application/json" && !strings.HasSuffix(media, "+json") {
		return body, nil
	}
	value := jsontext.Value(slices.Clone(body))
	if err := value.Canonicalize(jsontext.CanonicalizeRawInts(false), jsontext.CanonicalizeRawFloats(false)); err != nil {
		return body, nil //nolint:nilerr // then it counts byte for byte
	}
	return value, nil
}
