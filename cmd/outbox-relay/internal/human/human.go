// Package human formats counts, durations and keys for people.
package human

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Count formats a number with a noun, whose plural ends in s: "1 row", "2 rows".
func Count[N ~int | ~int16 | ~int32 | ~int64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.FormatInt(int64(n), 10) + " " + noun + "s"
}

// Duration formats a duration as its two largest units: "1.5s", "45s", "10m", "3h20m", "9d".
func Duration(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + Duration(-d)
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", d.Seconds()), ".0") + "s"
	}
	const day = 24 * time.Hour
	units := []struct {
		unit, part time.Duration
		name, sub  string
	}{{day, time.Hour, "d", "h"}, {time.Hour, time.Minute, "h", "m"}, {time.Minute, time.Second, "m", "s"}, {time.Second, time.Second, "s", ""}}
	for _, u := range units {
		if d < u.unit {
			continue
		}
		text := strconv.FormatInt(int64(d/u.unit), 10) + u.name
		if rest := d % u.unit / u.part; rest > 0 {
			text += strconv.FormatInt(int64(rest), 10) + u.sub
		}
		return text
	}
	return d.String()
}

// Exact formats a duration as flags read it, without its zero units: 10m, not 10m0s.
func Exact(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// Word quotes a name for a shell, where that is needed.
func Word(name string) string {
	if plainWord.MatchString(name) {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_./:@-]+$`)

// Seconds formats a number of seconds as Duration does.
func Seconds(n float64) string { return Duration(time.Duration(n * float64(time.Second))) }

// Key is the key of a message; nil: it has none.
type Key []byte

// base64Prefix marks keys that are not text.
const base64Prefix = "base64:"

// String returns the key as text, or base64: and its bytes if it is not printable text.
func (k Key) String() string {
	text := string(k)
	if !Printable(text) || strings.HasPrefix(text, base64Prefix) {
		return base64Prefix + base64.StdEncoding.EncodeToString(k)
	}
	return text
}

// ParseKey parses the result of String.
func ParseKey(text string) (Key, error) {
	encoded, is := strings.CutPrefix(text, base64Prefix)
	if !is {
		return Key(text), nil
	}
	key, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, fmt.Errorf("want standard base64 after %q", base64Prefix)
	}
	return key, nil
}

// MarshalJSON writes String, or null.
func (k Key) MarshalJSON() ([]byte, error) {
	if k == nil {
		return []byte("null"), nil
	}
	return json.Marshal(k.String())
}

// Printable reports whether a text is valid UTF-8 that a terminal only displays.
func Printable(text string) bool {
	return utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}
