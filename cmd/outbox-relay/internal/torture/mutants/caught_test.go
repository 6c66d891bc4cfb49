package mutants_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/mutants"
)

var tests = flag.Bool("mutants.tests", false, "run the engine's tests against the mutants that they find")

// Property: each mutant that a test of the engine finds is a change of the engine as it is now.
func TestCaughtMutantsStillApply(t *testing.T) {
	t.Parallel()
	for _, c := range mutants.AllCaught() {
		source, err := os.ReadFile(filepath.Join(module(t), filepath.FromSlash(c.Mutant.File)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Mutant.Apply(string(source)); err != nil {
			t.Errorf("%s: %v", c.Mutant.Name, err)
		}
	}
}

// Property: the test fails with the mutant, by an assertion and not because it could not run.
func TestMutantsAreCaughtByTests(t *testing.T) { //nolint:paralleltest // a build uses all cores
	if !*tests {
		t.Skip("LOUD SKIP: takes minutes: pass -mutants.tests")
	}
	for _, c := range mutants.AllCaught() { //nolint:paralleltest // see above
		t.Run(c.Mutant.Name, func(t *testing.T) {
			said, err := c.Test(t.Context(), module(t))
			if err == nil || !bytes.Contains(said, []byte("--- FAIL: "+c.Name)) {
				t.Errorf("%s of %s does not find that %s: %v\n%s", c.Name, c.Package, c.Mutant.What, err, said)
			}
		})
	}
}
