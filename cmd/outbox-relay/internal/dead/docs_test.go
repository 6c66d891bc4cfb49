package dead_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/dead"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// The documentation for operators has every reason, and its SQL does what it says: a row is fixed
// in its place, what is held is retried, only what is held is discarded, and a row that is too
// large is refused.
func TestDocumentedSQLDoesWhatItSays(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../../docs/runbook.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Dead rows\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	for _, reason := range dead.Reasons() {
		assert.Contains(t, section, "\n| `"+reason+"` | ")
	}
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1)
	require.Len(t, blocks, 2)
	steps := strings.SplitAfter(strings.TrimSpace(blocks[0][1]), ";\n")
	require.Len(t, steps, 3)

	conn := connect(t, pgtest.Database(t))
	insertDead(t, conn, "a bad_headers held", "a behind behind", "b refused retry")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET seq = seq + 4710")
	exec(t, conn, steps[0])
	var mended int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.outbox_dead WHERE headers ? 'trace'").Scan(&mended))
	assert.Equal(t, 1, mended)
	exec(t, conn, steps[1])
	assert.Equal(t, []string{"4711 bad_headers retry", "4712 behind behind", "4713 refused retry"}, left(t, conn))
	exec(t, conn, steps[2])
	assert.Len(t, left(t, conn), 3, "the relay may be publishing it")
	exec(t, conn, "UPDATE effectonce.outbox_dead SET state = 'held' WHERE seq = 4711")
	exec(t, conn, steps[2])
	assert.Equal(t, []string{"4712 behind behind", "4713 refused retry"}, left(t, conn))

	exec(t, conn, blocks[1][1])
	const insert = "INSERT INTO effectonce.outbox (topic, payload) SELECT 't', convert_to(repeat('x', $1), 'UTF8')"
	exec(t, conn, insert, 999_000)
	_, err = conn.Exec(t.Context(), insert, 1_000_000)
	require.ErrorContains(t, err, "outbox_record_is_too_large")
}
