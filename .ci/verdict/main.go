// Verdict reads what "go test -json" wrote, reruns included, and decides.
//
//	verdict judge FILE...       prints failures and flaky tests; exit status 1 if there is a failure
//	verdict -unfinished judge   the same of a run that was ended: what failed and could not run again is listed, no failure
//	verdict long FILE...        prints the long tests that were skipped: a package and a regular expression a line
//	verdict quarantine FILE     checks the list of tests that may fail, which judge reads with -quarantine FILE
//
// A test that failed and then passed, alone, is flaky. These are failures however a rerun ends: a
// data race, a panic or a limit that ended the package, a build that failed, goroutines that remain,
// and a test that says INVARIANT, which is a lost, doubled or disordered effect.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

func main() {
	unfinished := flag.Bool("unfinished", false, "the run was ended: tests that could not run again are no failures")
	list := flag.String("quarantine", "", "the file that lists tests which may fail")
	flag.Parse()
	if flag.NArg() < 2 {
		fmt.Fprintln(os.Stderr, "usage: verdict [-unfinished] [-quarantine FILE] judge|long|quarantine FILE...")
		os.Exit(2)
	}
	good, err := run(flag.Arg(0), flag.Args()[1:], *list, *unfinished)
	if err != nil {
		fmt.Fprintln(os.Stderr, "verdict:", err)
		os.Exit(2)
	}
	if !good {
		os.Exit(1)
	}
}

func run(what string, files []string, list string, unfinished bool) (good bool, err error) {
	if what == "quarantine" {
		_, err = readQuarantine(files[0], time.Now())
		return err == nil, err
	}
	r, err := readAll(files)
	if err != nil {
		return false, err
	}
	if list != "" {
		if r.quarantined, err = readQuarantine(list, time.Now()); err != nil {
			return false, err
		}
	}
	switch what {
	case "long":
		r.long(os.Stdout)
		return true, nil
	case "judge":
		return r.judge(os.Stdout, unfinished), nil
	}
	return false, errors.New("want judge, long or quarantine")
}

// event is a line of "go test -json". Its Output is in pieces: a line may be several events.
type event struct {
	Action, Package, Test, Output string
}

// test is what is known of a test, or of a package, whose name of a test is empty.
type test struct {
	pkg, name string
	fails     int
	last      string // of pass, fail and skip
	output    string // of the first run that failed; until then of the last run
}

// root is the name of the test that a test is part of, which is what a rerun repeats.
func (t *test) root() string {
	root, _, _ := strings.Cut(t.name, "/")
	return root
}

type results struct {
	order  []*test
	known  map[[2]string]*test
	panics map[string]bool // packages that said so
	races  []*test         // which the report of a race was attributed to: not always the guilty one
	built  []string        // what the compiler said about builds that failed

	quarantined quarantined
}

func readAll(files []string) (*results, error) {
	r := &results{known: map[[2]string]*test{}, panics: map[string]bool{}}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		err = r.read(f)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return r, nil
}

func (r *results) read(from io.Reader) error {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		// The last line of a run that was killed is cut off.
		if json.Unmarshal(line, &e) == nil {
			r.add(e)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *results) add(e event) {
	if e.Action == "build-output" {
		r.built = append(r.built, e.Output)
		return
	}
	if e.Package == "" {
		return
	}
	key := [2]string{e.Package, e.Test}
	t := r.known[key]
	if t == nil {
		t = &test{pkg: e.Package, name: e.Test}
		r.known[key] = t
		r.order = append(r.order, t)
	}
	switch e.Action {
	case "run", "start":
		if t.fails == 0 {
			t.output = ""
		}
	case "output":
		if t.fails == 0 {
			t.output += e.Output
		}
		if strings.Contains(e.Output, "WARNING: DATA RACE") {
			r.races = append(r.races, t)
		}
		if strings.HasPrefix(e.Output, "panic: ") || strings.HasPrefix(e.Output, "fatal error: ") {
			r.panics[e.Package] = true
		}
	case "fail":
		t.fails++
		t.last = "fail"
	case "pass", "skip":
		t.last = e.Action
	}
}

// part is a test, with what failed below it, or a package.
type part struct {
	*test
	failed []*test // itself and tests below it
}

// parts are what is judged: tests with all that is below them, and packages.
func (r *results) parts() (all []*part) {
	roots := map[[2]string]*part{}
	for _, t := range r.order {
		key := [2]string{t.pkg, t.root()}
		p := roots[key]
		if p == nil {
			p = &part{test: r.known[key]}
			if p.test == nil { // cut off
				p.test = t
			}
			roots[key] = p
			all = append(all, p)
		}
		if t.fails > 0 {
			p.failed = append(p.failed, t)
		}
	}
	return all
}

// certain says why a rerun of what failed proves nothing; empty: it does.
func (r *results) certain(p *part) string {
	for _, t := range p.failed {
		switch {
		case slices.Contains(r.races, t):
			return "data race"
		case strings.Contains(t.output, "INVARIANT"):
			return "lost, doubled or disordered effect"
		case t.name == leak:
			return "goroutines remain"
		case r.panics[t.pkg]:
			return "a panic or a limit ended the package"
		}
	}
	return ""
}

// leak is the name under which internal/pgtest reports goroutines that remain.
const leak = "TestNoGoroutineRemains"

// judge prints what happened and reports whether the change may land.
func (r *results) judge(to io.Writer, unfinished bool) bool {
	var ran, failed, flaky, open, excused int
	say := func(n *int, p *part, what string) {
		*n++
		fmt.Fprintf(to, "\n%s\n%s", what, p.excerpt())
	}
	parts := r.parts()
	culprits := map[string]bool{} // packages with a test that failed
	for _, p := range parts {
		if p.name != "" && len(p.failed) > 0 {
			culprits[p.pkg] = true
		}
	}
	for _, p := range parts {
		if p.name != "" && (p.last == "pass" || p.last == "fail") {
			ran++
		}
		name := strings.TrimRight(p.pkg+" "+p.name, " ")
		reason := r.certain(p)
		switch {
		case len(p.failed) == 0:
		case reason != "" && p.name != "":
			say(&failed, p, "FAILED "+name+": "+reason)
		case p.name == "" && culprits[p.pkg]: // its tests are judged
		case p.name == "":
			say(&failed, p, "FAILED "+name+": a build, or what stands around the tests; no test failed. "+reason)
		case p.last == "pass":
			say(&flaky, p, fmt.Sprintf("FLAKY %s: failed %d times, then passed alone; the first time:", name, p.fails))
		case r.quarantined[[2]string{p.pkg, p.name}] != "":
			say(&excused, p, "QUARANTINED "+name+": "+r.quarantined[[2]string{p.pkg, p.name}])
		case unfinished && p.fails < 3:
			say(&open, p, "OPEN "+name+": failed, and the time was over before it ran again")
		case p.fails < 3:
			say(&failed, p, "FAILED "+name+": it did not run again, because too many failed, or one for certain")
		default:
			say(&failed, p, fmt.Sprintf("FAILED %s: %d times", name, p.fails))
		}
	}
	for _, t := range r.races {
		if t.fails == 0 {
			say(&failed, &part{test: t, failed: []*test{t}}, "FAILED "+t.pkg+" "+t.name+": a data race was reported beside this test")
		}
	}
	if len(r.built) > 0 {
		fmt.Fprintf(to, "\nthe compiler:\n%s", strings.Join(r.built, ""))
	}
	fmt.Fprintf(to, "\n%d tests ran: %d failures, %d flaky, %d in quarantine, %d open\n", ran, failed, flaky, excused, open)
	return failed == 0
}

// excerpt is the beginning and the end of what the tests said that failed, in their first run that
// did.
func (p *part) excerpt() string {
	const head, tail, width = 40, 60, 2000
	var lines []string
	for _, t := range p.failed {
		lines = append(lines, strings.SplitAfter(strings.TrimSuffix(t.output, "\n"), "\n")...)
	}
	if len(lines) > head+tail {
		cut := fmt.Sprintf("[%d lines]\n", len(lines)-head-tail)
		lines = slices.Concat(lines[:head], []string{cut}, lines[len(lines)-tail:])
	}
	var b strings.Builder
	for _, line := range lines {
		line = strings.TrimSuffix(line, "\n")
		if len(line) > width {
			line = strings.ToValidUTF8(line[:width], "") + "…"
		}
		fmt.Fprintf(&b, "    %s\n", line)
	}
	return b.String()
}

// long lists the packages with long tests that were skipped, in the order in which they were met.
func (r *results) long(to io.Writer) {
	var packages []string
	names := map[string][]string{}
	for _, t := range r.order {
		if t.last != "skip" || !strings.Contains(t.output, "LONG TEST") {
			continue
		}
		if names[t.pkg] == nil {
			packages = append(packages, t.pkg)
		}
		if !slices.Contains(names[t.pkg], t.root()) {
			names[t.pkg] = append(names[t.pkg], t.root())
		}
	}
	for _, p := range packages {
		fmt.Fprintf(to, "%s ^(%s)$\n", p, strings.Join(names[p], "|"))
	}
}
