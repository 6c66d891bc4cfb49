package relay

import (
	"flag"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/explore"
)

var exploreLarge = flag.String("explore", "", `"large": the models with their larger bounds`)

// explored runs a model, and logs what it visited.
func explored[S comparable](t *testing.T, m explore.Model[S]) {
	t.Helper()
	begun := time.Now()
	result, err := m.Run()
	t.Logf("%d states, %d steps, depth %d, %v", result.States, result.Steps, result.Depth, time.Since(begun).Round(time.Millisecond))
	require.NoError(t, err)
}

// finds requires that a model with a planted mistake is refused, and logs the shortest trace.
func finds[S comparable](t *testing.T, m explore.Model[S], want string) {
	t.Helper()
	_, err := m.Run()
	var found *explore.Violation
	require.ErrorAs(t, err, &found)
	require.Regexp(t, want, found.Err.Error())
	t.Log(found)
}

func (b ticksBounds) model(broken ticksBreak) explore.Model[ticksState] {
	first := modelTick{xmin: 1, xmax: 1}
	return explore.Model[ticksState]{
		Start: ticksState{next: 2, latest: 1, stored: modelCursor{from: first}},
		Steps: func(s ticksState, to func(ticksState, string, ...any)) {
			b.writerSteps(s, broken, to)
			b.readerSteps(s, broken, to)
			b.storeSteps(s, to)
			b.slotSteps(s, broken, to)
		},
		Check: func(s ticksState) error { return s.check() }, StatesMax: b.statesMax,
	}
}

// Property: whatever the order in which writers commit, polls and writes of progress interleave,
// and the relay crashes, no committed row is skipped or truncated unpublished, and the first
// publications of a key are in the order of its commits.
func TestModelOfTicks(t *testing.T) {
	t.Parallel()
	list := map[string]ticksBounds{
		"one writer, pages, a crash": {writers: 1, rowsEach: 2, rows: 2, keys: 1, page: 1, stores: 1, crashes: 1, aborts: 1, statesMax: 1_000_000},
		"two writers":                {writers: 2, rowsEach: 1, rows: 2, keys: 1, page: 2, stores: 1, statesMax: 1_000_000},
		"one writer, slots":          {writers: 1, rowsEach: 2, rows: 2, keys: 1, page: 2, stores: 1, turns: 1, statesMax: 1_000_000},
	}
	if *exploreLarge == "large" {
		list = map[string]ticksBounds{
			"two writers, a crash":  {writers: 2, rowsEach: 1, rows: 2, keys: 1, page: 1, stores: 1, crashes: 1, aborts: 1, statesMax: 20_000_000},
			"two writers, slots":    {writers: 2, rowsEach: 1, rows: 2, keys: 1, page: 2, stores: 2, turns: 1, statesMax: 20_000_000},
			"pages of late commits": {writers: 2, rowsEach: 2, rows: 3, keys: 2, page: 1, stores: 1, statesMax: 20_000_000},
		}
	}
	for name, bounds := range list {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			explored(t, bounds.model(ticksBreak{}))
		})
	}
}

// Property: the model finds each of the mistakes that its rules are against.
func TestModelOfTicksFindsMistakes(t *testing.T) {
	t.Parallel()
	two := ticksBounds{writers: 2, rowsEach: 1, rows: 2, keys: 1, page: 2, stores: 1, statesMax: 1_000_000}
	apart, slots := two, two
	apart.keys = 2
	slots.turns = 1
	for name, c := range map[string]struct {
		bounds ticksBounds
		broken ticksBreak
		want   string
	}{
		"open transactions are not looked up": {two, ticksBreak{lateForgotten: true}, "is skipped"},
		"the last number divides":             {two, ticksBreak{lastAssigned: true}, "is not below xmax"},
		"the next transaction is not read":    {two, ticksBreak{nextUnread: true}, "is not below xmax"},
		"the floor waits for nothing":         {apart, ticksBreak{floorAtOnce: true}, "is behind stored progress|is skipped"},
		"rows in transaction order":           {two, ticksBreak{byTransaction: true}, "before an earlier one of its key"},
		"progress before acknowledgement":     {two, ticksBreak{storesUnacked: true}, "is behind stored progress"},
		"slots: the open list is ignored":     {slots, ticksBreak{truncateXip: true}, "truncated unpublished"},
		"slots: no lock":                      {slots, ticksBreak{truncateUnheld: true}, "truncated unpublished"},
		"a full page ends the batch":          {ticksBounds{writers: 1, rowsEach: 2, rows: 2, keys: 1, page: 1, statesMax: 1_000_000}, ticksBreak{pageForgotten: true}, "is skipped"},
		"writers insert before they lock":     {two, ticksBreak{lockAfterInsert: true}, "before an earlier one of its key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			finds(t, c.bounds.model(c.broken), c.want)
		})
	}
}
