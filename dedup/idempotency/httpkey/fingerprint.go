package httpkey

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode"

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
	if isJSON(r) && deeper(body, m.cfg.JSONDepthMax) {
		return idempotency.Fingerprint{}, errTooDeep
	}
	content, err := m.cfg.Fingerprint(r, body)
	if err != nil {
		return idempotency.Fingerprint{}, err
	}
	return idempotency.NewFingerprint([]byte(r.Method), []byte(target.EscapedPath()), []byte(m.query(target.RawQuery)), []byte(mediaType(r)), content), nil
}

// query returns the part of the query that counts, as the client wrote it, in its order.
func (m *Middleware) query(raw string) string {
	if m.cfg.Query == nil {
		return raw
	}
	return strings.Join(slices.DeleteFunc(strings.Split(raw, "&"), func(pair string) bool {
		name, _, _ := strings.Cut(pair, "=")
		if plain, err := url.QueryUnescape(name); err == nil {
			name = plain
		}
		return pair == "" || !m.cfg.Query(name)
	}), "&")
}

var errTooDeep = errors.New("arrays and objects are nested deeper than Config.JSONDepthMax")

// deeper reports whether arrays and objects of a text are nested deeper than depthMax. It stops at
// the first byte that is invalid in JSON, as Canonicalize does: the text may be compressed.
func deeper(text []byte, depthMax int) bool {
	depth, quoted := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			quoted = !quoted
		case quoted:
			if c < ' ' {
				return false
			}
			if c == '\\' {
				i++
			}
		case c == '{' || c == '[':
			if depth++; depth > depthMax {
				return true
			}
		case c == '}' || c == ']':
			depth--
		case strings.IndexByte(" \t\r\n:,+-.0123456789Eaeflnrstu", c) < 0: // space, numbers, true, false and null
			return false
		}
	}
	return false
}

// mediaType drops parameters: clients and proxies write charsets in many ways.
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

// Canonical is the default of Config.Fingerprint. JSON that differs only in whitespace, order of
// members and escapes is the same request (RFC 8785). Numbers count as written, because
// 9007199254740993 and 9007199254740992 are two amounts but one float64. A body that is not JSON
// counts byte for byte. So does a body with an object that has a member twice, or two members that
// differ only in case: encoding/json uses the last of them, and their order would not count.
func Canonical(r *http.Request, body []byte) ([]byte, error) {
	if !isJSON(r) {
		return body, nil
	}
	value := jsontext.Value(slices.Clone(body))
	if err := value.Canonicalize(jsontext.CanonicalizeRawInts(false), jsontext.CanonicalizeRawFloats(false)); err != nil {
		return body, nil //nolint:nilerr // then it counts byte for byte
	}
	if differsInCase(value) {
		return body, nil
	}
	return value, nil
}

// differsInCase reports whether an object in JSON has two members whose names encoding/json treats
// as equal.
func differsInCase(text []byte) bool {
	in := jsontext.NewDecoder(bytes.NewReader(text))
	var names []string // names in the open objects, from the outermost
	var begins []int   // index of each object's first name
	for {
		token, err := in.ReadToken()
		if err != nil {
			return false // the end: text is canonical
		}
		switch kind, length := in.StackIndex(in.StackDepth()); {
		case token.Kind() == jsontext.KindBeginObject:
			begins = append(begins, len(names))
		case token.Kind() == jsontext.KindEndObject:
			begin := begins[len(begins)-1]
			slices.Sort(names[begin:])
			if len(slices.Compact(names[begin:])) < len(names)-begin {
				return true
			}
			names, begins = names[:begin], begins[:len(begins)-1]
		case kind == jsontext.KindBeginObject && length%2 == 1:
			names = append(names, fold(token.String()))
		}
	}
}

// fold maps all names that encoding/json treats as equal to one text.
func fold(name string) string {
	return strings.Map(func(r rune) rune {
		for {
			next := unicode.SimpleFold(r)
			if next <= r {
				return next // the least rune of those that fold into each other
			}
			r = next
		}
	}, name)
}

// Without is for Config.Fingerprint: Canonical without the JSON members that differ between
// attempts, each given as a JSON pointer (RFC 6901): Without("/sent_at", "/meta/attempt"). Those
// members must have no effect: a retry that changes only them gets the first response. It panics if
// a pointer is malformed: such a pointer would drop nothing, and every retry would be refused.
func Without(pointers ...string) func(r *http.Request, body []byte) ([]byte, error) {
	for _, pointer := range pointers {
		if !strings.HasPrefix(pointer, "/") || strings.Contains(strings.NewReplacer("~0", "", "~1", "").Replace(pointer), "~") {
			panic(fmt.Sprintf(`httpkey: Without(%q): want a JSON pointer: "/" before each name, and in names "~1" for a slash and "~0" for a tilde`, pointer))
		}
	}
	depths := map[int]bool{} // only at these depths is the pointer of a name built: it may be long
	for _, pointer := range pointers {
		depths[strings.Count(pointer, "/")] = true
	}
	return func(r *http.Request, body []byte) ([]byte, error) {
		canonical, err := Canonical(r, body)
		if err != nil || !isJSON(r) {
			return canonical, err
		}
		if kept, err := without(canonical, func(in *jsontext.Decoder) bool {
			return depths[in.StackDepth()] && slices.Contains(pointers, string(in.StackPointer()))
		}); err == nil {
			return kept, nil
		}
		return canonical, nil // the body is not JSON, although its media type says so
	}
}

func without(body []byte, isNamed func(in *jsontext.Decoder) bool) ([]byte, error) {
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
		if isName := kind == jsontext.KindBeginObject && length%2 == 1; isName && isNamed(in) {
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
