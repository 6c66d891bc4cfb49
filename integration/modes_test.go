package integration_test

import (
	"flag"
	"testing"
)

var long = flag.Bool("long", false, "every combination of settings and more rounds: some 40 minutes on two processors")

// both runs a test at least once and exactly once.
func both(t *testing.T, test func(t *testing.T, exactly bool)) {
	t.Helper()
	either(t, guarantee(false), guarantee(true), test)
}

// either runs a test for both answers to a question, each under its name.
func either(t *testing.T, no, yes string, test func(t *testing.T, answer bool)) {
	t.Helper()
	for name, answer := range map[string]bool{no: false, yes: true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, answer)
		})
	}
}

// part skips every second combination of answers unless -long asks for all of them. Of three answers
// each two still occur together; of two, each one occurs.
func part(t *testing.T, answers ...bool) {
	t.Helper()
	odd := false
	for _, answer := range answers {
		odd = odd != answer
	}
	if odd && !*long {
		t.Skip("LOUD SKIP without -long: every second combination")
	}
}
