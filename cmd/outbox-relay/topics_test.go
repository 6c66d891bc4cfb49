package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: topics are not paused under a name that no relay has while there are others, where nobody would take note of it;
// before the first relay runs any name will do.
func TestPauseUnderAnotherNameIsRefused(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.Contains(t, runOn(t, address, "topics", "pause", "early").stdout, "1 of 1 topics paused")
	execSQL(t, conn, "INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ('eu-1', 1)")
	for _, verb := range []string{"pause", "resume"} {
		r := runOn(t, address, "topics", verb, "orders")
		assert.Equal(t, 1, r.code)
		assert.Contains(t, r.stderr, "relay default: no relay of this name ever ran on this outbox; there is eu-1: give it with --relay")
	}
	assert.Contains(t, runOn(t, address, "topics", "pause", "orders", "--relay", "eu-1").stdout, "1 of 1 topics paused")
}
