package held_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func runbook(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../../../docs/runbook.md")
	require.NoError(t, err)
	return string(text)
}

// sections returns the sections of docs/runbook.md by title.
func sections(t *testing.T) map[string]string {
	t.Helper()
	byTitle := map[string]string{}
	for _, section := range regexp.MustCompile(`(?m)^##+ `).Split(runbook(t), -1) {
		title, body, _ := strings.Cut(section, "\n")
		byTitle[title] = body
	}
	return byTitle
}

// statements returns the SQL of a section.
func statements(section string) (all []string) {
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1) {
		all = append(all, block[1])
	}
	return all
}

// The documentation for operators has every reason, and its SQL does what it says: a row is fixed
// in its place, what is held is retried, only what is held is discarded, and a row that is too
// large is refused.
func TestDeadDocumentedSQLDoesWhatItSays(t *testing.T) {
	t.Parallel()
	_, section, found := strings.Cut(runbook(t), "\n## Dead rows\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	for _, reason := range dead.Reasons() {
		assert.Contains(t, section, "\n| `"+reason+"` | ")
	}
	blocks := statements(section)
	require.Len(t, blocks, 2)
	steps := strings.SplitAfter(strings.TrimSpace(blocks[0]), ";\n")
	require.Len(t, steps, 3)

	conn := connect(t, pgtest.Database(t))
	dead.insert(t, conn, "a bad_headers held", "a behind behind", "b refused retry")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET seq = seq + 4710")
	exec(t, conn, steps[0])
	var mended int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox_dead WHERE headers ? 'trace'").Scan(&mended))
	assert.Equal(t, 1, mended)
	exec(t, conn, steps[1])
	assert.Equal(t, []string{"4711 bad_headers retry", "4712 behind behind", "4713 refused retry"}, dead.left(t, conn))
	exec(t, conn, steps[2])
	assert.Len(t, dead.left(t, conn), 3, "the relay may be publishing it")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held' WHERE seq = 4711")
	exec(t, conn, steps[2])
	assert.Equal(t, []string{"4712 behind behind", "4713 refused retry"}, dead.left(t, conn))

	exec(t, conn, blocks[1])
	const insert = "INSERT INTO effectonce.outbox (topic, payload) SELECT 't', convert_to(repeat('x', $1), 'UTF8')"
	exec(t, conn, insert, 999_000)
	_, err := conn.Exec(t.Context(), insert, 1_000_000)
	require.ErrorContains(t, err, "outbox_record_is_too_large")
}

// Every reason has its paragraph in the documentation for operators, with something to do.
func TestEveryParkedReasonIsDocumented(t *testing.T) {
	t.Parallel()
	titled := sections(t)
	for _, reason := range parked.Reasons() {
		assert.Regexp(t, `(?i)retry|retried|discard`, titled[reason], "docs/runbook.md, section %q", reason)
	}
}

// The documented SQL does what the commands do; what the consumers add of themselves is added here.
func TestParkedDocumentedSQLDoesTheSame(t *testing.T) {
	t.Parallel()
	sql := statements(sections(t)["With plain SQL"])
	require.Len(t, sql, 2)
	rows := []string{"a failed parked", "a behind behind", "b too_large parked", "- failed retry"}
	const named = "UPDATE effectonce.parked_messages SET message_id = effectonce.message_id('orders', 'order-4711') WHERE \"offset\" = 1"
	for i, act := range []func(*testing.T, string, []held.Ref){
		func(t *testing.T, address string, refs []held.Ref) {
			t.Helper()
			parked.act(t, connect(t, address), retry, refs...)
		},
		func(t *testing.T, address string, refs []held.Ref) {
			t.Helper()
			parked.act(t, connect(t, address), discard, refs[0])
		},
	} {
		plain, command := pgtest.Database(t), pgtest.Database(t)
		var refs []held.Ref
		for _, address := range []string{plain, command} {
			refs = parked.insert(t, connect(t, address), rows...)
			exec(t, connect(t, address), named)
		}
		before := parked.left(t, connect(t, plain))
		exec(t, connect(t, plain), sql[i])
		exec(t, connect(t, plain), mendParkedSQL)
		act(t, command, refs)
		after := parked.left(t, connect(t, command))
		assert.NotEqual(t, before, after)
		assert.Equal(t, after, parked.left(t, connect(t, plain)), sql[i])
	}
	conn := connect(t, pgtest.Database(t))
	exec(t, conn, "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition) VALUES ('billing-old', 't', 0)")
	forget := statements(sections(t)["A group that is gone holds retention back"])
	require.Len(t, forget, 1)
	exec(t, conn, forget[0])
	var positions, written int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM effectonce.consumer_positions), (SELECT count(*) FROM effectonce.operator_actions)").Scan(&positions, &written))
	assert.Zero(t, positions)
	assert.Equal(t, 1, written)
}

// mendParkedSQL is what a consumer does at its next takeover.
const mendParkedSQL = `
UPDATE effectonce.parked_messages p SET state = CASE WHEN p.reason = 'behind' THEN 'retry' ELSE 'parked' END
FROM (SELECT DISTINCT ON (key) seq FROM effectonce.parked_messages WHERE key IS NOT NULL ORDER BY key, seq) first
WHERE p.seq = first.seq AND p.state = 'behind'`
