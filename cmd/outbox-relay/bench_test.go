package main_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// "bench consume --json" and "bench relay --json" end with one object on stdout that has what
// scripts look for; progress goes to stderr.
func TestBenchJSON(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		args []string
		keys []string
	}{
		"consume": {[]string{"--messages", "2000"}, []string{"textbook", "no_dedup", "by_id", "bytes_per_message", "wal_bytes_per_message"}},
		"relay": {[]string{"--rows", "2000", "--latency-seconds", "1", "--idle-seconds", "1", "--large-rows", "3000"}, []string{
			"skip_locked", "bare_cursor", "gap_safe_cursor", "relay", "exactly_once", "relay_vs_gap_safe_cursor", "p50_ms", "p99_ms",
			"cpu_seconds_per_million", "memory_mb", "idle_cpu_percent", "idle_queries_per_second", "large_vs_relay_process",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			environment := map[string]string{
				"DATABASE_URL": pgtest.EmptyDatabase(t), "KAFKA_BROKERS": strings.Join(kafkatest.Brokers(t), ","),
			}
			cmd, _ := process(t, environment, append([]string{"bench", name, "--json", "--rounds", "1"}, want.args...)...)
			stdout, stderr := newOutput(), newOutput()
			cmd.Stdout, cmd.Stderr = stdout, stderr
			require.NoError(t, cmd.Run(), stderr)
			r := result{stdout: stdout.String(), stderr: stderr.String()}
			found := r.object(t)
			for _, key := range append(want.keys, "seconds") {
				assert.IsType(t, 0.0, found[key], key)
			}
			assert.Contains(t, found["postgres"], "PostgreSQL")
			assert.NotEmpty(t, found["kafka"])
			assert.Contains(t, r.stderr, "round 1: ")
		})
	}
}

// Without --json people get a table.
func TestBenchTable(t *testing.T) {
	t.Parallel()
	environment := map[string]string{
		"DATABASE_URL": pgtest.EmptyDatabase(t), "KAFKA_BROKERS": strings.Join(kafkatest.Brokers(t), ","),
	}
	r := run(t, environment, "bench", "consume", "--messages", "2000", "--rounds", "1")
	require.Zero(t, r.code, "%+v", r)
	assert.Contains(t, r.stdout, "textbook: one message per transaction")
	assert.Contains(t, r.stdout, "bytes a message")
}

// Wrong use is found before a server is started, and all of it is reported.
func TestBenchWrongUse(t *testing.T) {
	t.Parallel()
	r := run(t, nil, "bench", "relay", "--rows", "7", "--rounds", "0")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, `--rows "7": want a number, 2000 to 5000000`)
	assert.Contains(t, r.stderr, `--rounds "0": want a number, 1 to 25`)
	assert.NotContains(t, r.stderr, "starting")
	r = run(t, nil, "bench", "relay", "--scenario", "drain,everything", "--backlog-rows", "1")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, `--scenario "drain,everything": want all, or some of drain, process, latency, idle, load, backlog, network, pooler, shards`)
	assert.Contains(t, r.stderr, `--backlog-rows "1": want numbers from 2000 to 100000000, separated by commas`)
	r = run(t, nil, "bench")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.stderr, "a command is missing")
}
