package integration_test

import (
	"fmt"
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
