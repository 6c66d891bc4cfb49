package parked_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/parked"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// runbook returns the sections of docs/runbook.md by title.
func runbook(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../../../docs/runbook.md")
	require.NoError(t, err)
	sections := map[string]string{}
	for _, section := range regexp.MustCompile(`(?m)^##+ `).Split(string(text), -1) {
		title, body, _ := strings.Cut(section, "\n")
		sections[title] = body
	}
	return sections
}

// statements returns the SQL of a section.
func statements(t *testing.T, section string) (all []string) {
	t.Helper()
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1) {
		all = append(all, block[1])
	}
	return all
}

// Every reason has its paragraph in the documentation for operators, with something to do.
func TestEveryReasonIsDocumented(t *testing.T) {
	t.Parallel()
	sections := runbook(t)
	for _, reason := range parked.Reasons() {
		assert.Regexp(t, `(?i)retry|retried|discard`, sections[reason], "docs/runbook.md, section %q", reason)
	}
}

// The documented SQL does what the commands do; what the consumers add of themselves is added here.
func TestDocumentedSQLDoesTheSame(t *testing.T) {
	t.Parallel()
	sql := statements(t, runbook(t)["With plain SQL"])
	require.Len(t, sql, 2)
	rows := []string{"a failed parked", "a behind behind", "b too_large parked", "- failed retry"}
	const named = "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('orders', 'order-4711') WHERE \"offset\" = 1"
	for i, act := range []func(*testing.T, string){
		func(t *testing.T, address string) { t.Helper(); retry(t, connect(t, address), 1, 2, 3, 4) },
		func(t *testing.T, address string) { t.Helper(); discard(t, connect(t, address), false, 1) },
	} {
		plain, command := pgtest.Database(t), pgtest.Database(t)
		for _, address := range []string{plain, command} {
			park(t, connect(t, address), rows...)
			exec(t, connect(t, address), named)
		}
		before := left(t, connect(t, plain))
		exec(t, connect(t, plain), sql[i])
		exec(t, connect(t, plain), mendSQL)
		act(t, command)
		after := left(t, connect(t, command))
		assert.NotEqual(t, before, after)
		assert.Equal(t, after, left(t, connect(t, plain)), sql[i])
	}
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('billing-old', 't', 0)")
	forget := statements(t, runbook(t)["A group that is gone holds retention back"])
	require.Len(t, forget, 1)
	exec(t, conn, forget[0])
	var positions, written int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM effectonce.consumer_positions), (SELECT count(*) FROM effectonce.operator_actions)").Scan(&positions, &written))
	assert.Zero(t, positions)
	assert.Equal(t, 1, written)
}
