package main_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// The doctor finds a relay that never comes back; the command that the doctor names lists and
// deletes it, and records that. A running relay is refused; without a reason, or a name, nothing is
// done.
func TestRelaysAreListedAndDeleted(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	assert.Equal(t, result{0, "no relays: none has run yet\n", ""}, runOn(t, address, "relays", "list"))
	execSQL(t, conn, "INSERT INTO effectonce.outbox_relays (relay, created_at) VALUES ('default', clock_timestamp()), ('old', clock_timestamp() - interval '26 hours')")
	execSQL(t, conn, `INSERT INTO effectonce.outbox_progress (relay, shard, published, lease_until, updated_at) VALUES
		('default', 0, 3, clock_timestamp() + interval '1 hour', clock_timestamp()), ('old', 0, 7, NULL, clock_timestamp() - interval '25 hours')`)
	r := runOn(t, address, "relays", "list")
	assert.Zero(t, r.code, r.stderr)
	assert.Regexp(t, `(?m)^default +1 +1 +0 +3 +0 +-$`, r.stdout)
	assert.Regexp(t, `(?m)^old +1 +0 +0 +7 +0 +1d1h$`, r.stdout)
	var listed map[string]any
	require.NoError(t, json.Unmarshal([]byte(strings.Split(runOn(t, address, "relays", "list", "--json").stdout, "\n")[1]), &listed))
	assert.Equal(t, "old", listed["relay"])

	for text, args := range map[string][]string{"--why is missing": {"old"}, "takes one name": {"--why", "w"}, "want 1 to 255 bytes": {"", "--why", "w"}} {
		r := runOn(t, address, append([]string{"relays", "delete"}, args...)...)
		assert.Equal(t, 2, r.code, args)
		assert.Contains(t, r.stderr, text)
	}
	assert.Contains(t, runOn(t, address, "doctor").stdout, "warn  relays: no replica of relay \"old\" has run for 1d1h")
	assert.Contains(t, runOn(t, address, "doctor").stdout, "remedy: outbox-relay run --relay 'old'")
	live := runOn(t, address, "relays", "delete", "default", "--why", "w")
	assert.Equal(t, 1, live.code)
	assert.Contains(t, live.stderr, "stop all of them first")
	v := runOn(t, address, "relays", "delete", "old", "--why", "renamed", "--by", "ana", "--json").object(t)
	assert.InDelta(t, 1, v["shards"], 0)
	assert.NotContains(t, runOn(t, address, "relays", "list").stdout, "old")
	assert.Regexp(t, `\(ana\) +relay.delete +.*renamed`, runOn(t, address, "actions", "list").stdout)
	assert.Equal(t, 1, runOn(t, address, "relays", "delete", "old", "--why", "again").code)
}

// Property: the list of actions names the relay or the role that an action changed.
func TestActionsNameWhatTheyChanged(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), `INSERT INTO effectonce.operator_actions (who, what, why, subject)
		VALUES ('ana', 'relay.shards', 'more', '{"relay": "eu-1", "shards": 1, "wanted": 3}'), ('ana', 'publisher.free', 'over', '{"role": "shop"}')`)
	r := runOn(t, address, "actions", "list")
	assert.Regexp(t, `(?m) relay\.shards +relay eu-1 +more$`, r.stdout)
	assert.Regexp(t, `(?m) publisher\.free +role shop +over$`, r.stdout)
}
