package queue

import (
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Plans runs the statements about a row with the key "key 7" in a transaction that is rolled back,
// and returns their plans, each after the tag of its statement.
func Plans[P comparable, R any, F Filter](t *testing.T, conn *pgx.Conn, table *Table[P, R, F], place P) (plans []string) {
	t.Helper()
	places, subjects, last := table.places([]P{place}), []string{"{}"}, []int64{100_000}
	one := table.queues([]locked[P]{{place: place, consumer: 1, topic: "orders", key: human.Key("key 7")}})
	for _, c := range []struct {
		sql  string
		args []any
	}{
		{table.sql.lock, places},
		{table.sql.lockQueues, places},
		{table.sql.retry, slices.Concat(places, []any{subjects, "who", "why"})},
		{table.sql.discard, slices.Concat(places, []any{subjects, "who", "why", false})},
		{table.sql.discard, slices.Concat(places, []any{subjects, "who", "why", true})},
		{table.sql.promote, one},
		{table.sql.outcomes, slices.Concat(places, []any{last}, one)},
		{table.sql.next, append(table.into(&place), nextMax)},
	} {
		name, _, _ := strings.Cut(c.sql, "\n")
		plans = append(plans, name+"\n"+pgtest.Plan(t, conn, table.inSchema(c.sql), c.args...))
	}
	return plans
}
