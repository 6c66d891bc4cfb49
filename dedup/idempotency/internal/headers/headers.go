// Package headers decides which headers of an outcome are stored and replayed, and how they are
// merged with those that an outer layer has set. It has the only list of them.
package headers

import (
	"maps"
	"net/textproto"
	"slices"
	"strings"
	"unicode"
)

// Rule decides how a header is treated.
type Rule int

// The rules.
const (
	Named Rule = iota // stored and replayed if the caller of httpkey names it
	Kept              // stored and replayed: it describes the response
	Once              // of one moment or one request: sent to the first client; a replay has its own
	Never             // of one client or one connection, or a credential: never stored
)

const (
	vary             = "Vary"
	allowOrigin      = "Access-Control-Allow-Origin"
	allowCredentials = "Access-Control-Allow-Credentials"
)

//nolint:gochecknoglobals // a table
var rules = table(map[Rule][]string{
	Kept: {
		"Allow", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Location", "Content-Range", "Content-Type",
		"ETag", "Last-Modified", "Link", "Location", "Preference-Applied", "Retry-After", "X-Content-Type-Options",
		vary, allowOrigin, allowCredentials, "Access-Control-Allow-Headers", "Access-Control-Allow-Methods",
		"Access-Control-Expose-Headers", "Access-Control-Max-Age", "Timing-Allow-Origin",
	},
	Once: {"Age", "Cache-Control", "Content-Length", "Date", "Expires", "Idempotency-Key", "Idempotent-Replayed"},
	Never: {
		"Cookie", "Cookie2", "Set-Cookie", "Set-Cookie2",
		"Authorization", "Authentication-Info", "WWW-Authenticate",
		"Proxy-Authorization", "Proxy-Authenticate", "Proxy-Authentication-Info",
		"Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding", "Upgrade",
	},
})

func table(lists map[Rule][]string) map[string]Rule {
	rules := map[string]Rule{}
	for rule, names := range lists {
		for _, name := range names {
			rules[canonical(name)] = rule
		}
	}
	return rules
}

func canonical(name string) string { return textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name)) }

// Of returns the rule of a header, whose name may be written in any case. A header that is not
// listed and looks like a credential is Never stored.
func Of(name string) Rule {
	rule, listed := rules[canonical(name)]
	if !listed && readsLikeCredential(name) {
		return Never
	}
	return rule
}

//nolint:gochecknoglobals // tables
var (
	// secretTexts mark a credential anywhere in a name; separators do not count: X-Api-Key,
	// x_api_key, XApiKey.
	secretTexts = []string{
		"authentication", "authorization", "cookie", "credential", "passphrase", "passwd", "password", "secret", "session", "token",
		"accesskey", "apikey", "encryptionkey", "functionskey", "masterkey", "privatekey", "sharedkey", "signingkey", "subscriptionkey",
	}
	// secretWords mark a credential as a whole word of a name, with or without a number: X-Auth,
	// X-OAuth2-User, but not Author.
	secretWords = []string{
		"auth", "authn", "authz", "bearer", "csrf", "dpop", "jwt", "nonce", "oauth", "otp", "pwd", "saml", "sid", "totp", "xsrf",
	}
)

// readsLikeCredential prefers false positives: a header wrongly taken for a credential is missing
// from a replay, but a missed credential is stored, and shown again. Signatures are not
// credentials: they vouch for one response, and grant no access.
func readsLikeCredential(name string) bool {
	words := strings.FieldsFunc(strings.ToLower(name), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	text := strings.Join(words, "")
	return slices.ContainsFunc(secretTexts, func(secret string) bool { return strings.Contains(text, secret) }) ||
		slices.ContainsFunc(words, func(word string) bool { return slices.Contains(secretWords, strings.TrimRight(word, "0123456789")) })
}

// All returns the headers of a rule in their canonical form, sorted.
func All(rule Rule) []string {
	return slices.Sorted(func(yield func(string) bool) {
		for name, is := range rules {
			if is == rule && !yield(name) {
				return
			}
		}
	})
}

// Select returns the headers for which keep returns true. Headers that are Never stored, and those
// that the header Connection names, are dropped first.
func Select(header map[string][]string, keep func(name string) bool) map[string][]string {
	hop := map[string]bool{}
	for name, values := range header {
		if canonical(name) == "Connection" {
			for other := range strings.SplitSeq(strings.Join(values, ","), ",") {
				hop[canonical(other)] = true
			}
		}
	}
	selected := map[string][]string{}
	for name, values := range header {
		if Of(name) != Never && !hop[canonical(name)] && keep(name) {
			selected[name] = values
		}
	}
	return selected
}

// First replaces to, which outer layers have filled, by the header of a handler's own answer, which
// includes what these layers set. Trailers are dropped, since those that the handler sets after the
// body are not recorded; those of an outer layer are its own.
func First(to, header map[string][]string) {
	announced, ok := to["Trailer"]
	clear(to)
	maps.Copy(to, header)
	maps.DeleteFunc(to, func(name string, _ []string) bool {
		return name == "Trailer" || strings.HasPrefix(name, "Trailer:") // http.TrailerPrefix
	})
	if ok {
		to["Trailer"] = announced
	}
}

// Add adds a header to to, which outer layers have filled for this answer. Its values replace
// theirs, with two exceptions: Vary is the union, and a CORS header that the outer layer has set
// stays. Allowed origin and allowed credentials belong together: if the outer layer has set either,
// neither stored value is used, since half of a stored pair would allow an origin that neither
// layer intended.
func Add(to, header map[string][]string) {
	set := func(name string) bool { return len(to[name]) > 0 }
	originIsSet := set(allowOrigin) || set(allowCredentials)
	for name, values := range header {
		switch name := canonical(name); {
		case name == vary && set(vary):
			addVary(to, values)
		case name == allowOrigin || name == allowCredentials:
			if !originIsSet {
				to[name] = values
			}
		case strings.HasPrefix(name, "Access-Control-"), name == "Timing-Allow-Origin":
			if !set(name) {
				to[name] = values
			}
		default:
			to[name] = values
		}
	}
}

func addVary(to map[string][]string, values []string) {
	has := func(name string) bool {
		return slices.ContainsFunc(strings.Split(strings.Join(to[vary], ","), ","), func(is string) bool {
			return canonical(is) == canonical(name)
		})
	}
	for name := range strings.SplitSeq(strings.Join(values, ","), ",") {
		if name = strings.TrimSpace(name); name != "" && !has(name) {
			to[vary] = append(slices.Clip(to[vary]), name)
		}
	}
}
