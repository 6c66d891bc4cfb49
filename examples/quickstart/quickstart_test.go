package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Property: the quick start runs with nothing but Go, and a message that comes twice has one effect.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), &out, os.Getenv("DATABASE_URL")))
	require.Contains(t, out.String(), "3 orders, 4 messages (one of them twice), 3 invoices")
}

// Property: the README shows this program's code, letter by letter.
func TestReadmeShowsThisCode(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("main.go")
	require.NoError(t, err)
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, code, ok := strings.Cut(string(source), "// quickstart begin\n")
	require.True(t, ok)
	code, _, ok = strings.Cut(code, "// quickstart end\n")
	require.True(t, ok)
	require.Contains(t, string(readme), "```go\n"+strings.TrimSpace(code)+"\n```")
	require.Less(t, strings.Count(code, "\n"), 50, "about forty lines")
}
