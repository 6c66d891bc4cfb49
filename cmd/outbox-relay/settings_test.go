package main_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A flag wins over its own variable, that wins over the general one, and an empty variable is none.
func TestSourcesOfASetting(t *testing.T) {
	t.Parallel()
	const flag, own, general = "postgres://u@127.0.0.1:1/flag", "postgres://u@127.0.0.1:1/own", "postgres://u@127.0.0.1:1/general"
	for name, c := range map[string]struct {
		environment map[string]string
		args        []string
		want        string
	}{
		"flag":        {map[string]string{"OUTBOX_DATABASE_URL": own, "DATABASE_URL": general}, []string{"--database-url", flag}, "/flag"},
		"own":         {map[string]string{"OUTBOX_DATABASE_URL": own, "DATABASE_URL": general}, nil, "/own"},
		"general":     {map[string]string{"DATABASE_URL": general}, nil, "/general"},
		"empty is no": {map[string]string{"OUTBOX_DATABASE_URL": "", "DATABASE_URL": general}, nil, "/general"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, c.environment, append([]string{"migrate", "status"}, c.args...)...)
			assert.Equal(t, 1, r.code)
			assert.Equal(t, "error: cannot connect to the database at 127.0.0.1:1"+c.want+
				": connection refused: check host and port, and that PostgreSQL runs\n", r.stderr)
		})
	}
	t.Run("a flag of one command", func(t *testing.T) {
		t.Parallel()
		r := run(t, map[string]string{"OUTBOX_SCHEMA": "elsewhere"}, "migrate", "print")
		assert.Zero(t, r.code)
		assert.Contains(t, r.stdout, `CREATE TABLE "elsewhere".outbox (`)
		assert.NotContains(t, r.stdout, "effectonce.outbox")
	})
	t.Run("brokers", func(t *testing.T) {
		t.Parallel()
		r := run(t, map[string]string{"KAFKA_BROKERS": "x:1:2", "DATABASE_URL": general}, "run")
		assert.Equal(t, "error: KAFKA_BROKERS \"x:1:2\": want host:port, several separated by commas\n", r.stderr)
	})
}

// Wrong use is reported at once and completely: with the source, the value and the bound of every
// problem, and exit status 2. Nothing is done.
func TestAllProblemsAreReportedAtOnce(t *testing.T) {
	t.Parallel()
	r := run(t, map[string]string{"OUTBOX_LEASE": "soon", "OUTBOX_LOG_LEVEL": "loud"},
		"run", "--poll-min", "2m", "--max-connections", "1", "--schema", "Bad Name", "--relay", strings.Repeat("x", 256), "--log-format", "xml", "--brokers", ":9092")
	assert.Equal(t, 2, r.code)
	assert.Empty(t, r.stdout)
	lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
	for _, want := range []string{
		`OUTBOX_LEASE "soon": want a duration such as 10s, 1s to 10m`,
		`OUTBOX_LOG_LEVEL "loud": want debug, info, warn or error`,
		`--poll-min "2m": want a duration such as 700µs, 100µs to 1m`,
		`--max-connections "1": want a number, 2 to 100`,
		`--schema "Bad Name": want at most 49 lower-case letters`,
		`: want 1 to 255 bytes`,
		`--log-format "xml": want one of text, json`,
		`--brokers ":9092": want host:port`,
		`--database-url is missing: give the flag, or set OUTBOX_DATABASE_URL or DATABASE_URL`,
	} {
		assert.Contains(t, r.stderr, want)
	}
	assert.Len(t, lines, 9, r.stderr)
	for _, line := range lines {
		assert.Regexp(t, "^error: ", line)
	}
}

// Whatever is typed wrong exits with 2 and one line that says what to type instead.
func TestWrongUse(t *testing.T) {
	t.Parallel()
	url := []string{"--database-url", "postgres://u@127.0.0.1:1/d", "--brokers", "127.0.0.1:1"}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag":         {append([]string{"run", "--leese", "3s"}, url...), "unknown flag --leese: see outbox-relay run --help"},
		"one dash":             {[]string{"run", "-brokers=x"}, "unknown flag -b: flags begin with two dashes"},
		"flag without value":   {[]string{"run", "--lease"}, "flag --lease needs a value"},
		"unknown command":      {[]string{"statsu"}, `unknown command "statsu": did you mean "status"?`},
		"unknown subcommand":   {[]string{"migrate", "upp"}, `unknown command "upp": did you mean "up"?`},
		"nothing like it":      {[]string{"frobnicate"}, `unknown command "frobnicate": see outbox-relay --help`},
		"empty command":        {[]string{""}, `unknown command "": see outbox-relay --help`},
		"empty name":           {append([]string{"verify", "--topic", ""}, url...), `--topic "": want a name`},
		"argument":             {append([]string{"status", "now"}, url...), `outbox-relay status takes no argument, got "now"`},
		"no command":           {nil, "a command is missing"},
		"no subcommand":        {[]string{"migrate"}, "outbox-relay migrate: a command is missing"},
		"no address":           {[]string{"status"}, "--database-url is missing"},
		"no brokers":           {append([]string{"run"}, url[:2]...), "--brokers is missing: give the flag, or set OUTBOX_BROKERS or KAFKA_BROKERS"},
		"empty address":        {[]string{"status", "--database-url", ""}, "--database-url is missing"},
		"pauses do not fit":    {append([]string{"run", "--poll-min", "1s"}, url...), "--poll-min 1s: want at most --poll-max, which is 250ms"},
		"bool":                 {[]string{"version", "--json=perhaps"}, `--json "perhaps": want true or false`},
		"version out of range": {[]string{"migrate", "print", "--version", "99"}, `--version "99": want a version, 1 to`},
		"help topic":           {[]string{"help", "frobnicate"}, "no such command"},
		"shell":                {[]string{"completion", "fsh"}, `unknown command "fsh"`},
		"shell and more":       {[]string{"completion", "bash", "zsh"}, "takes no argument"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, nil, c.args...)
			assert.Equal(t, 2, r.code, "%+v", r)
			assert.Empty(t, r.stdout)
			lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
			assert.Contains(t, lines[len(lines)-1], "error: ")
			assert.Contains(t, lines[len(lines)-1], c.want)
		})
	}
}

// Commands that use no address ignore an invalid one, and help needs nothing.
func TestOfflineCommands(t *testing.T) {
	t.Parallel()
	wrong := map[string]string{"DATABASE_URL": "jdbc:mysql://somewhere", "KAFKA_BROKERS": "::"}
	for _, args := range [][]string{{"version"}, {"migrate", "print"}, {"completion", "bash"}, {"help"}, {"help", "migrate", "up"}, {"run", "--help"}} {
		r := run(t, wrong, args...)
		assert.Zero(t, r.code, "%q: %s", args, r.stderr)
		assert.NotEmpty(t, r.stdout, args)
		assert.Empty(t, r.stderr, args)
	}
}

// The version names what support asks for first.
func TestVersion(t *testing.T) {
	t.Parallel()
	v := run(t, nil, "version", "--json").object(t)
	assert.InDelta(t, latest(t), v["schema_version"], 0)
	assert.Regexp(t, `^go1\.`, v["go"])
	assert.NotEmpty(t, v["version"])
	r := run(t, nil, "version")
	require.Zero(t, r.code)
	assert.Contains(t, r.stdout, fmt.Sprintf("schema   version %d\n", latest(t)))
}
