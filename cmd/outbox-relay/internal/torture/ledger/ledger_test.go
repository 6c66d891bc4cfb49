package ledger_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
)

// lines returns what Read reads.
func lines(t *testing.T, dir string) (all []string) {
	t.Helper()
	require.NoError(t, ledger.Read(dir, func(words []string) error {
		all = append(all, strings.Join(words, " "))
		return nil
	}))
	return all
}

func open(t *testing.T, dir, name string) *ledger.Writer {
	t.Helper()
	w, err := ledger.Open(dir, name)
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.Close() })
	return w
}

// Property: words come back as they were written, from all ledgers of a directory, in the order of
// each.
func TestWordsComeBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := open(t, dir, "a"), open(t, dir, "b")
	require.NoError(t, b.Write(ledger.Undone, 7, 2))
	require.NoError(t, a.Write(ledger.Acked, int64(1)<<48, 3, -60))
	require.NoError(t, a.Write(ledger.Request, "request-1", 201, "-"))
	require.NoError(t, a.Write(ledger.Replayed))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "log"), []byte("no ledger\n"), 0o600))
	assert.Equal(t, []string{"acked 281474976710656 3 -60", "request request-1 201 -", "replayed", "undone 7 2"}, lines(t, dir))
}

// Property: a line is in the file when Write returns, without Close: it outlives a process that is
// killed.
func TestLineIsWrittenAtOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := open(t, dir, "a")
	require.NoError(t, w.Write(ledger.Copied, "x"))
	assert.Equal(t, []string{"copied x"}, lines(t, dir))
}

// Property: the next process of a place goes on in the same ledger.
func TestLedgerIsAppendedTo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, open(t, dir, "a").Write(ledger.Copied, "x"))
	require.NoError(t, open(t, dir, "a").Write(ledger.Copied, "y"))
	assert.Equal(t, []string{"copied x", "copied y"}, lines(t, dir))
}

// Property: a last line without its end is left out, and nothing else is.
func TestTornLastLineIsLeftOut(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][]string{
		"":                       nil,
		"acked 1 2":              nil,
		"acked 1 2 3\nacked 4 5": {"acked 1 2 3"},
		"acked 1 2 3\n":          {"acked 1 2 3"},
		"acked 1 2 3\n\n":        {"acked 1 2 3", ""},
	} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "a.ledger"), []byte(text), 0o600))
		require.NoError(t, open(t, dir, "b").Write(ledger.Copied, "behind"))
		assert.Equal(t, append(want, "copied behind"), lines(t, dir), "%q", text)
	}
}

// Property: lines of goroutines of one writer, and of two writers of one file, are not mixed up.
func TestConcurrentLinesStayWhole(t *testing.T) {
	t.Parallel()
	const goroutines, each = 8, 500
	dir := t.TempDir()
	writers := []*ledger.Writer{open(t, dir, "a"), open(t, dir, "a")}
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			for n := range each {
				assert.NoError(t, writers[g%2].Write(ledger.Acked, g, n, strings.Repeat("x", n)))
			}
		})
	}
	all.Wait()
	next := map[string]int{}
	require.NoError(t, ledger.Read(dir, func(words []string) error {
		if assert.GreaterOrEqual(t, len(words), 3) {
			n := next[words[1]]
			assert.Equal(t, fmt.Sprint(n), words[2], "order of goroutine %s", words[1])
			if n > 0 {
				assert.Equal(t, strings.Repeat("x", n), words[3])
			}
			next[words[1]]++
		}
		return nil
	}))
	assert.Len(t, next, goroutines)
	for g, n := range next {
		assert.Equal(t, each, n, "lines of goroutine %s", g)
	}
}

// Property: what the reader of a line says ends Read, with the name of the file.
func TestReadReturnsTheErrorOfALine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := open(t, dir, "a")
	require.NoError(t, w.Write(ledger.Copied, "x"))
	require.NoError(t, w.Write(ledger.Copied, "y"))
	n, no := 0, errors.New("no")
	err := ledger.Read(dir, func([]string) error { n++; return no })
	require.ErrorIs(t, err, no)
	assert.Contains(t, err.Error(), "a.ledger")
	assert.Equal(t, 1, n)
}
