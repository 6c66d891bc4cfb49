// Package mutants holds planted bugs of the engine, and builds the program with one of them. They
// show what the torture run finds: a judge that never found anything may be blind.
package mutants

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture"
)

// Mutant is one planted bug.
type Mutant struct {
	Name string
	File string // below the module, with slashes
	Old  string // occurs once in File
	New  string
	What string // the bug, in a line
	// Check is the field of the verdict that should find it, by its name in JSON. Others may, too.
	Check string
	// Fits reports whether a plan can show the bug; nil: every plan can.
	Fits func(p torture.Plan) bool
	// Lacks is what the run would need to show the bug; empty: it can show it.
	Lacks string
}

// All returns the mutants. Their names are unique.
func All() []Mutant { return slices.Concat(relayMutants(), consumerMutants(), keyMutants()) }

// roundsLooked is how many rounds of a seed Seed looks at, and seedsLooked how many seeds.
const (
	roundsLooked = 4
	seedsLooked  = 5000
)

// Seed returns the seed whose first rounds fit the mutant best, and how many of them do.
func (m Mutant) Seed(draw func(seed uint64, round int) torture.Plan) (seed uint64, fitting int) {
	if m.Fits == nil {
		return 1, roundsLooked
	}
	for try := uint64(1); try <= seedsLooked && fitting < roundsLooked; try++ {
		n := 0
		for n < roundsLooked && m.Fits(draw(try, n+1)) {
			n++
		}
		if n > fitting {
			seed, fitting = try, n
		}
	}
	return seed, fitting
}

// Apply returns the mutant's file with the bug in it.
func (m Mutant) Apply(source string) (string, error) {
	if m.Old == m.New {
		return "", errors.New("old and new text are the same")
	}
	if n := strings.Count(source, m.Old); n != 1 {
		return "", fmt.Errorf("the old text occurs %d times in %s: want 1", n, m.File)
	}
	return strings.Replace(source, m.Old, m.New, 1), nil
}

// Build builds the program of a module with a mutant. The sources stay as they are: the compiler
// reads the changed file from another place, also where it is embedded.
func Build(ctx context.Context, module string, m Mutant, output string) error {
	return m.compile(ctx, module, "-ldflags=-s -w", "-o", output, "./cmd/outbox-relay")
}

// Compile compiles only the package of a mutant: it shows that the mutant can be built.
func Compile(ctx context.Context, module string, m Mutant) error {
	return m.compile(ctx, module, "./"+path.Dir(m.File))
}

func (m Mutant) compile(ctx context.Context, module string, args ...string) error {
	said, err := m.run(ctx, module, "build", args...)
	if err != nil {
		return fmt.Errorf("build mutant %s: %w: %s", m.Name, err, said)
	}
	return nil
}

// run runs a command of go that sees the mutant in place of the file, and returns its output.
func (m Mutant) run(ctx context.Context, module, command string, args ...string) (said []byte, err error) {
	original := filepath.Join(module, filepath.FromSlash(m.File))
	source, err := os.ReadFile(original) //nolint:gosec // of this module
	if err != nil {
		return nil, err
	}
	mutated, err := m.Apply(string(source))
	if err != nil {
		return nil, fmt.Errorf("mutant %s: %w", m.Name, err)
	}
	dir, err := os.MkdirTemp("", "mutant-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	changed, overlay := filepath.Join(dir, filepath.Base(original)), filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(changed, []byte(mutated), 0o600); err != nil { //nolint:gosec // in a directory of its own
		return nil, err
	}
	text, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{command, "-overlay", overlay}, args...)...) //nolint:gosec // this module
	cmd.Dir = module
	return cmd.CombinedOutput()
}
