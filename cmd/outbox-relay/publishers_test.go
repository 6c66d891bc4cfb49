package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: lists can be set, replaced, shown and deleted, and each change is logged. A list
// without effect is refused. Only the owner changes lists; operators can read them. Rows S7, S18 of
// guarantees.md.
func TestPublishersCommands(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	prefix := withRoles(t, address)
	publisher := prefix + "_publisher"
	does := func(code int, args ...string) string {
		t.Helper()
		r := runOn(t, address, append([]string{"publishers"}, args...)...)
		require.Equal(t, code, r.code, "%v: %s%s", args, r.stdout, r.stderr)
		return r.stdout + r.stderr
	}
	conn := connect(t, pgtest.Login(t, address, prefix, "publisher"))
	refused := func(topic string) bool {
		_, err := conn.Exec(t.Context(), "INSERT INTO effectonce.outbox (topic) VALUES ($1)", topic)
		return err != nil
	}
	assert.Equal(t, "role "+publisher+" publishes to orders, bills.* only\n", does(0, "limit", publisher, "orders", "bills.*", "--why", "INC-12", "--by", "ana"))
	assert.True(t, refused("payments"))
	assert.False(t, refused("bills.x"))
	assert.Equal(t, publisher+"  orders, bills.*\n", does(0, "list"))
	assert.Contains(t, does(0, "limit", publisher, "--none"), "publishes to no topic only")
	assert.Equal(t, map[string]any{"role": publisher, "topics": []any{}},
		runOn(t, pgtest.Login(t, address, prefix, "operator"), "publishers", "list", "--json").object(t))
	assert.Contains(t, does(0, "free", publisher), "has no list any more")
	assert.False(t, refused("payments"))
	assert.Contains(t, does(1, "free", publisher), "has no list")
	actions := runOn(t, address, "actions", "list").stdout
	for _, told := range []string{"publisher.limit", "publisher.free", "INC-12", "ana"} {
		assert.Contains(t, actions, told)
	}

	assert.Contains(t, does(1, "limit", prefix+"_nobody", "orders"), "does not exist")
	assert.Contains(t, does(1, "limit", prefix+"_relay", "orders"), "a list of topics does not limit it")
	assert.Contains(t, does(2, "limit", publisher), "want topics, or --none")
	assert.Contains(t, does(2, "limit", publisher, "orders", "--none"), "want topics, or --none")
	assert.Contains(t, does(2, "limit"), "takes the name of a role first")
	assert.Contains(t, does(2, "free", "a", "b"), "takes one role")
	r := runOn(t, pgtest.Login(t, address, prefix, "relay"), "publishers", "limit", publisher, "orders")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "connect as the owner of the tables")
	assert.Contains(t, does(0, "list"), "no role is limited")
}
