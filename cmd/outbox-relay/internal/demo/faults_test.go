package demo_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
)

// Whatever the seed, every role is frozen and killed, in the time of the run and in order, and
// relays and consumers stay frozen for longer than the others wait for them.
func TestPlanHitsEveryRole(t *testing.T) {
	t.Parallel()
	const duration, session = 8 * time.Second, 3 * time.Second
	for seed := range uint64(200) {
		kills, freezes := map[string]int{}, map[string]int{}
		last := time.Duration(0)
		for _, f := range demo.Plan(seed, duration, session) {
			assert.GreaterOrEqual(t, f.At, last)
			assert.Less(t, f.At, duration)
			last = f.At
			if f.Freeze == 0 {
				kills[f.Role]++
				continue
			}
			freezes[f.Role]++
			switch f.Role {
			case "consumer":
				assert.Greater(t, f.Freeze, session)
			case "relay":
				assert.Greater(t, f.Freeze, 2*time.Second)
			}
		}
		for _, role := range []string{"shop", "relay", "consumer"} {
			assert.Positive(t, kills[role], "kills of the %s with seed %d", role, seed)
			assert.Positive(t, freezes[role], "freezes of the %s with seed %d", role, seed)
		}
	}
}

// The same seed gives the same plan, another one another.
func TestPlanFollowsTheSeed(t *testing.T) {
	t.Parallel()
	first, again := demo.Plan(1, time.Minute, time.Second), demo.Plan(1, time.Minute, time.Second)
	assert.Equal(t, first, again)
	assert.NotEqual(t, first, demo.Plan(2, time.Minute, time.Second))
}
