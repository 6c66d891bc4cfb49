package command_test

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

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
