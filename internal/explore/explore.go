// Package explore visits every state that a small model can reach. Tests use it: a model has a
// protocol's steps, one per SQL transaction, and the invariants that must hold between them.
package explore

import (
	"errors"
	"fmt"
	"strings"
)

// Model is a protocol with bounds. S has the whole state: the database, what each process
// remembers, and what the model counts. A step must not depend on anything else.
type Model[S comparable] struct {
	Start S
	// Steps calls to for each step that is possible in a state. The name, with its arguments as in
	// fmt.Sprintf, describes the step. A step that leads back to the same state does no harm.
	Steps func(at S, to func(next S, name string, args ...any))
	// Check returns what is wrong in a state.
	Check func(at S) error
	// End returns what is wrong with a state in which no step leads on. Nil: any state may be the
	// last.
	End func(at S) error
	// StatesMax bounds the memory. Reaching it is an error: a part of the states is no proof.
	StatesMax int
}

// Result is what an exploration visited.
type Result struct {
	States, Steps int
	Depth         int // length of the longest of the shortest ways
}

// Violation is the first state, by the number of steps, that breaks an invariant.
type Violation struct {
	Err   error
	Trace []string // the shortest way from the start
}

func (v *Violation) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%v, after %d steps:", v.Err, len(v.Trace))
	for i, step := range v.Trace {
		fmt.Fprintf(&text, "\n%4d  %s", i+1, step)
	}
	return text.String()
}

func (v *Violation) Unwrap() error { return v.Err }

// ErrTooLarge is returned when a model has more states than StatesMax.
var ErrTooLarge = errors.New("the model has more states than StatesMax")

// visited is a state, and the state from which it was reached first.
type visited[S comparable] struct {
	state  S
	parent int32
}

// Run visits all states, breadth first. The error is a *Violation with a shortest trace, or
// ErrTooLarge.
func (m Model[S]) Run() (Result, error) {
	seen := map[S]struct{}{m.Start: {}}
	list := []visited[S]{{m.Start, -1}}
	result := Result{States: 1}
	levelEnd := 1
	for i := 0; i < len(list); i++ {
		if i == levelEnd {
			result.Depth++
			levelEnd = len(list)
		}
		at := list[i].state
		if err := m.Check(at); err != nil {
			return result, m.violation(list, i, err)
		}
		ended := true
		m.Steps(at, func(next S, _ string, _ ...any) {
			result.Steps++
			ended = ended && next == at
			if _, known := seen[next]; !known {
				seen[next] = struct{}{}
				list = append(list, visited[S]{next, int32(i)})
			}
		})
		if ended && m.End != nil {
			if err := m.End(at); err != nil {
				return result, m.violation(list, i, err)
			}
		}
		result.States = len(list)
		if len(list) > m.StatesMax {
			return result, fmt.Errorf("%w, %d", ErrTooLarge, m.StatesMax)
		}
	}
	return result, nil
}

// violation names the steps by repeating them.
func (m Model[S]) violation(list []visited[S], last int, err error) *Violation {
	var path []S
	for i := int32(last); i >= 0; i = list[i].parent {
		path = append(path, list[i].state)
	}
	trace := make([]string, 0, len(path))
	for i := len(path) - 1; i > 0; i-- {
		found := ""
		m.Steps(path[i], func(next S, name string, args ...any) {
			if found == "" && next == path[i-1] {
				found = fmt.Sprintf(name, args...)
			}
		})
		trace = append(trace, found)
	}
	return &Violation{err, trace}
}
