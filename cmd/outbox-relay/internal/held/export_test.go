package held

import (
	"crypto/sha256"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/migrations"
)

// Plans runs the statements about a row with the key "key 7" in a transaction that is rolled back,
// and returns their plans, each after the tag of its statement.
func Plans(t *testing.T, conn *pgx.Conn, k Kind, ref Ref) (plans []string) {
	t.Helper()
	hash := sha256.Sum256([]byte("key 7"))
	row := Row{Ref: ref, Topic: "orders", Hash: hash[:]}
	if k == Parked {
		row.ConsumerID, row.Partition = 1, new(int32)
	}
	refs, queues, sql := refArgs([]Ref{ref}), queueArgs([]Row{row}), k.sql()
	change := slices.Concat(refs, []any{[]string{"{}"}, "who", "what", "why"})
	for _, c := range []struct {
		sql  string
		args []any
	}{
		{sql.lock, refs},
		{sql.lockQueues, refs},
		{sql.retry, change},
		{sql.discard, append(slices.Clip(change), false)},
		{sql.discard, append(slices.Clip(change), true)},
		{sql.promoted, queues},
		{sql.progress, append(slices.Clip(queues), []int64{ref.Seq}, []int64{100_000}, "what", time.Now())},
		{sql.show, []any{ref.Relay, ref.Seq, 3}},
		{sql.next, []any{ref.Relay, ref.Seq, nextMax}},
	} {
		name, _, _ := strings.Cut(c.sql, "\n")
		plans = append(plans, name+"\n"+pgtest.Plan(t, conn, migrations.InSchema(c.sql, "effectonce"), c.args...))
	}
	return plans
}
