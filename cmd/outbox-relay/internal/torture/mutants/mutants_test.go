package mutants_test

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/mutants"
)

// module is the directory of the module.
func module(t *testing.T) string {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	dir := filepath.Join(filepath.Dir(file), "..", "..", "..", "..", "..")
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		t.Fatal(err)
	}
	return filepath.Clean(dir)
}

// checks are the fields of the verdict that count differences.
var checks = []string{"lost", "doubled", "out_of_order", "phantoms", "money", "unsettled", "backwards", "stuck", "leaked"}

// Property: each mutant is one change of the engine as it is now.
func TestMutantsStillApply(t *testing.T) {
	t.Parallel()
	names := map[string]bool{}
	for _, m := range mutants.All() {
		source, err := os.ReadFile(filepath.Join(module(t), filepath.FromSlash(m.File)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Apply(string(source)); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
		if m.What == "" || !slices.Contains(checks, m.Check) {
			t.Errorf("%s: want a description and a field of the verdict, got %q and %q", m.Name, m.What, m.Check)
		}
		if names[m.Name] {
			t.Errorf("two mutants have the name %s", m.Name)
		}
		names[m.Name] = true
	}
}

// draw is what a run on embedded servers plays.
func draw(seed uint64, round int) torture.Plan {
	return torture.Draw(seed, round, seconds, rate, torture.PaceDefault/60.0, torture.Abilities{KillKafka: !*embedded, Fake: *embedded, Brokers: brokers})
}

// Property: a mutant is looked for where it can show.
func TestMutantsFitSomePlan(t *testing.T) {
	t.Parallel()
	for _, m := range mutants.All() {
		if _, fitting := m.Seed(draw); fitting == 0 {
			t.Errorf("%s: no plan fits it", m.Name)
		}
	}
}

// Property: a mutant whose place is not certain is refused.
func TestApplyRefusesWhatDoesNotOccurOnce(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, source, old, replacement string
		ok                             bool
	}{
		{"once", "a b c", "b", "d", true},
		{"twice", "a b b", "b", "d", false},
		{"never", "a c", "b", "d", false},
		{"the same", "a b c", "b", "b", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got, err := mutants.Mutant{Name: "m", File: "f", Old: test.old, New: test.replacement}.Apply(test.source)
			if (err == nil) != test.ok || test.ok && got != "a d c" {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}
