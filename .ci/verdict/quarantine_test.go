package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Property: a list is refused if an entry is over, too far ahead or without its cause, and if it is
// too long; all problems are reported at once.
func TestQuarantineHasBounds(t *testing.T) {
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"empty":     {"# nothing\n\n", nil},
		"last days": {"p TestA 2026-11-26 the port is taken\np TestB 2026-12-10 slow", nil},
		"over":      {"p TestA 2026-11-25 the port is taken\np TestB 2026-12-11 slow\np TestC 2026-12-01", []string{"TestA", "the day is over", "TestB", "at most 14 days ahead", "TestC", "want PACKAGE"}},
		"no day":    {"p TestA soon the port is taken", []string{"want a day"}},
		"too many":  {strings.Repeat("p Test%d 2026-12-01 slow\n", 11), []string{"11 tests, at most 10"}},
	} {
		t.Run(name, func(t *testing.T) {
			file, n := filepath.Join(t.TempDir(), "quarantine"), 0
			for strings.Contains(c.text, "%d") {
				c.text = strings.Replace(c.text, "%d", fmt.Sprint(n), 1)
				n++
			}
			write(t, file, c.text)
			_, err := readQuarantine(file, now)
			if (err != nil) != (c.want != nil) {
				t.Fatal(err)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in: %v", want, err)
				}
			}
		})
	}
}
