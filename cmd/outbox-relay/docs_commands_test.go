package main_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	main "github.com/effectonce/effectonce/cmd/outbox-relay"
)

// Property: each command line that a document or the help of a command shows names a command and
// flags that are there.
func TestDocumentedCommandsExist(t *testing.T) {
	t.Parallel()
	blocks, line := regexp.MustCompile("(?ms)^ *```sh\n(.*?)^ *```$"), regexp.MustCompile(`(?:^|&& )(?:go run \./cmd/)?outbox-relay ([^#&|<>]*)`)
	lines := 0
	check := func(where, shown string) {
		for _, found := range line.FindAllStringSubmatch(strings.TrimSpace(shown), -1) {
			lines++
			assert.NoError(t, main.CheckCommandLine(shellWords(found[1])), "%s: %s", where, shown)
		}
	}
	for command, help := range main.Helps() {
		for shown := range strings.Lines(strings.ReplaceAll(help, "\\\n", " ")) {
			if strings.HasPrefix(shown, "  ") { // not a sentence
				check(command+" --help", shown)
			}
		}
	}
	require.Greater(t, lines, 60, "in the help")
	require.NoError(t, filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
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
	require.Greater(t, lines, 100)
}

// shellWords splits at blanks outside of quotes.
func shellWords(text string) (words []string) {
	for _, word := range regexp.MustCompile(`(?:[^\s'"]|'[^']*'|"[^"]*")+`).FindAllString(text, -1) {
		words = append(words, strings.NewReplacer("'", "", `"`, "").Replace(word))
	}
	return words
}
