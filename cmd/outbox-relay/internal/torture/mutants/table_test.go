package mutants_test

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/mutants"
)

// committed holds a line for each mutant that was found, and where.
const committed = "testdata/results.jsonl"

// foundMin is how many mutants have to be found at least.
const foundMin = 40

var update = flag.Bool("update", false, "write the table again, from the committed results")

// openMax is how many mutants may wait for a hunt.
const openMax = 24

// Property: the committed table is that of the committed results. Each mutant was found, or says what
// the run lacks to find it, and no result is of a mutant that is gone. A hunt takes hours: few mutants
// may wait for it, and the table lists them.
func TestTableListsEachMutant(t *testing.T) {
	t.Parallel()
	done, err := read(committed)
	if err != nil {
		t.Fatal(err)
	}
	var found, missed, open strings.Builder
	n, waiting := 0, 0
	for _, m := range mutants.All() {
		r := done[m.Name]
		delete(done, m.Name)
		switch {
		case len(r.Found) > 0:
			n++
			fmt.Fprintf(&found, "| `%s` | %s | %s | %.0f s | %d |\n", m.Name, m.What, strings.Join(r.Found, ", "), r.Seconds, r.Rounds)
		case m.Lacks != "":
			fmt.Fprintf(&missed, "| `%s` | %s | %s |\n", m.Name, m.What, m.Lacks)
		default:
			waiting++
			fmt.Fprintf(&open, "| `%s` | %s |\n", m.Name, m.What)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(done)) {
		t.Errorf("%s has a result, and is no mutant", name)
	}
	if n < foundMin {
		t.Errorf("%d mutants were found: want %d at least", n, foundMin)
	}
	if waiting > openMax {
		t.Errorf("%d mutants were not found: look for them with -mutants, or say what the run lacks; at most %d may wait", waiting, openMax)
	}
	table := fmt.Sprintf(tableText, n, found.String(), missed.String())
	if waiting > 0 {
		table += openText + open.String()
	}
	file := filepath.Join(module(t), "docs", "reference", "mutants.md")
	if *update {
		if err := os.WriteFile(file, []byte(table), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	is, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(is) != table {
		t.Errorf("%s is not the table of %s: pass -update", file, committed)
	}
}

const tableText = `# Planted bugs that the torture run finds

Generated from a hunt: [the torture run](../torture.md#mutants) against one planted bug after the
other, on embedded servers, with what is drawn from a seed that fits the bug. "Found by" are the
counts of the verdict that were not zero; "after" is the time from the start of the program to the
verdict, with its servers, its rounds and their drains, on two cores that others shared. A result is
of the run as it was at that time.

%d were found:

| Mutant | What is wrong | Found by | After | Rounds |
|---|---|---|---|---|
%s
These are not found. Tests of the packages have to find them:

| Mutant | What is wrong | What the run would need |
|---|---|---|
%s`

const openText = `
These wait for a hunt, or were not found in one:

| Mutant | What is wrong |
|---|---|
`
