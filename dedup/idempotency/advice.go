package idempotency

import (
	"slices"
	"strings"
	"unicode"
)

// Weakness is a reason why two requests could get the same key by chance, or an attacker guess one.
type Weakness string

// The weaknesses.
const (
	WeakShort    Weakness = "short"    // less than 8 bytes
	WeakNumber   Weakness = "number"   // only a number, or a time: two clients, or one that restarts, use the same ones
	WeakConstant Weakness = "constant" // at most three different characters
)

const (
	shortBytes = 8
	digitsMax  = 27 // a longer number is random, not a counter; a time to the nanosecond has as many
)

// Advise returns the weaknesses of a value: none for what NewKey makes, and for other random
// values. A value with a hyphen counts as the name of the request (Domain), such as pay-7, and is not too
// short, although the counter in it may be weak. Hooks.Weak counts them. Keys must not be logged.
func Advise(value string) (weak []Weakness) {
	if len(value) < shortBytes && !strings.Contains(value, "-") {
		weak = append(weak, WeakShort)
	}
	if isNumber(value) {
		weak = append(weak, WeakNumber)
	}
	if len(value) >= shortBytes && distinct(value) <= 3 {
		weak = append(weak, WeakConstant)
	}
	return weak
}

// isNumber reports whether a value has few digits, and nothing else but what separates those of a time.
func isNumber(value string) bool {
	digits := 0
	for _, r := range value {
		if unicode.IsDigit(r) {
			digits++
		} else if !strings.ContainsRune("TZ:+-. ", r) {
			return false
		}
	}
	return digits > 0 && digits <= digitsMax
}

func distinct(value string) int {
	found := []byte(strings.ReplaceAll(value, "-", ""))
	slices.Sort(found)
	return len(slices.Compact(found))
}
