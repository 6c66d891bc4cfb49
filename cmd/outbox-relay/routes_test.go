package main_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Rules and rates that cannot work are refused before anything is done, with their value and the
// bound.
func TestRoutesAndRatesAreChecked(t *testing.T) {
	t.Parallel()
	r := run(t, nil, "run", "--routes", "topic=a;drop;;topic=(;to=b", "--topic-prefix", "a b", "--rates", "orders=0")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "--routes")
	assert.Contains(t, r.stderr, `Rules[1]: Topic "("`)
	assert.Contains(t, r.stderr, `Routes.Prefix "a b": want at most 200 letters`)
	assert.Contains(t, run(t, nil, "run", "--rates", "=5").stderr, `"=5": want topic=rows per second`)
	assert.Contains(t, r.stderr, `"orders=0": want topic=rows per second, above 0, at most 1000000`)
	r = run(t, nil, "run", "--routes", "topic=a", "--rates", "orders=1,orders=2")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "want one of to=NAME, drop and keep")
	assert.Contains(t, r.stderr, `topic "orders" is given twice`)
}

// The flags reach the relay, from the environment as well.
func TestRunRoutes(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), `INSERT INTO effectonce.outbox (topic, payload) VALUES ('noise', 'x'), ('orders', 'y')`)
	topic := kafkatest.Topic(t, 1)
	environment := relayEnvironment(t, address)
	environment["OUTBOX_ROUTES"] = "topic=noise;drop;;topic=orders;to=" + topic
	stderr, end := inBackground(t, environment, "run", "--rates", "orders=1000")
	records := awaitRecords(t, topic, 1)
	require.Zero(t, end(), stderr)
	assert.Contains(t, stderr.String(), "a rule drops rows")
	assert.Equal(t, "y", string(records[0].Value))
}
