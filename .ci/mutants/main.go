// Command mutants breaks the code on purpose, one patch of this directory at a time, and lets package torture look
// for it. It prints a table in Markdown: what was broken, what the judge said, and after how long.
//
//	go run ./.ci/mutants [NAME…]
//
// The patches are applied by the compiler's overlay: the tree stays as it is. A run has faults for 20 seconds and
// needs about a minute; other seeds are tried up to four times.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/integration/torture"
)

const (
	faultsFor = 20 * time.Second
	runMax    = 5 * time.Minute
	runFlag   = "-run-seed" // this program is also the one that is broken
	directory = ".ci/mutants"
)

// seeds draw, in turn: by position; at least once with conflicts and messages for later; three shards; dead letters, retention and keys that are held; at least once.
var seeds = []int{43, 9, 28, 142, 13}

func main() {
	log.SetFlags(0)
	var err error
	if len(os.Args) == 3 && os.Args[1] == runFlag {
		err = run(os.Args[2])
	} else {
		err = hunt(os.Args[1:])
	}
	if err != nil {
		log.Fatal(err)
	}
}

// run is one torture; its report goes to stdout.
func run(seed string) error {
	n, err := strconv.ParseUint(seed, 10, 64)
	if err != nil {
		return err
	}
	report, err := torture.Run(context.Background(), torture.Options{Seed: n, Duration: faultsFor, Embedded: true, Log: os.Stderr})
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(report)
}

func hunt(names []string) error {
	patches, err := filepath.Glob(filepath.Join(directory, "*.patch"))
	if err != nil || len(patches) == 0 {
		return errors.Join(err, errors.New("there are no patches: run it in the root of the module"))
	}
	scratch, err := os.MkdirTemp("", "effectonce-mutants-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	if len(names) > 0 {
		patches = slices.DeleteFunc(patches, func(patch string) bool { return !slices.Contains(names, nameOf(patch)) })
	}
	rows := make([]string, len(patches))
	var missed atomic.Int64
	var group errgroup.Group
	group.SetLimit(2) // a run waits more than it works
	for i, patch := range patches {
		group.Go(func() error {
			row, found, err := try(scratch, nameOf(patch), patch)
			if err != nil {
				return fmt.Errorf("%s: %w", nameOf(patch), err)
			}
			if log.Print(row); !found {
				missed.Add(1)
			}
			rows[i] = row
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	fmt.Println("| Mutant | What is broken | Found by | Seed | Seconds |\n|---|---|---|---|---|")
	fmt.Println(strings.Join(rows, "\n"))
	log.Printf("%d of %d mutants were found", int64(len(rows))-missed.Load(), len(rows))
	if missed.Load() > 0 {
		return errors.New("what is not found is a hole in what package torture draws, or judges")
	}
	return nil
}

func nameOf(patch string) string { return strings.TrimSuffix(filepath.Base(patch), ".patch") }

// try returns the row of one mutant.
func try(scratch, name, patch string) (row string, found bool, err error) {
	text, err := os.ReadFile(patch)
	if err != nil {
		return "", false, err
	}
	what, _, _ := strings.Cut(string(text), "\n")
	overlay, err := mutate(filepath.Join(scratch, name), patch, string(text))
	if err != nil {
		return "", false, err
	}
	program := filepath.Join(scratch, name, "mutant")
	if output, err := exec.Command("go", "build", "-overlay", overlay, "-o", program, "./"+directory).CombinedOutput(); err != nil {
		return "", false, fmt.Errorf("build: %w: %s", err, output)
	}
	defer func() { _ = os.Remove(program) }()
	begun := time.Now()
	for _, seed := range seeds {
		problem, err := problemOf(program, seed)
		if err != nil {
			return "", false, err
		}
		if problem != "" {
			return fmt.Sprintf("| %s | %s | %s | %d | %.0f |", name, what, problem, seed, time.Since(begun).Seconds()), true, nil
		}
	}
	return fmt.Sprintf("| %s | %s | **nothing** | | %.0f |", name, what, time.Since(begun).Seconds()), false, nil
}

// mutate writes the broken file, and the overlay that puts it in the place of the one in the tree.
func mutate(scratch, patch, text string) (overlay string, err error) {
	match := regexp.MustCompile(`(?m)^\+\+\+ b/(\S+)$`).FindStringSubmatch(text)
	if match == nil {
		return "", errors.New("the patch names no file")
	}
	original, err := filepath.Abs(match[1])
	if err != nil {
		return "", err
	}
	broken := filepath.Join(scratch, match[1])
	content, err := os.ReadFile(original)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(broken), 0o700)
	}
	if err == nil {
		err = os.WriteFile(broken, content, 0o600)
	}
	if err == nil {
		patch, err = filepath.Abs(patch)
	}
	if err != nil {
		return "", err
	}
	apply := exec.Command("git", "apply", patch)
	apply.Dir = scratch
	apply.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(scratch))
	if output, err := apply.CombinedOutput(); err != nil {
		return "", fmt.Errorf("apply the patch: %w: %s", err, output)
	}
	list, err := json.Marshal(map[string]map[string]string{"Replace": {original: broken}})
	if err != nil {
		return "", err
	}
	overlay = filepath.Join(scratch, "overlay.json")
	return overlay, os.WriteFile(overlay, list, 0o600)
}

// problemOf runs a program with a seed, and returns the first problem; empty: the promise held.
func problemOf(program string, seed int) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), runMax)
	defer cancel()
	command := exec.CommandContext(ctx, program, runFlag, strconv.Itoa(seed))
	output, err := command.Output()
	if ctx.Err() != nil {
		return "the run did not end", nil
	}
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) && len(exit.Stderr) > 0 {
			err = fmt.Errorf("%w: %s", err, exit.Stderr[max(0, len(exit.Stderr)-1000):])
		}
		return "", err
	}
	var report torture.Report
	if err := json.Unmarshal(output, &report); err != nil {
		return "", err
	}
	if report.Held() {
		return "", nil
	}
	text, _, _ := strings.Cut(regexp.MustCompile(`^\d+ (times: )?`).ReplaceAllString(report.Problems[0], ""), ": ")
	return fmt.Sprintf("%s (lost %d, doubled %d, out of order %d, stuck %d)", text, report.Lost, report.Doubled, report.OutOfOrder, report.Stuck), nil
}
