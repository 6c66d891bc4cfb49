package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// program is a package that fails in the way that the environment names, or only in its first run.
const program = `package p

import (
	"fmt"
	"os"
	"testing"
	"time"
)

var mode = os.Getenv("MODE")

// first reports whether this is the first run, of those that the test makes.
func first() bool {
	_, err := os.Stat(os.Getenv("RAN"))
	return err != nil
}

func TestMain(m *testing.M) {
	once := first()
	code := m.Run()
	os.WriteFile(os.Getenv("RAN"), nil, 0o600)
	if mode == "leak" && once {
		fmt.Println("after the tests: something remains")
		code = 1
	}
	os.Exit(code)
}

func TestGood(t *testing.T) { t.Log("INVARIANT: in the log of what passes") }

func TestLong(t *testing.T) {
	t.Run("part", func(t *testing.T) { t.Skip("LONG TEST, skipped (time): EFFECTONCE_LONG=1 runs it") })
}

func TestBad(t *testing.T) {
	t.Run("inner", func(t *testing.T) {
		t.Parallel()
		switch {
		case mode == "always", mode == "excused", mode == "once" && first():
			t.Error("the first output")
		case mode == "effect" && first():
			t.Error("INVARIANT: doubled effects")
		case mode == "panic":
			panic("boom")
		case mode == "goroutine":
			go panic("boom")
			select {}
		case mode == "race":
			n, done := 0, make(chan bool)
			go func() { n++; close(done) }()
			n++
			<-done
		case mode == "hang":
			time.Sleep(time.Hour)
		}
	})
}
`

// Property: the decision and the reason are right for each way in which a run fails, with a rerun
// behind it where one would come.
func TestJudge(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), "module p\n\ngo 1.26\n")
	write(t, filepath.Join(dir, "p_test.go"), program)
	for name, c := range map[string]struct {
		runs  int
		lands bool
		want  string
	}{
		"good":      {runs: 1, lands: true, want: "3 tests ran: 0 failures, 0 flaky, 0 in quarantine, 0 open"},
		"once":      {runs: 2, lands: true, want: "FLAKY p TestBad: failed 1 times, then passed alone; the first time:\n    === RUN   TestBad\n"},
		"always":    {runs: 3, want: "FAILED p TestBad: 3 times\n"},
		"excused":   {runs: 3, lands: true, want: "QUARANTINED p TestBad: a cause\n"},
		"effect":    {runs: 2, want: "FAILED p TestBad: lost, doubled or disordered effect\n"},
		"panic":     {runs: 1, want: "FAILED p TestBad: a panic or a limit ended the package\n"},
		"goroutine": {runs: 1, want: "FAILED p: a build, or what stands around the tests; no test failed. a panic or a limit ended the package\n"},
		"race":      {runs: 2, want: "data race"},
		"hang":      {runs: 1, want: "a panic or a limit ended the package\n"},
		"leak":      {runs: 2, want: "FAILED p: a build, or what stands around the tests; no test failed. \n"},
	} {
		t.Run(name, func(t *testing.T) {
			ran := filepath.Join(t.TempDir(), "ran")
			r := &results{known: map[[2]string]*test{}, panics: map[string]bool{}}
			if name == "excused" || name == "effect" {
				r.quarantined = quarantined{{"p", "TestBad"}: "a cause"}
			}
			for range c.runs {
				args := []string{"test", "-json", "-count=1", "-timeout=5s"}
				if name == "race" {
					args = append(args, "-race")
				}
				cmd := exec.Command("go", args...)
				cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOFLAGS=", "MODE="+name, "RAN="+ran)
				out, _ := cmd.Output()
				if err := r.read(strings.NewReader(string(out))); err != nil {
					t.Fatal(err)
				}
			}
			var said strings.Builder
			if lands := r.judge(&said, false); lands != c.lands || !strings.Contains(said.String(), c.want) {
				t.Errorf("lands: %v, want %v, and %q in:\n%s", lands, c.lands, c.want, &said)
			}
			if name == "good" {
				said.Reset()
				if r.long(&said); said.String() != "p ^(TestLong)$\n" {
					t.Errorf("long tests: %s", &said)
				}
			}
		})
	}
}

// Property: a run that was ended fails by what is certain only.
func TestUnfinished(t *testing.T) {
	lines := ""
	for _, e := range []event{
		{Action: "run", Package: "p", Test: "TestA"},
		{Action: "output", Package: "p", Test: "TestA", Output: "no\n"},
		{Action: "fail", Package: "p", Test: "TestA"},
		{Action: "run", Package: "p", Test: "TestB"},
	} {
		line, _ := json.Marshal(e)
		lines += string(line) + "\n"
	}
	lines += `{"Action":"output","Package":"p","Te`
	for unfinished, want := range map[bool]string{true: "OPEN p TestA: failed", false: "FAILED p TestA: it did not run again"} {
		r := &results{known: map[[2]string]*test{}, panics: map[string]bool{}}
		if err := r.read(strings.NewReader(lines)); err != nil {
			t.Fatal(err)
		}
		var said strings.Builder
		if lands := r.judge(&said, unfinished); lands != unfinished || !strings.Contains(said.String(), want) {
			t.Errorf("unfinished %v lands: %v, and says:\n%s", unfinished, lands, &said)
		}
	}
}

// Property: a package that does not compile is a failure, with what the compiler said.
func TestBuildThatFails(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), "module p\n\ngo 1.26\n")
	write(t, filepath.Join(dir, "p_test.go"), "package p\n\nvar x int = \"text\"\n")
	cmd := exec.Command("go", "test", "-json")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOFLAGS=")
	out, _ := cmd.Output()
	r := &results{known: map[[2]string]*test{}, panics: map[string]bool{}}
	if err := r.read(strings.NewReader(string(out))); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	if r.judge(&said, false) || !strings.Contains(said.String(), "cannot use") {
		t.Errorf("says:\n%s", &said)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
