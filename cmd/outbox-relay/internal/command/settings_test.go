package command_test

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/command"
)

// A flag wins over its own variable, that wins over the general one, and an empty variable is none.
func TestSourcesOfASetting(t *testing.T) {
	t.Parallel()
	const given, own, general = "postgres://u@127.0.0.1:1/flag", "postgres://u@127.0.0.1:1/own", "postgres://u@127.0.0.1:1/general"
	for name, c := range map[string]struct {
		environment map[string]string
		args        []string
		want        string
	}{
		"flag":        {map[string]string{"OUTBOX_DATABASE_URL": own, "DATABASE_URL": general}, []string{"--database-url", given}, "/flag"},
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
		"run", "--keep", "2ms", "--shards", "257", "--schema", "Bad Name", "--relay", strings.Repeat("x", 256), "--log-format", "xml", "--brokers", ":9092")
	assert.Equal(t, 2, r.code)
	assert.Empty(t, r.stdout)
	lines := strings.Split(strings.TrimSpace(r.stderr), "\n")
	for _, want := range []string{
		`OUTBOX_LEASE "soon": want a duration such as 10s, 1s to 10m`,
		`OUTBOX_LOG_LEVEL "loud": want debug, info, warn or error`,
		`--keep "2ms": want a duration such as 10m, 100ms to 720h`,
		`--shards "257": want a number, 1 to 256`,
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

var update = flag.Bool("update", false, "write docs/cli.md anew")

// docs/cli.md is generated from the commands, without values of a user or a machine.
func TestCommandLineIsDocumented(t *testing.T) {
	t.Parallel()
	const path = "../../../../docs/cli.md"
	want := command.CommandLine()
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o600))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, want, string(text), "docs/cli.md is not what the commands say: go test ./cmd/outbox-relay/internal/command -run TestCommandLineIsDocumented -update")
	for _, name := range []string{"explain", "verify", "tail", "positions", "parked retry"} {
		assert.Contains(t, want, "\n| `"+name+"` | ")
	}
}

// Property: each command line that a document or the help of a command shows names a command and
// flags that are there.
func TestDocumentedCommandsExist(t *testing.T) {
	t.Parallel()
	blocks, line := regexp.MustCompile("(?ms)^ *```sh\n(.*?)^ *```$"), regexp.MustCompile(`(?:^|&& )(?:go run \./cmd/)?outbox-relay ([^#&|<>]*)`)
	lines := 0
	check := func(where, shown string) {
		for _, found := range line.FindAllStringSubmatch(strings.TrimSpace(shown), -1) {
			lines++
			assert.NoError(t, command.CheckCommandLine(shellWords(found[1])), "%s: %s", where, shown)
		}
	}
	for name, help := range command.Helps() {
		for shown := range strings.Lines(strings.ReplaceAll(help, "\\\n", " ")) {
			if strings.HasPrefix(shown, "  ") { // not a sentence
				check(name+" --help", shown)
			}
		}
	}
	require.Greater(t, lines, 60, "in the help")
	require.NoError(t, filepath.WalkDir("../../../..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".md") || strings.HasSuffix(path, "CHANGELOG.md") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, block := range blocks.FindAllStringSubmatch(string(text), -1) {
			for shown := range strings.Lines(strings.ReplaceAll(block[1], "\\\n", " ")) {
				check(path, shown)
			}
		}
		return nil
	}))
	require.Greater(t, lines, 90)
}

// shellWords splits at blanks outside of quotes.
func shellWords(text string) (words []string) {
	for _, word := range regexp.MustCompile(`(?:[^\s'"]|'[^']*'|"[^"]*")+`).FindAllString(text, -1) {
		words = append(words, strings.NewReplacer("'", "", `"`, "").Replace(word))
	}
	return words
}

// Property: a program that is built with -tags lean links nothing that is only for trying out.
// (The test of the image builds it.)
func TestLeanProgramLinksNoServers(t *testing.T) {
	t.Parallel()
	list, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags", "lean", ".").CombinedOutput()
	require.NoError(t, err, string(list))
	for _, module := range []string{"testcontainers", "kfake", "embedded-postgres", "docker/docker", "internal/servers"} {
		assert.NotContains(t, string(list), module)
	}
}
