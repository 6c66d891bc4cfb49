package main_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// requests makes one key in doubt, one given up, one that is locked, one that is stuck, and two
// finished ones, one of which is over.
func requests(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	execSQL(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, request, body, status, locked_until, locked_by,
			attempts, error, created_at, finished_at, expires_at) VALUES
		('t7', 'charge', 'in-doubt', sha256('x'), 'indeterminate', '{reserve}', 'pay', 'card 4111', NULL, NULL, NULL, 'pod-1', 1, 'no answer', now() - interval '3 hours', NULL, NULL),
		('t7', 'charge', 'given-up', sha256('x'), 'abandoned', '{}', NULL, 'card 4222', NULL, NULL, NULL, 'pod-1', 20, 'refused', now() - interval '2 hours', NULL, NULL),
		('t7', 'charge', 'locked', sha256('x'), 'running', '{}', NULL, NULL, NULL, NULL, now() + interval '1 hour', 'pod-2', 1, NULL, now() - interval '1 hour', NULL, NULL),
		('t7', 'charge', 'same', sha256('x'), 'running', '{}', NULL, NULL, NULL, NULL, NULL, NULL, 1, NULL, now() - interval '4 hours', NULL, NULL),
		('t8', 'charge', 'same', sha256('x'), 'finished', '{}', NULL, NULL, 'paid: 4333', 201, NULL, NULL, 1, NULL, now(), now(), now() + interval '1 day'),
		('t8', 'charge', 'over', sha256('x'), 'finished', '{}', NULL, NULL, 'paid', 201, NULL, NULL, 1, NULL, now(), now(), now() - interval '2 hours')`)
}

// An operator finds what waits for a decision, sees everything about it but what was asked and
// answered unless that is asked for, and decides; each decision is written down, and one that makes
// no sense is refused with the remedy.
func TestKeysAreDecidedByAnOperator(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	empty := runOn(t, address, "keys", "list")
	assert.Equal(t, result{0, "no unfinished keys: --state finished lists the others\n", ""}, empty)
	requests(t, conn)

	listed := runOn(t, address, "keys", "list")
	assert.Zero(t, listed.code, listed.stderr)
	assert.Regexp(t, `(?m)^locked +[0-9a-f]{8} +t7 +charge +running \(locked\)`, listed.stdout)
	assert.Regexp(t, `(?m)^in-doubt +[0-9a-f]{8} +t7 +charge +indeterminate +3h[0-9ms]* +1 +reserve +no answer`, listed.stdout)
	assert.NotContains(t, listed.stdout, "finished")
	assert.NotContains(t, listed.stdout, "4111")
	assert.Regexp(t, `^key.*\nsame .* stuck .*\n$`, runOn(t, address, "keys", "list", "--state", "stuck").stdout)
	var row map[string]any
	require.NoError(t, json.Unmarshal([]byte(runOn(t, address, "keys", "list", "--limit", "1", "--json").stdout), &row))
	assert.Equal(t, "locked", row["key"])
	next := regexp.MustCompile(`--after (\S+)`).FindStringSubmatch(runOn(t, address, "keys", "list", "--limit", "1").stdout)
	require.Len(t, next, 2)
	assert.Equal(t, row["cursor"], next[1])
	assert.Regexp(t, `(?m)\ngiven-up `, runOn(t, address, "keys", "list", "--limit", "1", "--after", next[1]).stdout)

	shown := runOn(t, address, "keys", "show", "in-doubt")
	for _, want := range []string{"calling    pay", "may or may not have acted", "pod-1", "no answer", "request    9 bytes: --payload", "keys retry"} {
		assert.Contains(t, shown.stdout, want)
	}
	assert.NotContains(t, shown.stdout, "4111")
	assert.Contains(t, runOn(t, address, "keys", "show", "in-doubt", "--payload").stdout, "card 4111")
	execSQL(t, conn, "UPDATE effectonce.idempotency_keys SET sealed = true WHERE key = 'in-doubt'")
	for _, more := range []string{"--json", "--full"} {
		sealed := runOn(t, address, "keys", "show", "in-doubt", "--payload", more)
		assert.Zero(t, sealed.code, sealed.stderr)
		assert.NotContains(t, sealed.stdout, "4111")
	}
	mark := regexp.MustCompile(`\(([0-9a-f]{8}) in logs\)`).FindStringSubmatch(shown.stdout)
	require.Len(t, mark, 2)
	assert.Contains(t, runOn(t, address, "keys", "show", mark[1]).stdout, "in-doubt")

	v := runOn(t, address, "keys", "retry", mark[1], "--call-did-not-happen", "--why", "ticket 88", "--by", "ana", "--json").object(t)
	assert.Equal(t, "key.retry", v["what"])
	assert.Contains(t, runOn(t, address, "keys", "unlock", "locked", "--why", "it hangs").stdout, "it was held by pod-2")
	body := filepath.Join(t.TempDir(), "body")
	require.NoError(t, os.WriteFile(body, []byte(`{"paid":true}`), 0o600))
	done := runOn(t, address, "keys", "finish", "given-up", "--status", "201", "--header", "content-type: application/json", "--header", "X-A: 1", "--header", "X-A: 2",
		"--body-file", body, "--window", "1h", "--why", "statement of the bank")
	assert.Zero(t, done.code, done.stderr)
	assert.Regexp(t, `status 201; the key is forgotten at [-0-9]+T[:0-9]+Z, and a request that comes later is executed again\n$`, done.stdout)
	var status int
	var headers, stored string
	var hour bool
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT status, headers::text, convert_from(body, 'UTF8'), expires_at - finished_at BETWEEN interval '59 min' AND interval '61 min'
		FROM effectonce.idempotency_keys WHERE key = 'given-up' AND state = 'finished'`).Scan(&status, &headers, &stored, &hour))
	assert.Equal(t, 201, status)
	assert.JSONEq(t, `{"Content-Type": ["application/json"], "X-A": ["1", "2"]}`, headers)
	assert.Equal(t, `{"paid":true}`, stored)
	assert.True(t, hour)
	actions := runOn(t, address, "actions", "list").stdout
	assert.Regexp(t, `key.finish +charge of scope t7 \([0-9a-f]{8}\) +statement of the bank`, actions)
	assert.Contains(t, runOn(t, address, "keys", "show", "given-up").stdout, "key.finish: statement of the bank")

	for args, want := range map[string]string{
		"retry in-doubt": "running already", "unlock given-up": "never changed", "retry nobody": "no such key", "unlock same": `"t8" of "charge", "t7" of "charge"`,
	} {
		r := runOn(t, address, append(append([]string{"keys"}, strings.Fields(args)...), "--why", "w")...)
		assert.Equal(t, 1, r.code, args)
		assert.Contains(t, r.stderr, want, args)
	}
	assert.Zero(t, runOn(t, address, "keys", "finish", "same", "--scope", "t7", "--operation", "charge", "--status", "409", "--window", "1m", "--why", "w").code)
}

// Wrong use is refused before anything is done, with all problems at once.
func TestKeysRefuseWrongUse(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	requests(t, connect(t, address))
	for args, want := range map[string][]string{
		"finish in-doubt": {"--why is missing", "--status is missing", "--window or --forever is missing", "executed again"},
		"finish in-doubt --status 201 --why w --forever=0":  {"--window or --forever is missing"},
		"finish in-doubt --status 201 --why w --window 59s": {"want a duration such as 24h, 1m to 87600h"},
		"finish in-doubt --status 1000":                     {"200 to 999"},
		"finish in-doubt --status 99":                       {"200 to 999"},
		"show \xe9":                                         {"key: want 1 to 255 characters of UTF-8"},
		"unlock \xe9 --why w":                               {"key: want 1 to 255 characters of UTF-8"},
		"show k --scope \xe9":                               {`: want 1 to 255 characters of UTF-8`},
		"list --operation \xe9":                             {`: want 1 to 255 characters of UTF-8`},
		"list --scope=":                                     {`: want 1 to 255 characters of UTF-8`},
		"show " + strings.Repeat("k", 256):                  {"key: want 1 to 255 characters of UTF-8"},
		"retry in-doubt":                                    {"--why is missing"},
		"retry --why w":                                     {"takes one key"},
		"show":                                              {"takes one key"},
		"list --state lost":                                 {"want one of running, finished, indeterminate, abandoned, stuck"},
		"list --after x":                                    {"with which an earlier list ended"},
		"finish k --status 201 --header nope":               {"Name: value"},
		"finish k --status 201 --header Set-Cookie:a=b --why w":                                   {"of a single client"},
		"finish k --status 201 --header x-auth-token:t --why w":                                   {"looks like a credential"},
		"finish k --status 201 --header www-authenticate:Basic --why w":                           {"of a single client"},
		"finish k --status 201 --header X-A:\xe9 --why w":                                         {"Name: value"},
		"finish k --status 201 --why w --forever --window 1h":                                     {"want one of them"},
		"finish in-doubt --status 201 --why w --forever --body-file /nonexistent/effectonce/body": {"no such file"},
	} {
		r := runOn(t, address, append([]string{"keys"}, strings.Fields(args)...)...)
		assert.Equal(t, 2, r.code, args)
		for _, text := range want {
			assert.Contains(t, r.stderr, text, args)
		}
	}
}

// What a program in another language may have stored is found, too: the table's limit is 255
// characters, whatever their bytes.
func TestLongKeysOfOthersAreShown(t *testing.T) {
	t.Parallel()
	address, long := pgtest.Database(t), strings.Repeat("ключ", 255)[:2*255]
	execSQL(t, connect(t, address), `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state) VALUES ($1, $1, $1, sha256('x'), 'running')`, long)
	r := runOn(t, address, "keys", "show", long, "--scope", long, "--operation", long, "--json")
	assert.Equal(t, long, r.object(t)["key"])
	assert.Contains(t, runOn(t, address, "keys", "list", "--scope", long, "--json").stdout, long)
}

// Reaping forgets what is over, and with --dry-run only counts it.
func TestKeysAreReaped(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	requests(t, conn)
	assert.Equal(t, "1 key would be forgotten; nothing was done (--dry-run)\n", runOn(t, address, "keys", "reap", "--dry-run").stdout)
	r := runOn(t, address, "keys", "reap", "--json")
	assert.Empty(t, r.stderr, "no progress where nobody watches")
	assert.InDelta(t, 1, r.object(t)["keys"], 0)
	assert.Equal(t, 1, runOn(t, address, "keys", "show", "over").code)
	assert.Equal(t, "0 keys forgotten\n", runOn(t, address, "keys", "reap").stdout)
	execSQL(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, expires_at)
		VALUES ('t7', 'charge', 'by-itself', sha256('x'), 'finished', now() - interval '1 hour')`)
	assert.Contains(t, runOn(t, address, "keys", "reap").stdout, "0 keys forgotten; 1 became indeterminate")
}

// A key that no program knows the phases of is not passed over as one that is put off.
func TestUnknownPhasesAreExplained(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	requests(t, conn)
	execSQL(t, conn, `UPDATE effectonce.idempotency_keys SET retry_at = now() + interval '1 min', error = $1 WHERE key = 'same' AND scope = 't7'`,
		fmt.Sprintf("%v: done are [\"reserve\"], known [\"begin\"]", idempotency.ErrUnknownRecoveryPoint))
	shown := runOn(t, address, "keys", "show", "same", "--scope", "t7").stdout
	assert.Contains(t, shown, "waits for a program that knows the phases")
	assert.Contains(t, shown, "keys finish")
}

// The first step in show follows from what is unknown: a call that may have been made is asked
// about before anything is tried again, also where the attempts are used up; work that committed by
// itself is looked at.
func TestAdviceComesFromWhatIsNotKnown(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	requests(t, conn)
	execSQL(t, conn, `UPDATE effectonce.idempotency_keys SET calling = 'pay' WHERE key = 'given-up'`)
	execSQL(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, attempts, retry_at, expires_at) VALUES
		('t7', 'charge', 'by-itself', sha256('x'), 'finished', '{}', NULL, 1, NULL, now() + interval '1 day'),
		('t7', 'charge', 'cut', sha256('x'), 'running', '{reserve}', 'pay', 1, NULL, NULL),
		('t7', 'charge', 'plain', sha256('x'), 'abandoned', '{reserve}', NULL, 1, NULL, NULL),
		('t7', 'charge', 'counts', sha256('x'), 'running', '{}', NULL, 2, now() + interval '1 day', now() + interval '1 day')`)
	for key, want := range map[string][]string{
		"in-doubt":  {"(?m)^state +indeterminate: a foreign system may or may not have acted", "(?s)what to do first find out .*if it did, .*\n {11}only if it did not, \"keys retry --call-did-not-happen\""},
		"given-up":  {"(?m)^state +abandoned: it was given up, and a foreign system may or may not have acted", "(?s)what to do first find out .*if it did, .*\n {11}only if it did not, \"keys retry --call-did-not-happen\""},
		"cut":       {"(?m)^state +running: a foreign system may or may not have acted", "what to do first find out"},
		"plain":     {"what to do remove the cause, then \"keys retry\""},
		"by-itself": {"(?m)^state +indeterminate: its work committed by a statement of its own", "what to do see what its work left"},
		"counts":    {"only the attempts are counted", "what to do nothing"},
	} {
		shown := runOn(t, address, "keys", "show", key)
		assert.Zero(t, shown.code, key)
		for _, text := range want {
			assert.Regexp(t, text, shown.stdout, key)
		}
	}
	refused := runOn(t, address, "keys", "retry", "given-up", "--why", "fixed")
	assert.Equal(t, 1, refused.code)
	assert.Contains(t, refused.stderr, "--call-did-not-happen")
	assert.Zero(t, runOn(t, address, "keys", "finish", "by-itself", "--status", "201", "--window", "24h", "--why", "its rows are there").code)
	assert.Regexp(t, `(?m)^outcome +status 201`, runOn(t, address, "keys", "show", "by-itself").stdout)
	finished := runOn(t, address, "keys", "finish", "in-doubt", "--status", "201", "--forever", "--why", "paid", "--json").object(t)
	assert.Equal(t, "indeterminate", finished["was"].(map[string]any)["state"])
	assert.Equal(t, "finished", finished["now"].(map[string]any)["state"])
	assert.Nil(t, finished["now"].(map[string]any)["expires_at"], "never forgotten")
	done := runOn(t, address, "keys", "show", "in-doubt", "--payload", "--json").object(t)
	assert.NotContains(t, done, "request", "nobody knows whether it is encrypted")
	assert.InDelta(t, 9, done["request_bytes"], 0)
}

// An operator who has to ask a foreign system finds the ID that the call was given, is advised to
// wait while the call may still be on its way, and learns from each command what it leaves undone,
// and what the next request does.
func TestWhatToAskForAndWhatIsLeftUndone(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	requests(t, conn)
	k := idempotency.Key{Scope: "t7", Operation: "charge", Value: "in-doubt"}
	pay, reserve := k.ChildID("pay").String(), k.ChildID("reserve").String()
	shown := runOn(t, address, "keys", "show", "in-doubt").stdout
	assert.Regexp(t, "(?m)^child ID +"+pay+": .* pay ", shown)
	assert.NotContains(t, shown, reserve)
	assert.NotContains(t, shown, "not before")
	assert.Contains(t, shown, `what phase "pay" and those behind it would have`)
	assert.Regexp(t, "(?m)^child ID +"+reserve, runOn(t, address, "keys", "show", "in-doubt", "--child", "reserve", "--child", "pay").stdout)
	assert.Equal(t, map[string]any{"pay": pay, "reserve": reserve, "other": k.ChildID("other").String()},
		runOn(t, address, "keys", "show", "in-doubt", "--child", "other", "--json").object(t)["child_ids"])
	execSQL(t, conn, "UPDATE effectonce.idempotency_keys SET retry_at = now() + interval '1 minute' WHERE key = 'in-doubt'")
	assert.Regexp(t, "what to do not before [-0-9]+T[:0-9]+Z, since the call may still be on its way:\n {11}first find out", runOn(t, address, "keys", "show", "in-doubt").stdout)

	assert.Contains(t, runOn(t, address, "keys", "retry", "in-doubt", "--why", "w").stderr, pay)
	retried := runOn(t, address, "keys", "retry", "in-doubt", "--call-did-not-happen", "--why", "w").stdout
	assert.Contains(t, retried, "or by the completer; the call of phase \"pay\" is made again")
	execSQL(t, conn, "UPDATE effectonce.idempotency_keys SET calling = 'pay', request = NULL, locked_until = now() + interval '1 hour' WHERE key IN ('in-doubt', 'locked')")
	assert.Contains(t, runOn(t, address, "keys", "show", "locked").stdout, "calls a foreign system")
	assert.Contains(t, runOn(t, address, "keys", "unlock", "in-doubt", "--why", "w").stdout, `the call of phase "pay" was under way`)
	assert.Contains(t, runOn(t, address, "keys", "retry", "in-doubt", "--why", "w").stderr, "makes it indeterminate")
	assert.Contains(t, runOn(t, address, "keys", "unlock", "in-doubt", "--why", "w").stderr, pay)

	execSQL(t, conn, "UPDATE effectonce.idempotency_keys SET phases = '{reserve}', request = NULL WHERE key = 'given-up'")
	assert.Contains(t, runOn(t, address, "keys", "show", "given-up").stdout, "what reserve did stays: if that outcome is a failure, undo it")
	assert.Contains(t, runOn(t, address, "keys", "retry", "given-up", "--why", "w").stdout, "no completer can")
	assert.Contains(t, runOn(t, address, "keys", "show", "given-up").stdout, "no completer can")
	assert.Contains(t, runOn(t, address, "keys", "finish", "given-up", "--status", "409", "--window", "24h", "--why", "w").stdout, "what reserve did stays, and the phases after that are not executed")
}
