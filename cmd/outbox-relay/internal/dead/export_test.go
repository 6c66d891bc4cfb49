package dead

import (
	"crypto/sha256"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Plans runs the statements about some rows in a transaction that is rolled back, and returns their
// plans.
func Plans(t *testing.T, conn *pgx.Conn, schema string, places []Place) map[string]string {
	t.Helper()
	hash := sha256.Sum256([]byte("key 7"))
	relays, seqs := []string{places[0].Relay}, []int64{places[0].Seq}
	topics, hashes := []string{"orders"}, [][]byte{hash[:]}
	plans := map[string]string{}
	for sql, args := range map[string][]any{
		lockSQL:       {relays, seqs},
		lockQueuesSQL: {relays, seqs},
		retrySQL:      {relays, seqs, []string{"{}"}, "who", "why"},
		discardSQL:    {relays, seqs, []string{"{}"}, "who", "why", true},
		promoteSQL:    {relays, topics, hashes},
		outcomesSQL:   {relays, seqs, []int64{seqs[0] + 100_000}, relays, topics, hashes},
		nextSQL:       {relays[0], seqs[0], nextMax},
	} {
		name, _, _ := strings.Cut(sql, "\n")
		plans[name] = pgtest.Plan(t, conn, inSchema(sql, schema), args...)
	}
	return plans
}
