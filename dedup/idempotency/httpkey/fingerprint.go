package httpkey

import (
	"bytes"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// fingerprint tells two requests apart. The target is taken as the client sent it: a router that strips prefixes would
// else make two routes look the same, and the answer of one would be replayed at the other.
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

// mediaType leaves parameters out: clients and proxies write charsets in many ways.
func mediaType(r *http.Request) string {
	header := r.Header.Get("Content-Type")
	if media, _, err := mime.ParseMediaType(header); err == nil {
		return media
	}
	return header
}

func isJSON(r *http.Request) bool {
	media := mediaType(r)
	return media == "application/json" || strings.HasSuffix(media, "+json")
}

// Canonical is the default of Config.Fingerprint. JSON that is the same but for space, order of members and escapes is
// the same request (RFC 8785). Numbers count as they are written, because 9007199254740993 and 9007199254740992 are two
// amounts, and one float64. What is not JSON, or names a member twice, counts byte for byte.
func Canonical(r *http.Request, body []byte) ([]byte, error) {
	if !isJSON(r) {
		return body, nil
	}
	value := jsontext.Value(slices.Clone(body))
	if err := value.Canonicalize(jsontext.CanonicalizeRawInts(false), jsontext.CanonicalizeRawFloats(false)); err != nil {
		return body, nil //nolint:nilerr // then it counts byte for byte
	}
	return value, nil
}

// Without is for Config.Fingerprint: Canonical, but for members of JSON that differ from try to try, each as a JSON pointer
// (RFC 6901): Without("/sent_at", "/meta/attempt"). What is left out must have no effect: a retry that changes only that gets
// the first one's answer. It panics where a pointer is none, since that would leave out nothing, and refuse each retry.
func Without(pointers ...string) func(r *http.Request, body []byte) ([]byte, error) {
	for _, pointer := range pointers {
		if !strings.HasPrefix(pointer, "/") || strings.Contains(strings.NewReplacer("~0", "", "~1", "").Replace(pointer), "~") {
			panic(fmt.Sprintf(`httpkey: Without(%q): want a JSON pointer: "/" before each name, and in names "~1" for a slash and "~0" for a tilde`, pointer))
		}
	}
	return func(r *http.Request, body []byte) ([]byte, error) {
		canonical, err := Canonical(r, body)
		if err != nil || !isJSON(r) {
			return canonical, err
		}
		if kept, err := without(canonical, pointers); err == nil {
			return kept, nil
		}
		return canonical, nil // it is not what it says
	}
}

func without(body []byte, pointers []string) ([]byte, error) {
	var kept bytes.Buffer
	in := jsontext.NewDecoder(bytes.NewReader(body))
	out := jsontext.NewEncoder(&kept)
	for {
		token, err := in.ReadToken()
		if err == io.EOF { //nolint:errorlint // it is not wrapped
			return bytes.TrimSuffix(kept.Bytes(), []byte("\n")), nil
		}
		if err != nil {
			return nil, err
		}
		kind, length := in.StackIndex(in.StackDepth())
		if isName := kind == jsontext.KindBeginObject && length%2 == 1; isName && slices.Contains(pointers, string(in.StackPointer())) {
			if err := in.SkipValue(); err != nil {
				return nil, err
			}
			continue
		}
		if err := out.WriteToken(token); err != nil {
			return nil, err
		}
	}
}
