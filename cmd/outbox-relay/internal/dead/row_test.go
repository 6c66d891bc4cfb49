package dead_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/dead"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Each filter selects only what it names, and only heads unless the rows behind them are requested.
func TestFiltersNarrow(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	insertDead(t, conn, "a too_large held", "a behind behind", "b refused held", "- too_large retry", "c behind behind")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET topic = 'payments', relay = 'other' WHERE seq = 3")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET died_at = clock_timestamp() - interval '2 hours' WHERE seq = 4")
	second := uuid.MustParse("00000000-0000-0000-0000-000000000002")
	for name, c := range map[string]struct {
		filter dead.Filter
		want   []int64
	}{
		"none":           {dead.Filter{}, []int64{1, 3, 4, 5}},
		"behind too":     {dead.Filter{Behind: true}, []int64{1, 2, 3, 4, 5}},
		"id":             {dead.Filter{ID: &second, Behind: true}, []int64{2}},
		"key":            {dead.Filter{Key: parked.Key("a")}, []int64{1}},
		"other key":      {dead.Filter{Key: parked.Key{}}, nil},
		"topic":          {dead.Filter{Topic: to("payments")}, []int64{3}},
		"relay":          {dead.Filter{Relay: to("default")}, []int64{1, 4, 5}},
		"reason":         {dead.Filter{Reason: to("too_large")}, []int64{1, 4}},
		"state":          {dead.Filter{State: to("held")}, []int64{1, 3}},
		"older":          {dead.Filter{OlderThan: to(time.Hour)}, []int64{4}},
		"younger":        {dead.Filter{YoungerThan: to(time.Hour)}, []int64{1, 3, 5}},
		"seqs":           {dead.Filter{Seqs: []int64{1, 2}}, []int64{1}},
		"no seqs at all": {dead.Filter{Seqs: []int64{}}, nil},
		"two at once":    {dead.Filter{Reason: to("too_large"), OlderThan: to(time.Hour)}, []int64{4}},
	} {
		found, err := dead.List(t.Context(), conn, schema, c.filter, 100)
		require.NoError(t, err)
		targets, err := dead.Targets(t.Context(), conn, schema, c.filter, 100)
		require.NoError(t, err)
		require.Len(t, targets, len(found))
		slices.Reverse(targets) // the newest first is the other way round
		var seqs []int64
		for i, r := range found {
			require.Equal(t, r.Place(), targets[i])
			seqs = append(seqs, r.Seq)
		}
		slices.Reverse(seqs)
		assert.Equal(t, c.want, seqs, name)
	}

	found, err := dead.List(t.Context(), conn, schema, dead.Filter{Behind: true}, 100)
	require.NoError(t, err)
	first, behind := found[4], found[3]
	assert.Equal(t, int64(1), first.Behind)
	assert.Nil(t, first.Head)
	assert.Equal(t, first.ID, *behind.Head)
	assert.Nil(t, found[0].Head, "it has lost its head")
	assert.InDelta(t, 7200, found[1].AgeSeconds, 60)
	assert.Equal(t, int64(9), *first.PayloadBytes)
	totals, err := dead.Totals(t.Context(), conn, schema, dead.Filter{Topic: to("orders")})
	require.NoError(t, err)
	assert.Equal(t, []dead.Total{{"default", "behind", 2, 0, 0}, {"default", "too_large", 2, 1, 1}}, totals)
}

// Everything about a row is shown; of long columns only a part.
func TestShowHasEverything(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	rows := []string{"a refused held"}
	for range 30 {
		rows = append(rows, "a behind behind")
	}
	places := insertDead(t, conn, rows...)
	for range 25 {
		retry(t, conn, places[0])
		exec(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held' WHERE state = 'retry'")
	}
	d, err := dead.Show(t.Context(), conn, schema, places[0], 3)
	require.NoError(t, err)
	assert.Equal(t, "pay", string(d.Payload))
	assert.JSONEq(t, `{"type": "order"}`, string(d.Headers))
	assert.Equal(t, int64(30), d.Behind)
	require.Len(t, d.Next, 20)
	assert.Equal(t, int64(2), d.Next[0].Seq)
	assert.Len(t, d.Actions, 20)
	for _, place := range []dead.Place{at(4711), {Relay: "other", Seq: 1}} {
		_, err = dead.Show(t.Context(), conn, schema, place, 3)
		require.ErrorIs(t, err, dead.ErrNotFound)
	}
}

// Every reason and state that the schema knows is known here, and each reason has advice of its
// own.
func TestEveryReasonHasAdvice(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	known := func(column string) (all []string) {
		var check string
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT pg_get_constraintdef(oid) FROM pg_constraint
			WHERE conrelid = 'effectonce.outbox_dead'::regclass AND conname = 'outbox_dead_' || $1 || '_check'`, column).Scan(&check))
		for _, quoted := range regexp.MustCompile(`'\w+'`).FindAllString(check, -1) {
			all = append(all, strings.Trim(quoted, "'"))
		}
		return all
	}
	assert.ElementsMatch(t, known("state"), dead.States())
	assert.ElementsMatch(t, known("reason"), dead.Reasons())
	said := map[parked.Advice]string{dead.AdviceFor("no such reason"): "no such reason"}
	for _, reason := range dead.Reasons() {
		advice := dead.AdviceFor(reason)
		assert.Empty(t, said[advice], "%s has the advice of another", reason)
		said[advice] = reason
	}
}

// Statements that run for every action, or at every look of a waiting operator, read only the rows
// that they need, however many are dead.
func TestStatementsDoNotReadTheWholeTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
		SELECT 'default', 1 + n, gen_random_uuid(), 'orders', convert_to('key ' || n % 1000, 'UTF8'), '{}', now(),
			CASE WHEN n < 1000 THEN 'refused' ELSE 'behind' END, 'e', CASE WHEN n < 1000 THEN 'held' ELSE 'behind' END
		FROM generate_series(0, 19999) n`)
	exec(t, conn, "ANALYZE effectonce.outbox_dead")
	for name, plan := range dead.Plans(t, conn, schema, []dead.Place{at(8)}) {
		assert.NotContains(t, plan, "Seq Scan on outbox_dead", "%s\n%s", name, plan)
		for _, touched := range regexp.MustCompile(`actual rows=(\d+)`).FindAllStringSubmatch(plan, -1) {
			var rows int
			_, err := fmt.Sscan(touched[1], &rows)
			require.NoError(t, err)
			assert.LessOrEqual(t, rows, 25, "%s\n%s", name, plan)
		}
	}
}
