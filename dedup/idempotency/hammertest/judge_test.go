package hammertest_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// answer is what a client got.
type answer struct {
	At        time.Duration // since the start
	Place     int
	Body      string // of the request
	Status    int    // 0: none
	Kept      bool   // an outcome, which every copy has to get
	Undecided bool   // a person has to decide
	Text      string
}

// over reports whether another try is answered the same.
func (a answer) over() bool {
	return a.Kept || a.Undecided || a.Status == http.StatusUnprocessableEntity
}

// history is what is known of a key from outside.
type history struct {
	kind, key string

	answers []answer
	ran     []string // the outcomes that its handler came to; not each is stored, since servers die
	calm    bool     // nothing was killed, frozen or crashed between the first request and the first outcome
}

// effect is a row of the ledger.
type effect struct{ Key, Step, Body, Exec string }

// verdict says what is wrong with a key. charges is how often the bank charged for it, state what
// is stored of it.
func (h *history) verdict(effects []effect, charges int, state string) []string {
	wrong := map[string]bool{}
	when := func(is bool, text string) {
		if is {
			wrong[text] = true
		}
	}
	outcome, undecided, mismatched, want := answer{}, false, map[string]bool{}, 0
	for _, a := range h.answers {
		undecided = undecided || a.Undecided
		switch {
		case a.Status == http.StatusUnprocessableEntity:
			mismatched[a.Body] = true
		case a.Kept && outcome.Status == 0:
			outcome = a
		case a.Kept:
			when(a.Status != outcome.Status || a.Text != outcome.Text, "copies were answered differently")
			when(a.Body != outcome.Body, "two bodies got the outcome")
		}
	}
	if outcome.Status >= 200 && outcome.Status < 300 {
		want = 1
	}
	by := map[string]int{}
	for _, e := range effects {
		by[e.Step]++
		when(by[e.Step] > 1, "an effect twice")
		when(mismatched[e.Body], "an effect of a body that was a mismatch")
		when(e.Step == "order" && want == 1 && h.kind != kindHook && "exec "+e.Exec != outcome.Text, "the effect is not of the execution that is answered")
	}
	answered := outcome.Status != 0
	when(len(mismatched) > 1, "both bodies were a mismatch")
	when(!answered && (!undecided || h.kind != kindDoubt && h.kind != kindSingle), "it was never answered")
	when(answered && state != "finished" || !answered && state != "indeterminate", "what is stored is "+state)
	when(answered && undecided && h.calm, "it was in doubt, and was executed again")
	when(by["order"] > want, "an effect, and no client was told so")
	when(by["order"] < want, "no effect, and a client was told so")
	when(charges > 1, "it was charged twice")
	when(answered && (h.kind == kindFlow || h.kind == kindSingle) && charges != want, "the charge does not fit the answer")
	// A server that dies takes the outcome with it that its handler came to, and the next run may
	// come to another. Otherwise the first one counts: what was declined is not tried again by a
	// copy.
	when(h.calm && len(h.ran) > 1, "its handler came to another outcome, and nothing was disturbed")
	return slices.Sorted(maps.Keys(wrong))
}

func (h *history) String() string {
	lines := []string{fmt.Sprintf("%s %s, undisturbed: %v", h.kind, h.key, h.calm)}
	for _, r := range h.ran {
		lines = append(lines, "  ran      "+r)
	}
	for _, a := range h.answers {
		lines = append(lines, fmt.Sprintf("  answered %+v", a))
	}
	return strings.Join(lines, "\n")
}

// shownMax is how many histories are printed.
const shownMax = 3

// judge compares what clients and bank know with the tables, which it reads by statements of its
// own.
func (h *hammer) judge(t *testing.T) {
	t.Helper()
	conn := pgtest.Connect(t, h.cluster.URL)
	rows, err := conn.Query(t.Context(), `SELECT key, step, body, exec FROM ledger`)
	require.NoError(t, err)
	ledger, err := pgx.CollectRows(rows, pgx.RowToStructByPos[effect])
	require.NoError(t, err)
	effects := map[string][]effect{}
	for _, e := range ledger {
		effects[e.Key] = append(effects[e.Key], e)
	}
	states := map[string]string{}
	rows, err = conn.Query(t.Context(), `SELECT key, CASE WHEN state = 'finished' AND finished_at IS NULL THEN 'unanswered' ELSE state END FROM effectonce.idempotency_keys`)
	require.NoError(t, err)
	var key, state string
	_, err = pgx.ForEachRow(rows, []any{&key, &state}, func() error { states[key] = state; return nil })
	require.NoError(t, err)
	calm, statuses, wrongs, shown := map[string]int{}, map[int]int{}, map[string]int{}, 0
	for _, k := range h.keys {
		if k.calm {
			calm[k.kind]++
		}
		for _, a := range k.answers {
			statuses[a.Status]++
		}
		wrong := k.verdict(effects[k.key], h.bank.charged(k.key), states[k.key])
		for _, text := range wrong {
			wrongs[k.kind+": "+text]++
		}
		if len(wrong) > 0 && shown < shownMax {
			shown++
			t.Errorf("seed %d: %s\n%v\n  effects  %+v", h.seed, strings.Join(wrong, "; "), k, effects[k.key])
		}
	}
	t.Logf("seed %d: %d keys, %d kills, %d freezes, %d crashes of PostgreSQL; answers by status %v; undisturbed keys %v",
		h.seed, len(h.keys), h.kills, h.freezes, h.crashes, statuses, calm)
	require.Empty(t, wrongs)
	require.Len(t, calm, len(kinds()), "want undisturbed keys of each kind: otherwise too little was proved")
}
