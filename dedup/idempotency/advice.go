package idempotency

import (
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/effectonce/effectonce/internal/bounds"
)

// Weakness is why two requests could get one key by chance, or somebody could guess one.
type Weakness string

// The weaknesses.
const (
	WeakShort    Weakness = "short"     // less than 8 bytes
	WeakNumber   Weakness = "number"    // a number alone: two clients, or one that starts anew, count the same ones
	WeakTime     Weakness = "time"      // a time alone: two requests of one instant have the same one
	WeakConstant Weakness = "constant"  // hardly more than one character, again and again
	WeakAlike    Weakness = "all alike" // keys differ in less than 40 bits from each other; only a Checker sees it
)

const (
	shortBytes  = 8
	digitsMax   = 25 // more than 80 bits are not counted but drawn
	alikeBits   = 40 // a million keys collide with a chance of one half
	weakKeysMin = 3  // before a Checker tells: one may be chance, or somebody trying
)

// Advise tells what is weak about a value: nothing, for what NewKey makes and other random values. Several words, such as
// charge-order-4127, are taken for the name of the request (Domain), although what counts them may be weak.
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

// isTime tells times in the usual notations, and seconds to nanoseconds since 1970 of the years 2001 to 2096.
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

// isName tells what says which request it is for: several words, one of them of letters.
func isName(value string) bool {
	words := strings.FieldsFunc(value, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	return len(words) > 1 && slices.ContainsFunc(words, func(word string) bool {
		return len(word) >= 3 && strings.IndexFunc(word, unicode.IsDigit) < 0 && strings.Trim(word, "0123456789abcdefABCDEF") != ""
	})
}

// CheckerConfig of a Checker. The zero value works.
type CheckerConfig struct {
	// Window is how many keys of an operation are looked at together: the last ones that differ. 32 to 4096; default 64.
	Window int
	// OperationsMax is how many operations are looked at, those that come first. 1 to 10,000; default 256. A Checker holds
	// at most Window·OperationsMax keys of at most 255 bytes.
	OperationsMax int
	// Every is how often one weakness of one operation is told at most. 1 s to 30 days; default 1 h.
	Every time.Duration
	// Logger is warned. It never gets a key. Default: none.
	Logger *slog.Logger
	// Found gets what the Logger does, synchronously.
	Found func(Finding)
}

// Finding is a weakness of the keys that clients send for an operation.
type Finding struct {
	Operation string
	Weakness  Weakness
	Keys, Of  int // how many keys have it, of those that were looked at
}

// Checker looks at the keys that clients send, and tells of weak ones. It refuses none. It is safe for concurrent use.
type Checker struct {
	cfg  CheckerConfig
	mu   sync.Mutex
	seen map[string]*window // by operation
}

// window has the last keys of an operation that differ.
type window struct {
	keys  []advised
	next  int // to be replaced
	fresh int // since they were compared
	told  map[Weakness]time.Time
}

type advised struct {
	value string
	weak  []Weakness
}

// NewChecker returns a Checker, or all problems of its configuration at once.
func NewChecker(cfg CheckerConfig) (*Checker, error) {
	problems := bounds.Ints(
		bounds.Int{Field: "Window", Value: &cfg.Window, Default: 64, Min: 32, Max: 4096},
		bounds.Int{Field: "OperationsMax", Value: &cfg.OperationsMax, Default: 256, Min: 1, Max: 10_000},
	)
	problems = append(problems, bounds.Durations(
		bounds.Duration{Field: "Every", Value: &cfg.Every, Default: time.Hour, Min: time.Second, Max: 30 * 24 * time.Hour},
	)...)
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Checker{cfg: cfg, seen: map[string]*window{}}, nil
}

// See looks at a key that came. A key that came before, and is tried again, counts once.
func (c *Checker) See(key Key) {
	if len(key.Value) > keyBytesMax || len(key.Operation) > keyBytesMax {
		return // it is refused, and would take up memory
	}
	for _, finding := range c.see(key) {
		c.cfg.Logger.Warn("clients send weak idempotency keys: have them send a UUID for each new request",
			"operation", finding.Operation, "weakness", finding.Weakness, "keys", finding.Keys, "of", finding.Of)
		if c.cfg.Found != nil {
			c.cfg.Found(finding)
		}
	}
}

func (c *Checker) see(key Key) (found []Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.seen[key.Operation]
	if w == nil {
		if len(c.seen) == c.cfg.OperationsMax {
			return nil
		}
		w = &window{told: map[Weakness]time.Time{}}
		c.seen[strings.Clone(key.Operation)] = w
	}
	if slices.ContainsFunc(w.keys, func(k advised) bool { return k.value == key.Value }) {
		return nil
	}
	latest := advised{strings.Clone(key.Value), Advise(key.Value)} // a part of a request's memory would keep all of it
	w.add(latest, c.cfg.Window)
	tell := func(weakness Weakness, keys int) {
		if now := time.Now(); keys >= weakKeysMin && (w.told[weakness].IsZero() || now.Sub(w.told[weakness]) >= c.cfg.Every) {
			w.told[weakness] = now
			found = append(found, Finding{Operation: key.Operation, Weakness: weakness, Keys: keys, Of: len(w.keys)})
		}
	}
	for _, weakness := range latest.weak {
		tell(weakness, w.with(weakness))
	}
	if w.fresh >= c.cfg.Window { // not at each key: it looks at all of them
		w.fresh = 0
		if keys := w.alike(); keys > 0 {
			tell(WeakAlike, keys)
		}
	}
	return found
}

func (w *window) add(key advised, size int) {
	w.fresh++
	if len(w.keys) < size {
		w.keys = append(w.keys, key)
		return
	}
	w.keys[w.next] = key
	w.next = (w.next + 1) % size
}

func (w *window) with(weakness Weakness) (keys int) {
	for _, key := range w.keys {
		if slices.Contains(key.weak, weakness) {
			keys++
		}
	}
	return keys
}

// alike returns how many keys there are that differ in too little, 0 if they differ enough. What they differ in is at
// most the sum of the entropies of their positions (Cover and Thomas, Elements of Information Theory, 2.6.6). Names are left
// out: they are told apart by what they say.
func (w *window) alike() int {
	var values []string
	for _, key := range w.keys {
		if !isName(key.value) {
			values = append(values, key.value)
		}
	}
	if len(values) < len(w.keys)/2 {
		return 0
	}
	bits := 0.0
	for position := range keyBytesMax {
		var counts [257]int // 256: the key is shorter
		for _, value := range values {
			if position < len(value) {
				counts[value[position]]++
			} else {
				counts[256]++
			}
		}
		for _, n := range counts {
			if n > 0 {
				p := float64(n) / float64(len(values))
				bits -= p * math.Log2(p)
			}
		}
	}
	if bits >= alikeBits {
		return 0
	}
	return len(values)
}
