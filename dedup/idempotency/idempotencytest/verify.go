package idempotencytest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/effectonce/effectonce/internal/effects"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Verify fails the test if the effects of the request after some schedule of repetitions and faults
// differ from those of a single execution, or if its answers differ. It takes some seconds: one
// run, in a database of its own, for each point at which the work can be interrupted.
func Verify(t *testing.T, start Start, o Options) {
	t.Helper()
	problems, err := verify(t, start, o)
	if err != nil {
		t.Fatal("idempotencytest.Verify:", err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}
}

var errNoEffect = errors.New("the request changed nothing in any table, and Options.Effects lists nothing: there is no effect to verify; does Options.Setup make the tables, and does Options.Ignore leave a column?")

func verify(t *testing.T, start Start, o Options) (problems []string, err error) {
	t.Helper()
	var passed []string
	clean := execute(t, start, o, schedule{name: "the clean run", send: func(ctx context.Context, r *run) (err error) {
		passed, err = r.clean(ctx)
		return err
	}})
	if clean.err == nil && !clean.refused && effects.Compare(clean.before, clean.after) == "" {
		clean.err = errNoEffect
	}
	if clean.err != nil {
		return nil, fmt.Errorf("the clean run: %w", clean.err)
	}
	for _, s := range schedules(passed) {
		found := execute(t, start, o, s)
		switch difference := found.compare(clean); {
		case found.err != nil:
			problems = append(problems, fmt.Sprintf("%s: %v", s.name, found.err))
		case difference != "":
			problems = append(problems, fmt.Sprintf("%s: %s\n%s", s.name, difference, s.hint))
			if s.hint == hintRandom {
				return problems, nil // this also causes all other differences
			}
		}
	}
	return problems, nil
}

// result of one run.
type result struct {
	before, after effects.Effects
	inDoubt       bool
	refused       bool
	err           error
}

// compare describes how the effects differ. If the outcome is indeterminate, effects may be
// missing, but none may be there twice.
func (r result) compare(clean result) string {
	if r.inDoubt {
		return effects.Twice(clean.after, r.after)
	}
	return effects.Compare(clean.after, r.after)
}

// runMax bounds one run.
const runMax = time.Minute

// execute runs a schedule in a database of its own, and then retries until there is an answer.
func execute(t *testing.T, start Start, o Options, s schedule) (found result) {
	t.Helper()
	t.Run(strings.ReplaceAll(s.name, " ", "_"), func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), runMax)
		defer cancel()
		r := &run{pool: pgtest.Pool(t), start: start}
		found.err = func() (err error) {
			if err := o.prepare(ctx, r); err != nil {
				return err
			}
			if found.before, err = o.read(ctx, r); err != nil {
				return err
			}
			if err := r.restart(); err != nil {
				return err
			}
			if err := s.send(ctx, r); err != nil {
				return err
			}
			if err := r.settle(ctx); err != nil {
				return err
			}
			found.inDoubt, found.refused = r.inDoubt, r.answer != nil && r.answer.Status >= http.StatusBadRequest
			found.after, err = o.read(ctx, r)
			return err
		}()
	})
	return found
}

func (o Options) prepare(ctx context.Context, r *run) error {
	if o.Setup != "" {
		if _, err := r.pool.Exec(ctx, o.Setup); err != nil {
			return fmt.Errorf("Options.Setup: %w", err)
		}
	}
	if o.Prepare != nil {
		if err := o.Prepare(ctx, r.pool); err != nil {
			return fmt.Errorf("Options.Prepare: %w", err)
		}
	}
	return nil
}

// read reads the tables and the list of Options.Effects.
func (o Options) read(ctx context.Context, r *run) (effects.Effects, error) {
	found, err := effects.Read(ctx, r.pool, o.Ignore)
	if err != nil || o.Effects == nil {
		return found, err
	}
	listed, err := o.Effects(ctx, r.pool)
	if err != nil {
		return nil, fmt.Errorf("Options.Effects: %w", err)
	}
	const name = "Options.Effects"
	for _, effect := range listed {
		if found[name] == nil {
			found[name] = map[string]int{}
		}
		found[name][effect]++
	}
	return found, nil
}
