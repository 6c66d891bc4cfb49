package explore_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/explore"
)

// jugs holds what two jugs, of 3 and 5 litres, contain.
type jugs struct{ small, large int }

func model(check func(jugs) error) explore.Model[jugs] {
	return explore.Model[jugs]{
		Steps: func(at jugs, to func(jugs, string, ...any)) {
			to(jugs{3, at.large}, "fill %d", 3)
			to(jugs{at.small, 5}, "fill %d", 5)
			to(jugs{0, at.large}, "empty %d", 3)
			to(jugs{at.small, 0}, "empty %d", 5)
			into := min(at.small, 5-at.large)
			to(jugs{at.small - into, at.large + into}, "pour into %d", 5)
			into = min(at.large, 3-at.small)
			to(jugs{at.small + into, at.large - into}, "pour into %d", 3)
		},
		Check: check, StatesMax: 100,
	}
}

// Every reachable state is visited, and no other: 16 of the 24.
func TestEveryStateIsVisitedOnce(t *testing.T) {
	t.Parallel()
	visits := map[jugs]int{}
	result, err := model(func(at jugs) error { visits[at]++; return nil }).Run()
	require.NoError(t, err)
	require.Equal(t, 16, result.States)
	require.Len(t, visits, 16)
	for at, n := range visits {
		require.Equal(t, 1, n, at)
	}
}

// The trace is a shortest one: four litres need six steps.
func TestTheTraceIsTheShortest(t *testing.T) {
	t.Parallel()
	four := errors.New("four litres")
	_, err := model(func(at jugs) error {
		if at.large == 4 {
			return four
		}
		return nil
	}).Run()
	var found *explore.Violation
	require.ErrorAs(t, err, &found)
	require.ErrorIs(t, err, four)
	require.Equal(t, []string{"fill 5", "pour into 3", "empty 3", "pour into 3", "fill 5", "pour into 3"}, found.Trace)
}

// A model that is not explored as a whole is an error, and so is a last state that must not be one.
func TestBoundsAndEnds(t *testing.T) {
	t.Parallel()
	large := model(func(jugs) error { return nil })
	large.StatesMax = 10
	_, err := large.Run()
	require.ErrorIs(t, err, explore.ErrTooLarge)

	stuck := errors.New("stuck")
	_, err = explore.Model[int]{
		Steps: func(at int, to func(int, string, ...any)) { to(min(at+1, 3), "up") },
		Check: func(int) error { return nil }, StatesMax: 10,
		End: func(int) error { return stuck },
	}.Run()
	require.ErrorIs(t, err, stuck)
}
