package idempotency

import (
	"slices"
	"strings"
	"time"
	"unicode"
)

// Weakness is a reason why two requests could get the same key by chance, or an attacker could
// guess one.
type Weakness string

// The weaknesses.
const (
	WeakShort    Weakness = "short"    // less than 8 bytes
	WeakNumber   Weakness = "number"   // only a number: two clients, or one that restarts, use the same ones
	WeakTime     Weakness = "time"     // only a time: two requests at the same instant get the same key
	WeakConstant Weakness = "constant" // at most three different characters
)

const (
	shortBytes = 8
	digitsMax  = 25 // a longer number has more than 80 bits: random, not a counter
)

// Advise returns the weaknesses of a value: none for what NewKey makes, and for other random
// values. Several words, such as charge-order-4127, count as the name of the request (Domain),
// although the counter in it may be weak. Hooks.Weak counts them. Keys must not be logged.
func Advise(value string) (weak []Weakness) {
	if len(value) < shortBytes && !isName(value) {
		weak = append(weak, WeakShort)
	}
	switch {
	case isTime(value):
		weak = append(weak, WeakTime)
	case isNumber(value):
		weak = append(weak, WeakNumber)
	}
	if len(value) >= shortBytes && distinct(value) <= 3 {
		weak = append(weak, WeakConstant)
	}
	return weak
}

func isNumber(value string) bool {
	return value != "" && len(value) <= digitsMax && strings.Trim(value, "0123456789") == ""
}

// isTime matches times in the usual notations, and Unix times in seconds to nanoseconds of the
// years 2001 to 2096.
func isTime(value string) bool {
	if isNumber(value) && slices.Contains([]int{10, 13, 16, 19}, len(value)) {
		return value[0] >= '1' && value[0] <= '3'
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", time.DateTime, time.DateOnly, "20060102150405", "20060102T150405Z", "20060102"} {
		if _, err := time.Parse(layout, value); err == nil {
			return true
		}
	}
	return false
}

func distinct(value string) int {
	var seen [256]bool
	n := 0
	for _, b := range []byte(value) {
		if !seen[b] && b != '-' {
			seen[b] = true
			n++
		}
	}
	return n
}

// isName reports whether a value names its request: several words, one of them of letters.
func isName(value string) bool {
	words := strings.FieldsFunc(value, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	return len(words) > 1 && slices.ContainsFunc(words, func(word string) bool {
		return len(word) >= 3 && strings.IndexFunc(word, unicode.IsDigit) < 0 && strings.Trim(word, "0123456789abcdefABCDEF") != ""
	})
}
