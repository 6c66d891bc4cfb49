package held_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
)

// Every retry and discard is recorded with who, why and what it was, in the same transaction, and
// without payload or headers.
func TestActionsAreWrittenDown(t *testing.T) {
	t.Parallel()
	subjects := map[kind]map[string]any{
		dead: {
			"relay": "default", "seq": 1.0, "message_id": "00000000-0000-0000-0000-000000000001", "topic": "orders", "key": "a",
			"reason": "refused", "error": "error 1", "attempts": 1.0, "state": "held", "created_at": "2026-01-02T03:04:05Z",
		},
		parked: {
			"seq": 1.0, "consumer": "billing/orders", "message_id": "00000000-0000-0000-0000-000000000001", "topic": "orders",
			"partition": 0.0, "offset": 1.0, "key": "a", "reason": "failed", "error": "error 1", "attempts": 10.0, "state": "parked",
		},
	}
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		conn := connect(t, pgtest.Database(t))
		places := k.insert(t, conn, "a own held", "a behind behind", "- own held", "b own held", "c own held")
		exec(t, conn, `UPDATE `+k.relation+` SET key = '\x00ff' WHERE key = 'b'`)
		k.act(t, conn, retry, places[4], places[2])
		k.act(t, conn, discard, places[3])
		k.act(t, conn, discard, places[3])
		k.act(t, conn, whole, places[0])

		actions, err := operator.Actions(t.Context(), conn, schema, operator.ActionFilter{}, 100)
		require.NoError(t, err)
		var said []string
		for _, a := range actions {
			said = append(said, strings.TrimPrefix(a.What, string(k.Kind))+" "+a.Object()[35:])
			assert.Equal(t, ana.Who, *a.Stated)
			assert.Equal(t, conn.Config().User, a.Who)
			assert.Equal(t, ana.Why, a.Why)
			assert.NotEmpty(t, a.Role)
			assert.NotContains(t, string(a.Subject), "payload")
			assert.NotContains(t, string(a.Subject), "headers")
		}
		require.Equal(t, []string{".discard 2", ".discard 1", ".discard 4", ".retry 5", ".retry 3"}, said)
		var subject map[string]any
		require.NoError(t, json.Unmarshal(actions[1].Subject, &subject))
		if text, is := subject["created_at"].(string); is { // in the program's time zone
			created, err := time.Parse(time.RFC3339, text)
			require.NoError(t, err)
			subject["created_at"] = created.UTC().Format(time.RFC3339)
		}
		assert.Equal(t, subjects[k], subject)
		assert.Contains(t, string(actions[4].Subject), `"key": null`)
		assert.Contains(t, string(actions[2].Subject), `"key": "base64:AP8="`)

		// An action that cannot be recorded is not done.
		exec(t, conn, "ALTER TABLE effectonce.operator_actions ADD CHECK (stated <> 'ana@ops') NOT VALID")
		exec(t, conn, "UPDATE "+k.relation+" SET state = $1", k.held)
		before := k.left(t, conn)
		require.Len(t, before, 2)
		for _, order := range []held.Order{retry, discard, whole} {
			_, err = k.Act(t.Context(), conn, schema, order, places)
			require.Error(t, err)
		}
		assert.Equal(t, before, k.left(t, conn))
	})
}

// A deadlock with a transaction of the program costs another try, not the action.
func TestDeadlockIsTriedAgain(t *testing.T) {
	t.Parallel()
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		address := pgtest.Database(t)
		first, program, command, look := connect(t, address), connect(t, address), connect(t, address), connect(t, address)
		exec(t, program, "SET deadlock_timeout = '1h'") // the command is the one that looks for it
		places := k.insert(t, look, "a own held", "b own held", "c own held")
		exec(t, first, "BEGIN; SELECT FROM "+k.relation+" WHERE key = 'b' FOR UPDATE")
		exec(t, program, "BEGIN; SELECT FROM "+k.relation+" WHERE key = 'c' FOR UPDATE")
		order, after := retry, []string{"1 " + k.own + " retry", "2 " + k.own + " retry", "3 " + k.own + " retry"}
		if k == parked {
			order, after = discard, nil
		}
		var result *held.Result
		done := make(chan error, 1)
		go func() {
			var err error
			result, err = k.Act(t.Context(), command, schema, order, places)
			done <- err
		}()
		pgtest.Blocked(t, look, first) // the command, which has locked a
		waits := make(chan error, 1)
		go func() {
			_, err := program.Exec(t.Context(), "SELECT FROM "+k.relation+" WHERE key = 'a' FOR UPDATE")
			waits <- err
		}()
		pgtest.Blocked(t, look, command)
		exec(t, first, "COMMIT") // now the command waits for c
		require.NoError(t, testwait.Chan(t, "the program's lock", waits))
		exec(t, program, "COMMIT")
		require.NoError(t, testwait.Chan(t, "the command's end", done))
		assert.Len(t, result.Done, 3)
		assert.ElementsMatch(t, after, k.left(t, look))
	})
}

// A row counts as finished when it and the rows behind it are gone. Rows that are held again, also
// those behind it, are named. Rows that an operator discarded since then do not count as finished.
// Rows that come later are not waited for.
func TestWaitTellsWhatBecameOfEach(t *testing.T) {
	t.Parallel()
	laterSQL := map[kind]string{
		dead: `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
			VALUES ('default', 99, gen_random_uuid(), 'orders', 'a', '{}', now(), 'behind', '', 'behind')`,
		parked: `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
			SELECT consumer, gen_random_uuid(), topic, partition, 99, key, 'behind', '', 'behind' FROM effectonce.parked_messages WHERE seq = 1`,
	}
	ofBoth(t, func(t *testing.T, k kind) {
		t.Helper()
		conn := connect(t, pgtest.Database(t))
		places := k.insert(t, conn, "a own held", "a behind behind", "b own held", "c own held", "c behind behind", "- own held", "e own held")
		wait := &held.Wait{}
		look := func() held.Progress {
			report, err := k.Look(t.Context(), conn, schema, wait)
			require.NoError(t, err)
			return report
		}
		finish := func(n int) { exec(t, conn, "DELETE FROM "+k.relation+" WHERE seq = $1", n) }
		hold := func(n int) {
			exec(t, conn, "UPDATE "+k.relation+" SET state = $2, reason = $3, error = 'again' WHERE seq = $1", n, k.held, k.own)
		}
		assert.Equal(t, held.Progress{Failed: []held.Failure{}}, look())
		wait.Add(k.act(t, conn, retry, places...).Done)
		exec(t, conn, laterSQL[k])
		assert.Equal(t, 5, look().Pending)
		finish(1) // one is behind it
		assert.Equal(t, 5, look().Pending)
		finish(2) // and now only what came later
		report := look()
		assert.Equal(t, 4, report.Pending)
		assert.Equal(t, 1, report.Finished)
		hold(3)
		finish(4)
		hold(5) // what is behind 4
		report = look()
		assert.Equal(t, 2, report.Pending)
		require.Len(t, report.Failed, 2)
		assert.Equal(t, held.Failure{ID: report.Failed[0].ID, Reason: k.own, Error: "again"}, report.Failed[0])
		assert.Equal(t, byte(3), report.Failed[0].ID[15])
		assert.Equal(t, byte(5), report.Failed[1].ID[15])
		if k == dead {
			hold(6) // else the relay may be publishing it
		}
		k.act(t, conn, discard, places[5])
		report = look()
		assert.Equal(t, 1, report.Discarded)
		assert.Equal(t, 1, report.Finished)
		finish(7)
		report = look()
		assert.Equal(t, 1, report.Discarded)
		assert.Equal(t, 2, report.Finished)
		assert.Zero(t, report.Pending)
		assert.Equal(t, report, look())
	})
}

// Every reason and state that the schema knows is known here, and each reason has advice of its
// own.
func TestEveryReasonHasAdvice(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	known := func(constraint string) (all []string) {
		var check string
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = $1 AND connamespace = 'effectonce'::regnamespace",
			constraint).Scan(&check))
		for _, quoted := range regexp.MustCompile(`'\w+'`).FindAllString(check, -1) {
			all = append(all, strings.Trim(quoted, "'"))
		}
		return all
	}
	assert.ElementsMatch(t, known("outbox_dead_state_check"), dead.States())
	assert.ElementsMatch(t, known("parked_messages_state_is_unknown"), parked.States())
	for constraint, table := range map[string]kind{"outbox_dead_reason_check": dead, "parked_messages_reason_is_unknown": parked} {
		assert.ElementsMatch(t, known(constraint), table.Reasons())
		said := map[held.Advice]string{table.Advice("no such reason"): "no such reason"}
		for _, reason := range table.Reasons() {
			advice := table.Advice(reason)
			assert.Empty(t, said[advice], "%s has the advice of another", reason)
			said[advice] = reason
		}
	}
}

// Statements that run for every action, or at every look of a waiting operator, read only the rows
// that they need, however many wait.
func TestStatementsDoNotReadTheWholeTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, headers, created_at, reason, error, state)
		SELECT 'default', 1 + n, gen_random_uuid(), 'orders', convert_to('key ' || n % 1000, 'UTF8'), '{}', now(),
			CASE WHEN n < 1000 THEN 'refused' ELSE 'behind' END, 'e', CASE WHEN n < 1000 THEN 'held' ELSE 'behind' END
		FROM generate_series(0, 19999) n`)
	exec(t, conn, "ANALYZE effectonce.outbox_dead")
	parked.insert(t, conn, "a failed parked")
	exec(t, conn, `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
		SELECT id, gen_random_uuid(), 'orders', 0, 100 + n, convert_to('key ' || n % 1000, 'UTF8'),
			CASE WHEN n < 1000 THEN 'failed' ELSE 'behind' END, 'e', CASE WHEN n < 1000 THEN 'parked' ELSE 'behind' END
		FROM effectonce.consumers, generate_series(0, 19999) n`)
	exec(t, conn, "ANALYZE effectonce.parked_messages")
	refs, err := parked.Targets(t.Context(), conn, schema, held.Filter{Key: []byte("key 7")}, 10)
	require.NoError(t, err)
	require.Len(t, refs, 1)
	for _, plan := range append(held.Plans(t, conn, held.Dead, held.Ref{Relay: "default", Seq: 8}), held.Plans(t, conn, held.Parked, refs[0])...) {
		assert.NotContains(t, plan, "Seq Scan on outbox_dead", plan)
		assert.NotContains(t, plan, "Seq Scan on parked_messages", plan)
		for _, touched := range regexp.MustCompile(`actual rows=(\d+)`).FindAllStringSubmatch(plan, -1) {
			var rows int
			_, err := fmt.Sscan(touched[1], &rows)
			require.NoError(t, err)
			assert.LessOrEqual(t, rows, 25, plan)
		}
	}
}
