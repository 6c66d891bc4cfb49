package idempotency_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: what is weak about a value alone is told; random values and names are not complained about.
func TestAdviceOnOneValue(t *testing.T) {
	t.Parallel()
	type weak = []idempotency.Weakness
	for value, want := range map[string]weak{
		"a1b2":                                  {idempotency.WeakShort},
		"4127":                                  {idempotency.WeakShort, idempotency.WeakNumber},
		"00004127":                              {idempotency.WeakNumber},
		"1732199163":                            {idempotency.WeakTime},
		"1732199163123":                         {idempotency.WeakTime},
		"1732199163123456789":                   {idempotency.WeakTime},
		"2026-11-21T14:26:03Z":                  {idempotency.WeakTime},
		"2026-11-21T14:26:03.123456+02:00":      {idempotency.WeakTime},
		"20261121142603":                        {idempotency.WeakTime},
		"00000000-0000-0000-0000-000000000000":  {idempotency.WeakConstant},
		"aaaaaaaaaaaa":                          {idempotency.WeakConstant},
		idempotency.NewKey():                    nil,
		uuid.NewString():                        nil,
		"stripe-node-retry-" + uuid.NewString(): nil,
		"KG5LxwFBepaKHyUD":                      nil, // Stripe's example
		"01ARZ3NDEKTSV4RRFFQ69G5FAV":            nil, // a ULID
		"295617483920475610293847561029384756":  nil, // 119 bits, drawn
		idempotency.Domain("charge", "order", "4127"): nil,
		idempotency.Domain("pay", "7"):                nil,
	} {
		require.ElementsMatch(t, want, idempotency.Advise(value), value)
	}
}

// checked sends keys of an operation to a Checker, and returns what was found.
func checked(t *testing.T, cfg idempotency.CheckerConfig, n int, value func(i int) string) (found []idempotency.Finding) {
	t.Helper()
	cfg.Found = func(f idempotency.Finding) { found = append(found, f) }
	checker, err := idempotency.NewChecker(cfg)
	require.NoError(t, err)
	for i := range n {
		checker.See(idempotency.Key{Scope: "tenant", Operation: "pay", Value: value(i)})
	}
	return found
}

func text62(n int) string {
	const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	text := make([]byte, n)
	for i := range text {
		text[i] = letters[rand.IntN(len(letters))]
	}
	return string(text)
}

// Property: keys that are weak, or differ in little, are found whichever way; good ones are not, in the smallest window neither.
func TestCheckerFindsWeakKeys(t *testing.T) {
	t.Parallel()
	shared := uuid.NewString()
	for name, test := range map[string]struct {
		value func(i int) string
		want  idempotency.Weakness // empty: nothing
	}{
		"a counter":                  {func(i int) string { return strconv.Itoa(12_345_000 + i) }, idempotency.WeakNumber},
		"milliseconds":               {func(i int) string { return strconv.Itoa(1_732_199_163_123 + 17*i) }, idempotency.WeakTime},
		"a counter in hex":           {func(i int) string { return fmt.Sprintf("%016x", 0x1a2b3c4d5e6f7080+i) }, idempotency.WeakAlike},
		"a counter behind a UUID":    {func(i int) string { return fmt.Sprintf("%s.%d", shared, i) }, idempotency.WeakAlike},
		"random, of 30 bits":         {func(int) string { return "w3:" + text62(5) }, idempotency.WeakAlike},
		"NewKey":                     {func(int) string { return idempotency.NewKey() }, ""},
		"UUIDv4":                     {func(int) string { return uuid.NewString() }, ""},
		"as clients of Stripe do it": {func(int) string { return "stripe-node-retry-" + uuid.NewString() }, ""},
		"16 characters":              {func(int) string { return text62(16) }, ""},
		"names":                      {func(i int) string { return idempotency.Domain("charge", "order", strconv.Itoa(i)) }, ""},
		"tries of one request":       {func(int) string { return "4127" }, ""},
	} {
		for _, window := range []int{32, 64, 1024} {
			found := checked(t, idempotency.CheckerConfig{Window: window}, 3*window, test.value)
			if test.want == "" {
				require.Empty(t, found, name)
				continue
			}
			require.NotEmpty(t, found, name)
			require.Equal(t, test.want, found[0].Weakness, name)
			require.Equal(t, "pay", found[0].Operation)
			require.GreaterOrEqual(t, found[0].Keys, 3)
			require.GreaterOrEqual(t, found[0].Of, found[0].Keys)
		}
	}
}

// Property: a weakness is told once in a while, not at each key, and again while it lasts; the window slides: what was weak
// long ago is forgotten.
func TestCheckerDoesNotNag(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var found []idempotency.Finding
		checker, err := idempotency.NewChecker(idempotency.CheckerConfig{Window: 32, Found: func(f idempotency.Finding) { found = append(found, f) }})
		require.NoError(t, err)
		n := 12_345_600
		count := func(times int) {
			for range times {
				n++
				checker.See(idempotency.Key{Operation: "pay", Value: strconv.Itoa(n)})
			}
		}
		count(20)
		require.Len(t, found, 1)
		time.Sleep(time.Hour)
		count(1)
		require.Len(t, found, 2)
		for range 32 {
			checker.See(idempotency.Key{Operation: "pay", Value: idempotency.NewKey()})
		}
		time.Sleep(time.Hour)
		count(2)
		require.Len(t, found, 2)
		count(1)
		require.Equal(t, idempotency.Finding{Operation: "pay", Weakness: idempotency.WeakNumber, Keys: 3, Of: 32}, found[2])
	})
}

// Property: what a Checker holds is bounded: operations beyond the limit, and keys too long, are not looked at; what it
// logs has no key; it may be called from many goroutines.
func TestCheckerIsBoundedAndDiscreet(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	var mu sync.Mutex
	operations := map[string]int{}
	checker, err := idempotency.NewChecker(idempotency.CheckerConfig{
		OperationsMax: 2, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		Found: func(f idempotency.Finding) { mu.Lock(); operations[f.Operation]++; mu.Unlock() },
	})
	require.NoError(t, err)
	for _, operation := range []string{"a", "b", "c", strings.Repeat("d", 256)} {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				checker.See(idempotency.Key{Operation: operation, Value: strconv.Itoa(98_765_400 + i)})
				checker.See(idempotency.Key{Operation: operation, Value: strings.Repeat(strconv.Itoa(i), 256)})
			})
		}
		wg.Wait()
	}
	require.Equal(t, map[string]int{"a": 1, "b": 1}, operations)
	require.Contains(t, log.String(), "weakness=number")
	require.NotContains(t, log.String(), "987654")

	_, err = idempotency.NewChecker(idempotency.CheckerConfig{Window: 1, OperationsMax: -1, Every: 1})
	for _, want := range []string{"Window 1: want 32 to 4096", "OperationsMax -1", "Every 1ns"} {
		require.ErrorContains(t, err, want)
	}
}
