package keys_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func values(rows []keys.Row) (all []string) {
	for _, r := range rows {
		all = append(all, r.Key)
	}
	slices.Sort(all)
	return all
}

// A list has the keys that its filter selects: by default all that are not finished, and as stuck
// only those on which a worker should be working.
func TestListIsFiltered(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, state := range []string{"locked", "free", "put off", "finished", "over", "indeterminate", "abandoned"} {
		key(t, pool, state, state)
	}
	pgtest.Exec(t, pool, "UPDATE effectonce.idempotency_keys SET created_at = created_at - interval '2 hours' WHERE key IN ('abandoned', 'over')")
	pgtest.Exec(t, pool, "INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state) VALUES ('u', 'refund', 'other', sha256('x'), 'running')")
	hour := time.Hour
	for _, c := range []struct {
		filter keys.Filter
		want   []string
	}{
		{keys.Filter{}, []string{"abandoned", "free", "indeterminate", "locked", "other", "put off"}},
		{keys.Filter{States: []string{keys.Stuck}}, []string{"free", "other"}},
		{keys.Filter{States: []string{keys.Running}}, []string{"free", "locked", "other", "put off"}},
		{keys.Filter{States: []string{keys.Finished}}, []string{"finished", "over"}},
		{keys.Filter{States: []string{keys.Indeterminate}}, []string{"indeterminate"}},
		{keys.Filter{Scope: new("u")}, []string{"other"}},
		{keys.Filter{Operation: new("charge"), States: []string{keys.Abandoned, keys.Running}}, []string{"abandoned", "free", "locked", "put off"}},
		{keys.Filter{OlderThan: &hour}, []string{"abandoned"}},
	} {
		rows, err := keys.List(t.Context(), pool, schema, c.filter, 100)
		require.NoError(t, err)
		assert.Equal(t, c.want, values(rows), "%+v", c.filter)
		for _, r := range rows {
			assert.Equal(t, r.Key == "free" || r.Key == "other", r.Stuck, r.Key)
			assert.Equal(t, r.Key == "locked", r.Locked, r.Key)
		}
	}
}

// What is not finished is found by the partial indexes, also as a mark: a table full of finished
// keys is not read.
func TestUnfinishedKeysAreFoundByTheirIndexes(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := pgtest.Connect(t, address)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, expires_at)
		SELECT 't', 'charge', n::text, sha256('x'), 'finished', clock_timestamp() + interval '1 day' FROM generate_series(1, 20000) n`)
	pgtest.Exec(t, conn, "ANALYZE effectonce.idempotency_keys")
	plan := pgtest.Plan(t, conn, keys.ListSQL, []string{keys.Running, keys.Indeterminate, keys.Abandoned}, true, nil, nil, nil, 50)
	assert.NotContains(t, plan, "Seq Scan on idempotency_keys k (")
	assert.Contains(t, plan, "idempotency_keys_unfinished")
	assert.Contains(t, plan, "idempotency_keys_undecided")
	plan = pgtest.Plan(t, conn, keys.FindSQL, "7", "t", "charge", 100)
	assert.NotContains(t, plan, "Seq Scan")
}

// A key is found by its value, in every scope, and by the mark that logs show, as long as it is not
// finished.
func TestKeyIsFoundByWhatPeopleHave(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for name, state := range map[string]string{"a": "locked", "ключ-€": "free", "over and done": "finished", "in doubt": "indeterminate"} {
		key(t, pool, name, state)
		row := find(t, pool, name)
		assert.Contains(t, idempotency.Key{Scope: "t", Operation: "charge", Value: name}.String(), "("+row.Mark+")")
		rows, err := keys.Find(t.Context(), pool, schema, keys.Name{Key: row.Mark})
		require.NoError(t, err)
		assert.Equal(t, state != "finished", len(rows) == 1, name)
	}
	pgtest.Exec(t, pool, "INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state) VALUES ('u', 'charge', 'a', sha256('x'), 'running')")
	rows, err := keys.Find(t.Context(), pool, schema, keys.Name{Key: "a"})
	require.NoError(t, err)
	assert.Len(t, rows, 2)
	rows, err = keys.Find(t.Context(), pool, schema, keys.Name{Key: "a", Scope: new("u"), Operation: new("charge")})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	assert.Equal(t, "u", rows[0].Scope)
}

// What is shown of a key is all that is stored, as far as was asked for, and of a sealed one
// nothing that is encrypted.
func TestShowLeavesOutWhatIsSealed(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	key(t, pool, "k", "indeterminate")
	d, err := keys.Show(t.Context(), pool, schema, find(t, pool, "k"), 3)
	require.NoError(t, err)
	assert.Equal(t, "sec", string(d.Request))
	assert.Equal(t, "{}", string(d.Data))
	assert.Equal(t, int64(6), *d.RequestBytes)
	pgtest.Exec(t, pool, "UPDATE effectonce.idempotency_keys SET sealed = true, body = 'secret', headers = '\"c2VjcmV0\"'")
	d, err = keys.Show(t.Context(), pool, schema, find(t, pool, "k"), 100)
	require.NoError(t, err)
	assert.Nil(t, d.Request)
	assert.Nil(t, d.Data)
	assert.Nil(t, d.Body)
	assert.JSONEq(t, "{}", string(d.Headers))
	assert.Equal(t, int64(6), *d.BodyBytes)
	_, err = finish(t.Context(), pool, d.Place)
	require.NoError(t, err)
	d, err = keys.Show(t.Context(), pool, schema, find(t, pool, "k"), 100)
	require.NoError(t, err)
	assert.Nil(t, d.Request, "it may be encrypted, whatever sealed says of the outcome")
	assert.Nil(t, d.Data)
	assert.Equal(t, "by hand", string(d.Body))
	pgtest.Exec(t, pool, "DELETE FROM effectonce.idempotency_keys")
	_, err = keys.Show(t.Context(), pool, schema, d.Row, 100)
	require.ErrorIs(t, err, keys.ErrNotFound)
}

// documented returns the SQL blocks of docs/reference/idempotency-keys.md about keys, split into
// statements, with psql's variables filled in.
func documented(t *testing.T, variables ...string) [][]string {
	t.Helper()
	text, err := os.ReadFile("../../../../docs/reference/idempotency-keys.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## idempotency_keys\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	var blocks [][]string
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1) {
		sql := strings.NewReplacer(variables...).Replace(block[1])
		blocks = append(blocks, strings.SplitAfter(strings.TrimSpace(sql), ";\n"))
	}
	require.Len(t, blocks, 2)
	return blocks
}

// request are psql's variables for one request.
func request(what, token string) []string {
	return []string{":'scope'", "'t'", ":'operation'", "'charge'", ":'key'", "'k'", ":'request'", "'" + what + "'", ":token", token}
}

// answer is what the documented look says.
func answer(t *testing.T, pool *pgxpool.Pool, what string) string {
	t.Helper()
	rows, err := pool.Query(t.Context(), documented(t, request(what, "0")...)[0][3])
	require.NoError(t, err)
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowToMap)
	require.NoError(t, err)
	return found["answer"].(string)
}

// A program in another language that does what the documentation says agrees with this one: its
// outcome is replayed here, and its claim gives the documented answers in their order.
func TestDocumentedClaim(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	steps := documented(t, request("1 EUR", "0")...)[0]
	require.Len(t, steps, 7)
	claim := steps[2]
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	for i, step := range steps {
		tag, err := conn.Exec(t.Context(), step)
		require.NoError(t, err, step)
		if i == 2 || i == 5 {
			assert.Equal(t, int64(1), tag.RowsAffected())
		}
	}
	conn.Release()
	op, err := idempotency.New(pool, idempotency.Config{Operation: "charge"})
	require.NoError(t, err)
	k := named
	_, err = op.Once(t.Context(), k, nil)
	require.ErrorIs(t, err, idempotency.ErrMismatch)
	pgtest.Exec(t, pool, "UPDATE effectonce.idempotency_keys SET fingerprint = decode(repeat('00', 32), 'hex')")
	response, err := op.Once(t.Context(), k, nil)
	require.NoError(t, err)
	assert.Equal(t, idempotency.Response{Status: 201, Header: map[string][]string{"Location": {"/orders/7"}}, Body: []byte("done"), Replayed: true}, response)
	pgtest.Exec(t, pool, "UPDATE effectonce.idempotency_keys SET fingerprint = sha256('1 EUR')")

	tag, err := pool.Exec(t.Context(), claim)
	require.NoError(t, err)
	assert.Zero(t, tag.RowsAffected())
	assert.Equal(t, "mismatch", answer(t, pool, "2 EUR"), "before the replay")
	assert.Equal(t, "replay", answer(t, pool, "1 EUR"))
	for state, want := range map[string]string{"indeterminate": "indeterminate", "work": "indeterminate", "abandoned": "abandoned", "locked": "in progress", "free": "execute"} {
		pgtest.Exec(t, pool, "DELETE FROM effectonce.idempotency_keys")
		key(t, pool, "k", state)
		assert.Equal(t, want, answer(t, pool, "x"), state)
		assert.Equal(t, "mismatch", answer(t, pool, "y"), state)
	}
}

// Phases by plain SQL: a worker that lost its token stores nothing more, and the others continue
// from the recovery point.
func TestDocumentedPhases(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	token := pgtest.Value[int64](t, pool, documented(t, request("x", "0")...)[1][0])
	steps := func(taken int64) []string { return documented(t, request("x", fmt.Sprint(token+taken))...)[1] }
	first, second := steps(0), steps(1)
	require.Len(t, first, 4)
	pgtest.Exec(t, pool, first[2])
	tag, err := pool.Exec(t.Context(), first[1])
	require.NoError(t, err)
	assert.Zero(t, tag.RowsAffected(), "its lock is live")
	_, err = unlock(t.Context(), pool, keys.Place{Scope: "t", Operation: "charge", Key: "k"})
	require.NoError(t, err)
	var refused *pgconn.PgError
	_, err = pool.Exec(t.Context(), first[3])
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, "EO003", refused.Code)
	tag, err = pool.Exec(t.Context(), second[1])
	require.NoError(t, err)
	assert.Equal(t, int64(1), tag.RowsAffected())
	pgtest.Exec(t, pool, steps(2)[3])
	row := find(t, pool, "k")
	assert.Equal(t, keys.Finished, row.State)
	assert.Equal(t, []string{"reserve", "pay"}, row.Phases)
}

func TestMain(m *testing.M) { pgtest.Main(m) }

const schema = "effectonce"

var ana = operator.By{Who: "ana@ops", Why: "asked the bank"}

// key makes a key in a state: locked, free or put off (running), finished, over (finished, its
// window too), indeterminate or abandoned, or work (in one transaction, indeterminate). It is of
// scope t and operation charge, has done "reserve", and has asked for "secret".
func key(t *testing.T, pool *pgxpool.Pool, name, state string) keys.Place {
	t.Helper()
	pgtest.Exec(t, pool, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, phases, calling, call, data, request, lock_token,
			locked_until, locked_by, attempts, error, retry_at, status, body, finished_at, expires_at, flow)
		SELECT 't', 'charge', $1, sha256('x'), CASE WHEN $2 IN ('locked', 'free', 'put off') THEN 'running' WHEN $2 = 'over' THEN 'finished' WHEN $2 = 'work' THEN 'indeterminate' ELSE $2 END,
			'{reserve}', CASE WHEN $2 = 'indeterminate' THEN 'pay' END, CASE WHEN $2 = 'indeterminate' THEN 'once' END, '{}', 'secret', 7,
			CASE $2 WHEN 'locked' THEN clock_timestamp() + interval '1 hour' WHEN 'free' THEN clock_timestamp() - interval '1 second' END,
			'worker-1', 3, CASE WHEN $2 NOT IN ('finished', 'over') THEN 'timeout' END,
			CASE $2 WHEN 'put off' THEN clock_timestamp() + interval '1 hour' END,
			CASE WHEN $2 IN ('finished', 'over') THEN 201 END, CASE WHEN $2 IN ('finished', 'over') THEN 'done'::bytea END,
			CASE WHEN $2 IN ('finished', 'over') THEN clock_timestamp() END,
			CASE $2 WHEN 'finished' THEN clock_timestamp() + interval '1 hour' WHEN 'over' THEN clock_timestamp() - interval '1 hour' END,
			CASE WHEN $2 <> 'work' THEN 'charge' END`, name, state)
	return keys.Place{Scope: "t", Operation: "charge", Key: name}
}

// find returns the one key of a name.
func find(t *testing.T, pool *pgxpool.Pool, name string) keys.Row {
	t.Helper()
	rows, err := keys.Find(t.Context(), pool, schema, keys.Name{Key: name})
	require.NoError(t, err)
	require.Len(t, rows, 1)
	return rows[0]
}

// charge is a flow of two phases: it reserves, which is an effect in the database, and pays, which
// is a foreign call.
func charge(t *testing.T, pool *pgxpool.Pool, cfg idempotency.Config, pay idempotency.Phase[struct{}]) *idempotency.Flow[struct{}] {
	t.Helper()
	cfg.Operation = "charge"
	op, err := idempotency.New(pool, cfg)
	require.NoError(t, err)
	pay.Name = "pay"
	pay.Write = func(_ context.Context, _ pgx.Tx, step *idempotency.Step[struct{}]) error {
		step.Finish(idempotency.Response{Status: 201, Body: []byte("paid")})
		return nil
	}
	flow, err := idempotency.NewFlow(op, idempotency.FlowConfig[struct{}]{StoreRequest: true}, idempotency.Phase[struct{}]{
		Name: "reserve",
		Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[struct{}]) error {
			_, err := tx.Exec(ctx, "INSERT INTO reserved (key) VALUES ($1)", step.Key.Value)
			return err
		},
	}, pay)
	require.NoError(t, err)
	return flow
}

const reservedSQL = "CREATE TABLE reserved (id bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL)"

var named = idempotency.Key{Scope: "t", Value: "k"}
