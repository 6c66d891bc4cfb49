package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: the number of shards changes while no replica runs, and not before; the error names the
// replica. The change is recorded.
func TestShardsCommand(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.Contains(t, runOn(t, address, "shards", "2").stderr, "no relay of this name ever ran")
	execSQL(t, conn, `INSERT INTO effectonce.outbox_relays (relay) VALUES ('default')`)
	execSQL(t, conn, `INSERT INTO effectonce.outbox_replicas (relay, owner, alive_until) VALUES ('default', 'pod-1', 'infinity')`)
	r := runOn(t, address, "shards", "2")
	assert.Equal(t, 1, r.code)
	assert.Contains(t, r.stderr, "stop the relays first (pod-1)")
	execSQL(t, conn, `DELETE FROM effectonce.outbox_replicas`)
	assert.Equal(t, "relay default had 1 shard and has 2: start its replicas\n", runOn(t, address, "shards", "2", "--why", "load").stdout)
	assert.Equal(t, "relay default has 2 shards\n", runOn(t, address, "shards", "2").stdout)
	assert.Equal(t, map[string]any{"relay": "default", "before": 2.0, "shards": 4.0}, runOn(t, address, "shards", "4", "--json").object(t))
	assert.Regexp(t, `relay.shards +.*load`, runOn(t, address, "actions", "list").stdout)
}
