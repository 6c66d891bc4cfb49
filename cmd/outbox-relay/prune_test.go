package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// A dry run says what a run then does; what holds claims back is named; two at a time do not work.
func TestPruneForgetsWhatNobodyNeeds(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	r := runOn(t, address, "prune", "--dry-run")
	require.Zero(t, r.code, r.stderr)
	assert.Equal(t, "nothing may be forgotten yet\n", r.stdout)

	execSQL(t, conn, "INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window) VALUES ('c', 'g', '{t}', '3 days')")
	execSQL(t, conn, "INSERT INTO effectonce.processed_messages VALUES (effectonce.uuid_floor(clock_timestamp() - interval '6 days'), 1, 0)")
	dry := runOn(t, address, "prune", "--dry-run", "--json").object(t)
	assert.Len(t, dry["truncated"], 1)
	assert.NotEmpty(t, dry["dropped"])
	assert.Regexp(t, `(?m)^would forget 1 day: processed_messages_\d{8}$`, runOn(t, address, "prune", "--dry-run").stdout)
	r = runOn(t, address, "prune")
	require.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^forgot 1 day: processed_messages_\d{8}$`, r.stdout)
	assert.Regexp(t, `(?m)^dropped \d days: processed_messages_\d{8}, `, r.stdout)
	assert.Regexp(t, `(?m)^claims up to .* may be forgotten, in whole days$`, r.stdout)
	assert.Nil(t, runOn(t, address, "prune", "--dry-run", "--json").object(t)["dropped"])

	execSQL(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('g', 't', 4)")
	assert.Contains(t, runOn(t, address, "prune").stdout, "for the position of")
	execSQL(t, conn, "UPDATE effectonce.maintenance SET lease_until = clock_timestamp() + interval '1 minute'")
	r = runOn(t, address, "prune")
	assert.Equal(t, 1, r.code)
	assert.Equal(t, "another process is pruning\n", r.stdout)
}
