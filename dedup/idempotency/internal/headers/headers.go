// Package headers says what becomes of the headers of an outcome: which are stored, which are replayed, and how they meet those
// that a layer outside of the handler has set. It has the only list of them.
package headers

import (
	"maps"
	"net/textproto"
	"slices"
	"strings"
)

// Rule is what becomes of a header.
type Rule int

// The rules.
const (
	Named Rule = iota // stored and replayed where the caller of httpkey names it
	Kept              // stored and replayed: it describes the answer
	Once              // of one moment or one request: the first client gets it, a replay has its own
	Never             // of one client or one connection: never stored
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

// Of returns the rule of a header, whose name may be written in any case.
func Of(name string) Rule { return rules[canonical(name)] }

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

// Select returns what keep wants of a header. What is Never stored, and what the header Connection names, is left out before.
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

// First makes to, which layers outside have filled, the header of a handler's own answer, which has what these layers set. Trailers
// are left out, since those that the handler sets behind the body are not recorded; those of a layer outside are its own.
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

// Add puts a header into to, which layers outside have filled for this answer. Its values replace theirs, but for two kinds: Vary
// is what either says, and CORS is what the layer outside says now, where it says something. Which origin may read, and with
// credentials, is one word: half of a stored one would let an origin read that neither meant.
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
