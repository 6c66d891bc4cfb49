package integration_test

import (
	"fmt"
	"go/format"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Property: docs/reference/guarantees.md has every row of the failure modes of consumers and of the
// relay, and each failure mode of idempotency keys. Each test that it or docs/security.md names
// exists.
func TestGuaranteesNameTestsThatExist(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/reference/guarantees.md")
	require.NoError(t, err)
	for row := 1; row <= 47; row++ {
		assert.Contains(t, string(text), fmt.Sprintf("| C%d |", row))
	}
	for row := 1; row <= 39; row++ {
		if row < 16 || row > 20 { // which share a line
			assert.Contains(t, string(text), fmt.Sprintf("| O%d |", row))
		}
	}
	for _, mode := range []string{
		"clock skew", "check-then-act", "partial commit", "weak keys", "key collision", "non-determinism", "expiry too early",
		"concurrent duplicates",
	} {
		assert.Regexp(t, `(?m)^\| `+mode+" \\| .+ \\| .*`Test", string(text))
	}
	exists := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	require.NoError(t, filepath.WalkDir("..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		code, err := os.ReadFile(path)
		for _, found := range declared.FindAllStringSubmatch(string(code), -1) {
			exists[found[1]] = true
		}
		return err
	}))
	security, err := os.ReadFile("../docs/security.md")
	require.NoError(t, err)
	named := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(string(text)+string(security), -1)
	require.Greater(t, len(named), 40)
	for _, name := range named {
		assert.True(t, exists[name[1]], name[1])
	}
}

// documents returns the text of every Markdown file by its path.
func documents(t *testing.T) map[string]string {
	t.Helper()
	texts := map[string]string{}
	require.NoError(t, filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && entry.Name() != ".." {
			return filepath.SkipDir
		}
		if err != nil || !strings.HasSuffix(path, ".md") {
			return err
		}
		text, err := os.ReadFile(path)
		texts[filepath.Clean(path)] = string(text)
		return err
	}))
	require.Greater(t, len(texts), 10)
	return texts
}

var (
	fenced  = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	linked  = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	symbol  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are the fragments of a document's headings, as GitHub makes them.
func anchors(text string) map[string]bool {
	found := map[string]bool{}
	for _, title := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		found[strings.ReplaceAll(symbol.ReplaceAllString(strings.ToLower(title[1]), ""), " ", "-")] = true
	}
	return found
}

// Property: each relative link of a document leads to a file or folder, and its fragment to a
// heading there.
func TestLinksOfDocumentsLead(t *testing.T) {
	t.Parallel()
	texts, links := documents(t), 0
	for path, text := range texts {
		for _, link := range linked.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			if strings.Contains(link[1], "://") || strings.HasPrefix(link[1], "mailto:") {
				continue
			}
			links++
			target, fragment, _ := strings.Cut(link[1], "#")
			to := path
			if target != "" {
				to = filepath.Join(filepath.Dir(path), target)
			}
			_, err := os.Stat(to)
			if assert.NoError(t, err, "%s: %s", path, link[1]) && fragment != "" {
				assert.True(t, anchors(texts[to])[fragment], "%s: no heading for %s", path, link[1])
			}
		}
	}
	require.Greater(t, links, 60)
}

// Property: each Go snippet of a document is Go, alone or as statements of a function.
func TestSnippetsOfDocumentsAreGo(t *testing.T) {
	t.Parallel()
	snippets := 0
	for path, text := range documents(t) {
		for _, snippet := range regexp.MustCompile("(?ms)^ *```go\n(.*?)^ *```$").FindAllStringSubmatch(text, -1) {
			snippets++
			_, whole := format.Source([]byte(snippet[1]))
			_, field := format.Source([]byte("var _ = T{\n" + snippet[1] + "}")) // of a Config
			assert.True(t, whole == nil || field == nil, "%s: %v:\n%s", path, whole, snippet[1])
		}
	}
	require.Greater(t, snippets, 3)
}

// Property: the README begins with the two commands that do everything on a machine that has Go.
func TestReadmeBeginsWithTheTwoCommands(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	lines := strings.Split(string(text), "\n")
	beginning := strings.Join(lines[:min(len(lines), 20)], "\n")
	require.Contains(t, beginning, "\ngo run ./cmd/outbox-relay demo ")
	require.Contains(t, beginning, "\ngo test ./... ")
}
