package main_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// bankIs is what the bank of a payment does.
type bankIs struct {
	away, silent atomic.Bool
	asked        atomic.Int32
}

// payments is a flow of two phases, in a program with the rights of an endpoint alone: it reserves,
// and asks a bank that must not be asked twice.
func payments(t *testing.T, endpoint string, bank *bankIs) *idempotency.Flow[int] {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), endpoint)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	op, err := idempotency.New(pool, idempotency.Config{Operation: "pay", AttemptsMax: 2, Lock: time.Hour, WaitMax: time.Millisecond})
	require.NoError(t, err)
	flow, err := idempotency.NewFlow(op, idempotency.FlowConfig[int]{StoreRequest: true},
		idempotency.Phase[int]{Name: "reserve", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[int]) error {
			_, err := tx.Exec(ctx, "INSERT INTO reserved (key) VALUES ($1)", step.Key.Value)
			return err
		}},
		idempotency.Phase[int]{
			Name: "charge", AtMostOnce: true,
			Call: func(ctx context.Context, _ *idempotency.Step[int]) error {
				bank.asked.Add(1)
				switch {
				case bank.away.Load():
					return idempotency.NotDone(errors.New("the bank is away"))
				case bank.silent.Load():
					<-ctx.Done()
				}
				return ctx.Err()
			},
			Write: func(_ context.Context, _ pgx.Tx, step *idempotency.Step[int]) error {
				step.Finish(idempotency.Response{Status: 201, Body: []byte("paid")})
				return nil
			},
		})
	require.NoError(t, err)
	return flow
}

func payment(value string) idempotency.Key { return idempotency.Key{Scope: "t7", Value: value} }

// cut asks for a payment, and leaves it in the bank's silence when the request's context ends.
func cut(t *testing.T, flow *idempotency.Flow[int], bank *bankIs, value string) {
	t.Helper()
	bank.silent.Store(true)
	before := bank.asked.Load()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := flow.Do(ctx, payment(value), []byte("1 EUR"))
		done <- err
	}()
	require.Eventually(t, func() bool { return bank.asked.Load() > before }, commandMax, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-done, idempotency.ErrIndeterminate)
	bank.silent.Store(false)
}

// operatorRuns runs a command as a process of its own, as a login that is an operator and nothing
// else.
func operatorRuns(t *testing.T, address string, want int, line string) string {
	t.Helper()
	cmd, written := process(t, map[string]string{"OUTBOX_DATABASE_URL": address}, strings.Fields(line)...)
	_ = cmd.Run()
	text := written.String()
	require.Equal(t, want, cmd.ProcessState.ExitCode(), "%s: %s", line, text)
	for _, word := range []string{"permission", "denied", "42501"} {
		require.NotContains(t, text, word, line)
	}
	return text
}

// Property: an operator's role is enough to find waiting keys, to decide that a call did not
// happen, that it did, or that its holder hangs, and to forget expired keys; the endpoint continues
// as decided, no reservation is made twice, and each decision is recorded under the login that made
// it. Row S7 of guarantees.md.
func TestOperatorDecidesAboutKeysWithItsRole(t *testing.T) {
	t.Parallel()
	ctx, address := t.Context(), pgtest.Database(t)
	prefix := withRoles(t, address)
	owner, bank := connect(t, address), &bankIs{}
	execSQL(t, owner, "CREATE TABLE reserved (key text NOT NULL); GRANT INSERT ON reserved TO "+prefix+"_endpoint")
	flow := payments(t, pgtest.Login(t, address, prefix, "endpoint"), bank)
	operator := pgtest.Login(t, address, prefix, "operator")
	does := func(want int, line string) string { t.Helper(); return operatorRuns(t, operator, want, line) }

	assert.Contains(t, does(0, "keys list"), "no unfinished keys")
	cut(t, flow, bank, "not-paid")
	cut(t, flow, bank, "was-paid")
	bank.away.Store(true)
	for _, want := range []string{"the bank is away", "the bank is away", "given up"} {
		_, err := flow.Do(ctx, payment("given-up"), []byte("1 EUR"))
		require.ErrorContains(t, err, want)
	}
	bank.away.Store(false)
	assert.Contains(t, does(0, "keys list --state abandoned"), "given-up")
	waiting := does(0, "keys list --state indeterminate")
	assert.Contains(t, waiting, "not-paid")
	assert.Contains(t, waiting, "was-paid")
	assert.Contains(t, does(0, "keys show not-paid --payload"), "1 EUR")

	assert.Contains(t, does(1, "keys retry not-paid --why no-such-transfer"), "--call-did-not-happen")
	does(0, "keys retry not-paid --call-did-not-happen --why no-such-transfer --by ana")
	assert.Contains(t, does(0, "keys finish was-paid --status 201 --forever --why statement --by ana"), "never forgotten")
	does(0, "keys retry given-up --why bank-is-back --by ana")
	asked := bank.asked.Load()
	for _, value := range []string{"not-paid", "was-paid", "given-up"} {
		response, err := flow.Do(ctx, payment(value), []byte("1 EUR"))
		require.NoError(t, err)
		assert.Equal(t, 201, response.Status)
		assert.Equal(t, value == "was-paid", response.Replayed)
	}
	assert.Equal(t, asked+2, bank.asked.Load(), "the bank is not asked for what a person finished")

	execSQL(t, owner, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, attempts, locked_until, locked_by, request)
		VALUES ('t7', 'pay', 'hangs', decode(repeat('00', 32), 'hex'), 'running', 1, clock_timestamp() + interval '1 hour', 'pod-9', '1 EUR')`)
	_, err := flow.Do(ctx, payment("hangs"), []byte("1 EUR"))
	require.ErrorIs(t, err, idempotency.ErrInProgress)
	assert.Contains(t, does(1, "keys retry hangs --why w"), "keys unlock")
	assert.Contains(t, does(0, "keys unlock hangs --why pod-9-hangs --by ana"), "pod-9")
	_, err = flow.Do(ctx, payment("hangs"), []byte("1 EUR"))
	require.NoError(t, err)

	execSQL(t, owner, "UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp() WHERE key = 'was-paid'")
	assert.Contains(t, does(0, "keys reap --dry-run"), "1 key would be forgotten")
	assert.Contains(t, does(0, "keys reap"), "1 key forgotten")
	assert.Contains(t, does(1, "keys show was-paid"), "no such key")

	var doubled int
	require.NoError(t, owner.QueryRow(ctx, "SELECT count(*) - count(DISTINCT key) FROM reserved").Scan(&doubled))
	assert.Zero(t, doubled)
	rows, err := owner.Query(ctx, "SELECT stated, what, why, starts_with(db_role, $1) AND who = db_role, subject::text FROM effectonce.operator_actions ORDER BY id", prefix+"_login_operator")
	require.NoError(t, err)
	type action struct {
		Stated, What, Why string
		Own               bool
		Subject           string
	}
	actions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[action])
	require.NoError(t, err)
	var told []string
	for _, a := range actions {
		assert.True(t, a.Own, a)
		assert.Equal(t, "ana", a.Stated)
		assert.NotContains(t, a.Subject, "1 EUR")
		assert.NotContains(t, a.Subject, "paid")
		told = append(told, a.What+" "+a.Why)
	}
	assert.Equal(t, []string{"key.retry no-such-transfer", "key.finish statement", "key.retry bank-is-back", "key.unlock pod-9-hangs"}, told)
	assert.Equal(t, 4, strings.Count(does(0, "actions list"), "pay of scope t7"))
}

// Property: an operator decides about keys, and cannot make one, rename one, change what it asked
// for or when, mark its phases as done, or take back what was written down; an endpoint cannot
// write down a decision. Row S7 of guarantees.md.
func TestOperatorMayNotMakeOrRenameKeys(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	prefix := withRoles(t, address)
	requests(t, connect(t, address))
	for part, refused := range map[string][]string{
		"operator": {
			`INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state) VALUES ('t7', 'charge', 'mine', sha256('x'), 'running')`,
			`UPDATE effectonce.idempotency_keys SET scope = 't9' WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET operation = 'refund' WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET key = 'other' WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET fingerprint = sha256('y') WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET phases = '{reserve,pay}' WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET created_at = now() WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET request = '900 EUR' WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET request = NULL WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET data = '{"amount":900}' WHERE key = 'in-doubt'`,
			`UPDATE effectonce.idempotency_keys SET locked_by = 'me' WHERE key = 'in-doubt'`,
			`TRUNCATE effectonce.idempotency_keys`,
			`INSERT INTO effectonce.pending_requests (client, request, key) VALUES ('c', 'r', 'k')`,
			`DELETE FROM effectonce.pending_requests`,
			`UPDATE effectonce.operator_actions SET why = 'w'`,
			`DELETE FROM effectonce.operator_actions`,
		},
		"endpoint": {
			`INSERT INTO effectonce.operator_actions (who, what, why) VALUES ('w', 'key.retry', 'w')`,
			`SELECT FROM effectonce.operator_actions`,
			`TRUNCATE effectonce.idempotency_keys`,
		},
	} {
		login := pgtest.Login(t, address, prefix, part)
		conn := connect(t, login)
		for _, sql := range refused {
			_, err := conn.Exec(t.Context(), sql)
			var pgErr *pgconn.PgError
			if assert.ErrorAs(t, err, &pgErr, "%s: %s", part, sql) {
				assert.Equal(t, "42501", pgErr.Code, "%s: %s: %v", part, sql, err)
			}
		}
		if part == "endpoint" { // what it has no right to write down it cannot do by the command
			r := runOn(t, login, "keys", "retry", "in-doubt", "--call-did-not-happen", "--why", "w")
			assert.Equal(t, 1, r.code)
			assert.Contains(t, r.stderr, "42501")
			assert.Contains(t, runOn(t, address, "keys", "list", "--state", "indeterminate").stdout, "in-doubt")
		}
	}
}
