package idempotency_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: Advise reports weaknesses of a value alone; it reports none for random values and
// names.
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
