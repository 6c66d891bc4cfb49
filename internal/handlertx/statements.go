package handlertx

import (
	"regexp"
	"strings"
)

// Statements returns the statements of a string, which may have several where it has no arguments, without
// their comments. It follows the lexical rules of PostgreSQL with standard_conforming_strings on: see
// https://www.postgresql.org/docs/current/sql-syntax-lexical.html.
func Statements(sql string) []string {
	if !strings.Contains(sql, ";") && !strings.Contains(sql, "--") && !strings.Contains(sql, "/*") {
		return []string{sql}
	}
	var all []string
	var one strings.Builder
	end := func() {
		if text := strings.TrimSpace(one.String()); text != "" {
			all = append(all, text)
		}
		one.Reset()
	}
	for sql != "" {
		n := token(sql)
		switch text := sql[:n]; {
		case text == ";":
			end()
		case strings.HasPrefix(text, "--"), strings.HasPrefix(text, "/*"):
			one.WriteByte(' ')
		default:
			one.WriteString(text)
		}
		sql = sql[n:]
	}
	end()
	return all
}

var (
	word    = regexp.MustCompile(`^[A-Za-z_\x{80}-\x{10FFFF}][A-Za-z0-9_$\x{80}-\x{10FFFF}]*`)
	dollars = regexp.MustCompile(`^\$([A-Za-z_\x{80}-\x{10FFFF}][A-Za-z0-9_\x{80}-\x{10FFFF}]*)?\$`)
	escaped = regexp.MustCompile(`^[eE]'(?s:\\.|[^'\\])*'?`)
	comment = regexp.MustCompile(`/\*|\*/`)
)

// token returns the length of the comment, quoted text or word at the beginning, or 1.
func token(s string) int {
	through := func(end string, from int) int {
		if n := strings.Index(s[from:], end); n >= 0 {
			return from + n + len(end)
		}
		return len(s)
	}
	switch {
	case strings.HasPrefix(s, "--"):
		return through("\n", 2)
	case strings.HasPrefix(s, "/*"):
		depth := 0
		for _, at := range comment.FindAllStringIndex(s, -1) {
			if depth++; s[at[0]] == '*' {
				depth -= 2
			}
			if depth == 0 {
				return at[1]
			}
		}
		return len(s)
	case s[0] == '\'', s[0] == '"': // a doubled quote ends one and begins the next
		return through(s[:1], 1)
	}
	if text := escaped.FindString(s); text != "" {
		return len(text)
	}
	if tag := dollars.FindString(s); tag != "" {
		return through(tag, len(tag))
	}
	return max(1, len(word.FindString(s)))
}
