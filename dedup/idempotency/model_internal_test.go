package idempotency

import (
	"errors"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/explore"
)

var exploreLarge = flag.String("explore", "", `"large": the models with their larger bounds`)

// The model of the lock of a key. Workers are requests, and the completer, which looks for keys
// that no worker holds. A flow has two phases; the call of the first must not be repeated. Each
// statement is one step, and a worker may freeze or end between any two. The conditions of
// takeFlowSQL, callingSQL, advance_key, finish_key, unlockSQL, undecidedSQL and reapSQL are written
// out. The window of a finished key is longer than any freeze.
const (
	lockWorkers = 3
	lockPhases  = 2
)

type lockBounds struct {
	workers            int
	call               bool  // phase 0 makes a call that must not be repeated
	ends, fails, takes uint8 // takes: takeovers
	expiries, reaps    uint8
	statesMax          int
}

// lockBreak is a planted mistake.
type lockBreak struct {
	advancesUntokened bool // a phase does not compare the token
	finishesUntokened bool // a late holder stores its outcome
	phaseAgain        bool // a phase that is done may be done again
	takesLocked       bool // a lock is taken before it expired
	tokenKept         bool // a takeover keeps the token
	takesUnread       bool // a takeover does not compare what was read
	callsUnrecorded   bool // a call is made before it is recorded
	callIgnored       bool // a recorded call is made again by the next holder
	unlocksUntokened  bool // a late holder withdraws the call of another one
	reapsUnfinished   bool // the reaper forgets unfinished keys
	effectApart       bool // the effect of a phase is committed before its recovery point
}

const (
	lockAbsent = iota
	lockRunning
	lockFinished
	lockIndeterminate
)

const (
	lockIdle    = iota
	lockLooked  // it has read the row
	lockHolds   // it will do the next phase
	lockCalling // its call is recorded
	lockCalled  // its call was made
	lockWrote   // only with effectApart
	lockOver    // it got an outcome
)

type lockWorker struct {
	does, token, phases, answer uint8
	calling                     bool
}

type lockState struct {
	state, token, phases, answer uint8
	locked, calling              bool
	workers                      [lockWorkers]lockWorker
	effects                      [lockPhases]uint8
	calls                        uint8

	ends, fails, takes, expiries, reaps uint8
}

func (s *lockState) mine(w lockWorker, unchecked bool) bool {
	return s.state == lockRunning && (s.token == w.token || unchecked)
}

func (b lockBounds) claimSteps(s lockState, i int, broken lockBreak, to func(lockState, string, ...any)) {
	n := s
	w := &n.workers[i]
	switch w.does {
	case lockIdle:
		if s.state == lockAbsent {
			n.state, n.token, n.locked = lockRunning, 1, true
			w.does, w.token = lockHolds, 1
			to(n, "worker %d: claims the key", i)
			return
		}
		*w = lockWorker{does: lockLooked, token: s.token, phases: s.phases, calling: s.calling}
		switch {
		case s.state == lockFinished:
			*w = lockWorker{does: lockOver, answer: s.answer}
			to(n, "worker %d: gets the outcome %d", i, s.answer)
		case s.state == lockRunning && (!s.locked || broken.takesLocked):
			to(n, "worker %d: reads the key, token %d, phases %d", i, s.token, s.phases)
		}
	case lockLooked:
		took := s.mine(*w, broken.takesUnread) && (!s.locked || broken.takesLocked) && (w.phases == s.phases && w.calling == s.calling || broken.takesUnread)
		if !took {
			*w = lockWorker{}
			to(n, "worker %d: another one was faster", i)
			return
		}
		if s.takes == b.takes {
			return
		}
		n.takes++
		n.locked = true
		if !broken.tokenKept {
			n.token++
		}
		w.does, w.token = lockHolds, n.token
		if w.calling && !broken.callIgnored { // another statement marks the key
			w.does = lockCalled
		}
		to(n, "worker %d: takes the key over, token %d, phases %d", i, n.token, w.phases)
	}
}

func (b lockBounds) callSteps(s lockState, i int, broken lockBreak, to func(lockState, string, ...any)) {
	n := s
	w := &n.workers[i]
	switch {
	case w.does == lockHolds && w.phases == 0 && b.call:
		if s.fails < b.fails {
			n := s
			n.fails++
			if s.mine(*w, broken.unlocksUntokened) {
				n.locked, n.calling = false, s.calling && !broken.unlocksUntokened
			}
			n.workers[i] = lockWorker{}
			to(n, "worker %d: fails before its call and releases the key", i)
		}
		switch {
		case broken.callsUnrecorded:
			n.calls++
			w.does = lockCalled
			to(n, "worker %d: calls", i)
		case s.mine(*w, false) && (!s.calling || broken.callIgnored) && s.phases == 0:
			n.calling, w.does = true, lockCalling
			to(n, "worker %d: records its call", i)
		default:
			*w = lockWorker{}
			to(n, "worker %d: lost the key", i)
		}
	case w.does == lockCalling:
		n.calls++
		w.does = lockCalled
		to(n, "worker %d: calls", i)
		if s.fails < b.fails { // the call was not made: unlockSQL
			n := s
			n.fails++
			if s.mine(*w, broken.unlocksUntokened) {
				n.locked, n.calling = false, false
			}
			n.workers[i] = lockWorker{}
			to(n, "worker %d: cannot call, withdraws it and releases the key", i)
		}
	case w.does == lockCalled && w.calling:
		if s.mine(*w, false) {
			n.state, n.locked = lockIndeterminate, false
		}
		*w = lockWorker{}
		to(n, "worker %d: marks the key for a person: the last holder ended during its call", i)
	}
}

// writeSteps is the transaction of a phase: its effect and its recovery point.
func (b lockBounds) writeSteps(s lockState, i int, broken lockBreak, to func(lockState, string, ...any)) {
	w := s.workers[i]
	ready := w.does == lockHolds && (w.phases > 0 || !b.call) || w.does == lockCalled && !w.calling || w.does == lockWrote
	if !ready {
		return
	}
	last := w.phases == lockPhases-1
	n := s
	m := &n.workers[i]
	if broken.effectApart && w.does != lockWrote {
		n.effects[w.phases] = min(n.effects[w.phases]+1, 3)
		m.does = lockWrote
		to(n, "worker %d: commits the effect of phase %d", i, w.phases)
		return
	}
	unchecked := broken.advancesUntokened && !last || broken.finishesUntokened && last
	mine := s.mine(w, unchecked) || broken.finishesUntokened && last && s.state == lockFinished
	passed := s.phases > w.phases && !broken.phaseAgain
	if !mine || passed && (!broken.finishesUntokened || !last) {
		*m = lockWorker{}
		to(n, "worker %d: is refused in phase %d (EO003)", i, w.phases)
		return
	}
	if !broken.effectApart {
		n.effects[w.phases] = min(n.effects[w.phases]+1, 3)
	}
	n.phases, n.calling = w.phases+1, false
	if !last {
		m.phases, m.does = w.phases+1, lockHolds
		to(n, "worker %d: commits phase %d", i, w.phases)
	} else {
		n.state, n.locked, n.answer = lockFinished, false, uint8(i+1)
		*m = lockWorker{does: lockOver, answer: n.answer}
		to(n, "worker %d: commits phase %d and finishes", i, w.phases)
	}
	if s.fails < b.fails && w.does == lockHolds {
		n := s
		n.fails++
		if s.mine(w, broken.unlocksUntokened) {
			n.locked = false
		}
		n.workers[i] = lockWorker{}
		to(n, "worker %d: fails in phase %d and releases the key", i, w.phases)
	}
}

func (b lockBounds) otherSteps(s lockState, broken lockBreak, to func(lockState, string, ...any)) {
	for i := range b.workers {
		if does := s.workers[i].does; does != lockIdle && does != lockOver && s.ends < b.ends {
			n := s
			n.ends++
			n.workers[i] = lockWorker{}
			to(n, "worker %d: ends", i)
		}
	}
	if s.locked && s.expiries < b.expiries {
		n := s
		n.expiries++
		n.locked = false
		to(n, "time: the lock expires")
	}
	if s.reaps == b.reaps || s.state == lockAbsent {
		return
	}
	n := s
	n.reaps++
	n.state, n.token, n.phases, n.answer, n.locked, n.calling = lockAbsent, 0, 0, 0, false, false
	switch {
	case s.state == lockFinished:
		for _, w := range s.workers[:b.workers] {
			if w.does != lockIdle && w.does != lockOver {
				return // the window is longer
			}
		}
		// The key is forgotten, and a request begins anew.
		n.effects, n.calls, n.workers = [lockPhases]uint8{}, 0, [lockWorkers]lockWorker{}
		to(n, "reaper: forgets the key")
	case broken.reapsUnfinished:
		to(n, "reaper: forgets the unfinished key")
	}
}

var errLock = errors.New("invariant")

func (b lockBounds) check(s lockState) error {
	for phase, n := range s.effects {
		if n > 1 {
			return fmt.Errorf("%w: phase %d has two effects", errLock, phase)
		}
		if n == 0 && phase < int(s.phases) {
			return fmt.Errorf("%w: phase %d is done without an effect", errLock, phase)
		}
	}
	if s.calls > 1 {
		return fmt.Errorf("%w: a call that must not be repeated was made twice", errLock)
	}
	for i, w := range s.workers[:b.workers] {
		if w.does == lockOver && s.state == lockFinished && w.answer != s.answer {
			return fmt.Errorf("%w: worker %d got the outcome %d, stored is %d", errLock, i, w.answer, s.answer)
		}
	}
	return nil
}

func (b lockBounds) model(broken lockBreak) explore.Model[lockState] {
	return explore.Model[lockState]{
		Steps: func(s lockState, to func(lockState, string, ...any)) {
			for i := range b.workers {
				b.claimSteps(s, i, broken, to)
				b.callSteps(s, i, broken, to)
				b.writeSteps(s, i, broken, to)
			}
			b.otherSteps(s, broken, to)
		},
		Check: b.check,
		End: func(s lockState) error {
			if s.state == lockRunning && s.takes < b.takes && !s.locked {
				return fmt.Errorf("%w: an unfinished key waits forever", errLock)
			}
			return nil
		},
		StatesMax: b.statesMax,
	}
}

// Property: whoever ends, freezes or comes late, each phase of a key commits once, a call that must
// not be repeated is made once, and the first outcome stays.
func TestModelOfLocks(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]bool{"with a call": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := lockBounds{workers: 3, call: call, ends: 1, fails: 1, takes: 3, expiries: 3, reaps: 1, statesMax: 6_000_000}
			if *exploreLarge == "large" {
				b.ends, b.fails, b.takes, b.expiries, b.statesMax = 2, 2, 5, 5, 40_000_000
			}
			begun := time.Now()
			result, err := b.model(lockBreak{}).Run()
			t.Logf("%d states, %d steps, depth %d, %v", result.States, result.Steps, result.Depth, time.Since(begun).Round(time.Millisecond))
			require.NoError(t, err)
		})
	}
}

// Property: the model finds each of the mistakes that its rules are against.
func TestModelOfLocksFindsMistakes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		broken lockBreak
		want   string
	}{
		"a phase does not compare the token":          {lockBreak{advancesUntokened: true, phaseAgain: true}, "two effects"},
		"a phase is done again":                       {lockBreak{phaseAgain: true, tokenKept: true}, "two effects"},
		"a late holder finishes":                      {lockBreak{finishesUntokened: true}, "two effects|outcome"},
		"a lock is taken before it expired":           {lockBreak{takesLocked: true, tokenKept: true, callsUnrecorded: true}, "twice"},
		"a takeover does not compare what it read":    {lockBreak{takesUnread: true, callIgnored: true}, "twice|two effects"},
		"a call is made before it is recorded":        {lockBreak{callsUnrecorded: true}, "twice"},
		"a recorded call is made again":               {lockBreak{callIgnored: true}, "twice"},
		"a late holder withdraws the call of another": {lockBreak{unlocksUntokened: true}, "twice"},
		"the reaper forgets unfinished keys":          {lockBreak{reapsUnfinished: true}, "twice|two effects"},
		"an effect is committed on its own":           {lockBreak{effectApart: true}, "two effects"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := lockBounds{workers: 3, call: !c.broken.phaseAgain, ends: 1, fails: 1, takes: 3, expiries: 3, reaps: 1, statesMax: 6_000_000}
			_, err := b.model(c.broken).Run()
			var found *explore.Violation
			require.ErrorAs(t, err, &found)
			require.Regexp(t, c.want, found.Err.Error())
			t.Log(found)
		})
	}
}
