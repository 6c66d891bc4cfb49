package parked

import (
	"crypto/sha256"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Plans runs the statements about some rows in a transaction that is rolled back, and returns their
// plans.
func Plans(t *testing.T, conn *pgx.Conn, schema string, seqs []int64) map[string]string {
	t.Helper()
	hash := sha256.Sum256([]byte("key 7"))
	one := []any{[]int32{1}, []string{"orders"}, []int32{0}, [][]byte{hash[:]}}
	plans := map[string]string{}
	for sql, args := range map[string][]any{
		lockSQL:       {seqs},
		lockQueuesSQL: {seqs},
		retrySQL:      {seqs, []string{"{}"}, "who", "why"},
		discardSQL:    {seqs, []string{"{}"}, "who", "why", false},
		promotedSQL:   one,
		outcomesSQL:   append([]any{seqs, []int64{seqs[0] + 100_000}}, one...),
		behindSQL:     {seqs[0], behindMax},
	} {
		name, _, _ := strings.Cut(sql, "\n")
		plans[name] = pgtest.Plan(t, conn, inSchema(sql, schema), args...)
	}
	return plans
}
