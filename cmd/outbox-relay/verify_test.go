package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// What was published is well; a row that is gone from the topic is named, in both forms, with exit
// status 1.
func TestVerifyComparesOutboxAndTopic(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	r := runKafka(t, address, "verify")
	assert.Zero(t, r.code, r.stdout+r.stderr)
	assert.Equal(t, "relay default: 3 rows, 3 of them published; 3 records in 1 topic\nwell\n", r.stdout)
	assert.Empty(t, r.stderr, "progress is for terminals")

	conn := connect(t, address)
	execSQL(t, conn, "INSERT INTO effectonce.outbox (topic) VALUES ($1), ($1)", topic)
	execSQL(t, conn, "UPDATE effectonce.outbox_advances SET floor = 5")
	r = runKafka(t, address, "verify", "--examples", "1")
	assert.Equal(t, 1, r.code)
	assert.Regexp(t, `(?m)^2 published rows are not in their topic\n  row [45] \(id \S+\) is published, but not in topic `+topic+`\n  and 1 more\nnot well\n$`, r.stdout)
	v := runKafka(t, address, "verify", "--json").object(t)
	assert.Equal(t, false, v["well"])
	assert.Len(t, v["missing"].(map[string]any)["examples"], 2)

	assert.Equal(t, 1, runKafka(t, address, "verify", "--relay", "other").code)
	assert.Contains(t, runKafka(t, address, "verify", "--group", "nobody").stderr, "check the name in --group")
	assert.Equal(t, 2, runOn(t, address, "verify").code, "without brokers")
}
