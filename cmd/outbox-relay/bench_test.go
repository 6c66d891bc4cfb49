package main_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// "bench consume --json" ends with one object on stdout that has what scripts look for, and people
// get a table; progress goes to stderr.
func TestBench(t *testing.T) {
	longtest.Only(t, "the benchmark")
	t.Parallel()
	environment := map[string]string{
		"DATABASE_URL": pgtest.EmptyDatabase(t), "KAFKA_BROKERS": strings.Join(kafkatest.Brokers(t), ","),
	}
	r := run(t, environment, "bench", "consume", "--messages", "2000", "--rounds", "1", "--json")
	require.Zero(t, r.code, r.stderr)
	found := r.object(t)
	for _, key := range []string{"textbook", "no_dedup", "by_id", "by_position", "all_duplicates", "bytes_per_message", "wal_bytes_per_message", "seconds"} {
		assert.IsType(t, 0.0, found[key], key)
	}
	assert.Contains(t, found["postgres"], "PostgreSQL")
	assert.Contains(t, r.stderr, "round 1: ")
}
