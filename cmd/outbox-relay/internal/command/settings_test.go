package command_test

import (
	"flag"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/command"
	"github.com/effectonce/effectonce/internal/pgtest"
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

// canaries are passwords of two halves around what breaks URLs. Neither half may ever be seen.
const canaryHead, canaryTail = "CANARY", "HOMING"

func canaries() []string {
	var all []string
	for _, middle := range []string{"@", "%", "#", "'", `\`, "/", ":", "?", " ", "%zz", "&x=", "[", "\n", "ü", "@/", "#@", "' x='", "1/2@3"} {
		all = append(all, canaryHead+middle+canaryTail)
	}
	return all
}

// databaseURLs are ways to write a URL with a password, most of them wrong.
func databaseURLs(password string) []string {
	return []string{
		"postgres://user:" + password + "@127.0.0.1:1/app",
		"postgres://user:1" + password + "@127.0.0.1:1/app?sslmode=disable",
		"postgres://user:" + password + "@127.0.0.1:port/app",
		"postgres://user:" + password + "@[::1/app",
		"postgres://user:12/" + password + "@127.0.0.1:1/app",
		"postgres://127.0.0.1:1/app?password=" + password,
		"postgres://127.0.0.1:1/app?sslmode=" + password,
		"postgresql://user:" + url.QueryEscape(password) + "@127.0.0.1:1/app?sslmode=wrong",
		"postgre://user:" + password + "@127.0.0.1:1/app?sslmode=disable",
		"mysql://user:" + password + "@127.0.0.1:1/app",
		"user:" + password + "@127.0.0.1:1/app",
		"host=127.0.0.1 port=1 user=u password=" + password + " dbname=app",
		"host=127.0.0.1 port=1 user=u password='" + password + " dbname=app",
		"host=127.0.0.1 port=1 user=u password='" + password + "' dbname=app connect_timeout=never",
		password,
	}
}

func assertNoCanary(t *testing.T, r result, what string) {
	t.Helper()
	for _, text := range []string{r.stdout, r.stderr} {
		for _, piece := range []string{canaryHead, canaryTail, strings.ToLower(canaryHead), strings.ToLower(canaryTail)} {
			if !assert.NotContains(t, text, piece, what) {
				return
			}
		}
	}
}

// A file of the URL that is missing or not a certificate is not reported as a malformed URL, and
// neither password nor path is repeated.
func TestUnreadableFilesOfTheURLAreNamed(t *testing.T) {
	t.Parallel()
	broken := filepath.Join(t.TempDir(), "broken.pem")
	require.NoError(t, os.WriteFile(broken, []byte("no certificate"), 0o600))
	for _, settings := range []string{
		"sslmode=verify-full&sslrootcert=/no/" + canaryTail + "/root.pem",
		"sslmode=verify-full&sslrootcert=" + broken,
		"sslmode=verify-full&sslrootcert=" + filepath.Dir(broken),
		"sslmode=require&sslcert=/no/cert.pem&sslkey=/no/key.pem",
		"sslmode=require&sslcert=" + broken + "&sslkey=" + broken,
	} {
		r := runOn(t, "postgres://user:"+canaryHead+"@127.0.0.1:1/app?"+settings, "status")
		assert.Equal(t, 2, r.code, settings)
		assert.Contains(t, r.stderr, "sslrootcert, sslcert and sslkey", settings)
		assert.Contains(t, r.stderr, "the user this runs as can read", settings)
		assert.NotContains(t, r.stderr, "cannot be parsed", settings)
		assertNoCanary(t, r, settings)
	}
}

// Row S3 of guarantees.md: neither a password nor a piece of one is ever printed, however the URL
// is malformed and wherever it is given. (CANARY and HOMING are the pieces.)
func TestPasswordsAreNeverPrinted(t *testing.T) {
	t.Parallel()
	for i, password := range canaries() {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			for _, address := range databaseURLs(password) {
				for _, c := range []result{
					runOn(t, address, "migrate", "up"),
					run(t, map[string]string{"DATABASE_URL": address}, "doctor", "--json", "--brokers", "127.0.0.1:1", "--timeout", "200ms"),
					run(t, nil, "run", "--database-url="+address, "--brokers", "127.0.0.1:1", "--log-level", "debug"),
				} {
					assert.NotZero(t, c.code, address)
					assertNoCanary(t, c, address)
				}
				// In the wrong place.
				if !strings.Contains(address, "password=") && !strings.Contains(address, "user:") {
					continue // nothing tells that it is a password
				}
				for _, args := range [][]string{
					{address},
					{"migrate", address},
					{"status", address},
					{"help", address},
					{"completion", "bash", address},
					{"status", "-database-url=" + address},
					{"status", "-p" + address},
					{"status", "--databaseurl=" + address},
					{"status", "--=" + address},
					{"run", "--brokers", "user:" + password + "@host:1"},
					{"status", "--json=" + "postgres://user:" + password + "@host"},
				} {
					c := run(t, nil, args...)
					assert.NotZero(t, c.code, args)
					assertNoCanary(t, result{stderr: c.stderr, stdout: c.stdout}, strings.Join(args, " "))
				}
			}
		})
	}
}

// Row S3 of guarantees.md: a password that the server refuses, and one that it takes, stay hidden
// as well.
func TestPasswordsOfRealServersAreNeverPrinted(t *testing.T) {
	t.Parallel()
	address, err := url.Parse(pgtest.EmptyDatabase(t))
	require.NoError(t, err)
	for _, user := range []string{address.User.Username(), "nobody-of-this-name"} {
		wrong := *address
		wrong.User = url.UserPassword(user, canaryHead+"@#%"+canaryTail)
		c := runOn(t, wrong.String(), "migrate", "status")
		assert.Equal(t, 1, c.code)
		assertNoCanary(t, c, user)
		assert.Contains(t, c.stderr, `password authentication failed for user "`+user+`" (28P01)`)
		assert.Contains(t, c.stderr, "cannot connect to the database at "+address.Host+address.Path)
	}
	missing := *address
	missing.Path = "/no-such-database"
	c := runOn(t, missing.String(), "migrate", "status")
	assert.Equal(t, 1, c.code)
	assert.Contains(t, c.stderr, address.Host+"/no-such-database: database \"no-such-database\" does not exist (3D000)")
}

// Row S3 of guarantees.md: what the parser would take for something else than was meant, so that a
// piece of the password would go out as a host, a database or a setting, is refused before anything
// connects, with the remedy.
func TestAmbiguousDatabaseURLsAreRefused(t *testing.T) {
	t.Parallel()
	for _, address := range []string{
		"postgres://user:12/CANARY@127.0.0.1:1/app",
		"postgres://user:12?CANARY@127.0.0.1:1/app",
		"postgres://user:12#CANARY@127.0.0.1:1/app",
		"postgres://user:12#CANARY",
		"postgres://user:CANARY@HOMING@127.0.0.1:1/app",
		"postgres://user:CANARY@HOM ING:1/app",
		"host=127.0.0.1 port=1 user=u password=CANARY HOM-ING=x dbname=app",
		"host=HOM@ING port=1 user=u password=CANARY dbname=app",
		"postgre://user:CANARY@127.0.0.1:1/app?sslmode=disable",
	} {
		r := runOn(t, address, "migrate", "status")
		assert.Equal(t, 2, r.code, address)
		assert.Contains(t, r.stderr, "OUTBOX_DATABASE_URL: the database URL cannot be parsed: want postgres://user:password@host:5432/dbname", address)
		assertNoCanary(t, r, address)
	}
}
