package mutants_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/mutants"
)

var (
	build    = flag.Bool("mutants.build", false, "compile every mutant")
	hunt     = flag.Bool("mutants", false, "run the torture against every mutant that it can find")
	which    = flag.String("mutants.run", "", "regular expression of names")
	minutes  = flag.Int("mutants.minutes", 3, "no round of a mutant begins after this many minutes")
	embedded = flag.Bool("mutants.embedded", true, "no containers")
	results  = flag.String("mutants.results", committed, "file of results; mutants that were found are not run again")
	lacking  = flag.Bool("mutants.lacking", false, "also run mutants for which the torture is known to lack something")
)

// seconds is the length of a round, and rate the orders per second: what shows a bug is how things
// meet, not how many there are.
const (
	seconds = 15
	rate    = 1_500
	brokers = 3 // of Kafka
)

func chosen(t *testing.T) (list []mutants.Mutant) {
	t.Helper()
	name, err := regexp.Compile(*which)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mutants.All() {
		if name.MatchString(m.Name) {
			list = append(list, m)
		}
	}
	return list
}

func TestMutantsBuild(t *testing.T) { //nolint:paralleltest // a build uses all cores
	if !*build {
		t.Skip("LOUD SKIP: takes minutes: pass -mutants.build")
	}
	for _, m := range chosen(t) { //nolint:paralleltest // see above
		t.Run(m.Name, func(t *testing.T) {
			if err := mutants.Compile(t.Context(), module(t), m); err != nil {
				t.Error(err)
			}
		})
	}
}

// result is what became of a mutant, and a line of the file.
type result struct {
	Name    string   `json:"name"`
	Found   []string `json:"found"` // fields of the verdict
	Seconds float64  `json:"seconds"`
	Rounds  int      `json:"rounds"`
	Seed    uint64   `json:"seed"`
	Example string   `json:"example,omitempty"` // the first of what was blamed
	Problem string   `json:"problem,omitempty"` // why there is no verdict
}

func TestMutantsAreFound(t *testing.T) { //nolint:paralleltest // a run uses all cores
	if !*hunt {
		t.Skip("LOUD SKIP: takes hours: pass -mutants")
	}
	done, err := read(*results)
	if err != nil {
		t.Fatal(err)
	}
	wanted := slices.DeleteFunc(chosen(t), func(m mutants.Mutant) bool { // those that were not found are looked for again
		return m.Lacks != "" && !*lacking || len(done[m.Name].Found) > 0
	})
	for b := range programs(t, wanted) {
		m := b.mutant
		r, err := result{}, b.err
		if err == nil {
			r, err = run(t, b)
		}
		if err == nil && r.Problem == "" {
			err = remember(*results, r)
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Found) == 0 && m.Lacks == "" {
			t.Errorf("%s was not found in %d rounds of seed %d: %s %s", m.Name, r.Rounds, r.Seed, m.What, r.Problem)
		}
	}
}

// built is the program of a mutant, in a directory of its own.
type built struct {
	mutant mutants.Mutant
	dir    string
	err    error
}

func (b built) program() string { return filepath.Join(b.dir, "outbox-relay") }

// programs builds mutants, the next one while one is looked for: a run mostly waits.
func programs(t *testing.T, list []mutants.Mutant) <-chan built {
	t.Helper()
	ctx, from, all := t.Context(), module(t), make(chan built)
	dir := t.TempDir()
	go func() {
		defer close(all)
		for _, m := range list {
			b := built{mutant: m, dir: filepath.Join(dir, m.Name)}
			if b.err = os.Mkdir(b.dir, 0o700); b.err == nil {
				b.err = mutants.Build(ctx, from, m, b.program())
			}
			select {
			case all <- b:
			case <-ctx.Done():
				return
			}
		}
	}()
	return all
}

// run lets the torture look for a mutant.
func run(t *testing.T, b built) (_ result, err error) {
	t.Helper()
	ctx, m, dir := t.Context(), b.mutant, b.dir
	defer func() { err = errors.Join(err, os.Remove(b.program())) }() // it is large
	seed, _ := m.Seed(draw)
	begun := time.Now()
	cmd := exec.CommandContext(ctx, b.program(), "torture", "--json", "--until-broken", "--seed", strconv.FormatUint(seed, 10),
		"--minutes", strconv.Itoa(*minutes), "--round-seconds", strconv.Itoa(seconds), "--rate", strconv.Itoa(rate), "--broker-count", strconv.Itoa(brokers), "--logs", dir, "--embedded="+strconv.FormatBool(*embedded))
	// A mutant may keep the run from ending. An interrupt lets it stop its servers.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	var said, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &log
	ended := cmd.Run()
	r := result{Name: m.Name, Seed: seed, Seconds: time.Since(begun).Seconds()}
	var report struct {
		Rounds   int      `json:"rounds"`
		Examples []string `json:"examples"`
	}
	counts := map[string]any{}
	if problem := errors.Join(json.Unmarshal(said.Bytes(), &report), json.Unmarshal(said.Bytes(), &counts)); problem != nil {
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		r.Problem = fmt.Sprintf("%v: %s", ended, lines[len(lines)-1])
		t.Logf("%s: %s", m.Name, r.Problem)
		return r, nil
	}
	r.Rounds = report.Rounds
	for _, check := range checks {
		if n, ok := counts[check].(float64); ok && n > 0 {
			r.Found = append(r.Found, check)
		}
	}
	if len(report.Examples) > 0 {
		r.Example = report.Examples[0]
	}
	t.Logf("%s: %v after %.0f s, %d rounds of seed %d", m.Name, r.Found, r.Seconds, r.Rounds, seed)
	return r, nil
}

func read(name string) (map[string]result, error) {
	done := map[string]result{}
	file, err := os.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return done, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r result
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("results %s: %w", name, err)
		}
		if len(done[r.Name].Found) == 0 {
			done[r.Name] = r
		}
	}
	return done, lines.Err()
}

func remember(name string, r result) (err error) {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	_, err = file.Write(append(line, '\n'))
	return err
}
