package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Property: the tutorial's program publishes, and its consumer writes one invoice.
func TestTutorialHasItsEffect(t *testing.T) {
	t.Parallel()
	address, fake := pgtest.Database(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(3, "orders"))
	pool, err := pgxpool.New(t.Context(), address)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	r, err := relay.New(pool, []kgo.Opt{kgo.SeedBrokers(fake.ListenAddrs()...)}, relay.Config{})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- r.Run(ctx) }()
	go func() { ended <- run(ctx, address, fake.ListenAddrs()) }()
	count := func() (n int) {
		_ = pool.QueryRow(t.Context(), `SELECT count(*) FROM invoices WHERE order_id = 'order-1' AND amount = 100`).Scan(&n) // no table yet: 0
		return n
	}
	testwait.True(t, "the invoice", func() bool { return count() == 1 })
	stop()
	require.NoError(t, testwait.Chan(t, "the relay's or the program's end", ended))
	require.NoError(t, testwait.Chan(t, "the other's end", ended))
	require.Equal(t, 1, count())
}

// Property: the README shows this program, letter by letter.
func TestReadmeShowsTheProgram(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("main.go")
	require.NoError(t, err)
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, program, found := strings.Cut(string(source), "\npackage main\n")
	require.True(t, found)
	unindented := regexp.MustCompile(`(?m)^   `).ReplaceAllString(string(readme), "")
	require.Contains(t, unindented, "```go\npackage main\n"+strings.TrimRight(program, "\n")+"\n```")
}

// Property: the program builds in a module of its own, so it needs nothing internal.
func TestTutorialBuildsElsewhere(t *testing.T) {
	longtest.Only(t, "it builds a program")
	t.Parallel()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	module := t.TempDir()
	copied := func(from, to string, change func(string) string) {
		text, err := os.ReadFile(from)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(module, to), []byte(change(string(text))), 0o600))
	}
	same := func(text string) string { return text }
	copied("main.go", "main.go", same)
	copied(filepath.Join(root, "go.sum"), "go.sum", same)
	const name = "github.com/effectonce/effectonce"
	copied(filepath.Join(root, "go.mod"), "go.mod", func(text string) string {
		return strings.Replace(text, "module "+name, "module example.com/shop", 1) + "\nrequire " + name + " v0.0.0\nreplace " + name + " => " + root + "\n"
	})
	build := exec.CommandContext(t.Context(), "go", "build", "-mod=mod", "-o", filepath.Join(t.TempDir(), "shop"), ".")
	build.Dir = module
	output, err := build.CombinedOutput()
	require.NoError(t, err, string(output))
}
