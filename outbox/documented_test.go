package outbox_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: the SQL of the documents publishes: plain INSERTs, and the trigger for each row that is written.
func TestDocumentedSQLPublishes(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE orders (id text PRIMARY KEY, amount int)`)
	require.NoError(t, err)
	block := regexp.MustCompile("(?ms)^```sql\n(.*?)^```$")
	for path, blocks := range map[string]int{"../README.md": 1, "../docs/how-to/publish.md": 2} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		found := block.FindAllStringSubmatch(string(text), -1)
		require.Len(t, found, blocks, path)
		for _, sql := range found {
			_, err := pool.Exec(t.Context(), sql[1])
			require.NoError(t, err, sql[1])
		}
	}
	_, err = pool.Exec(t.Context(), `INSERT INTO orders VALUES ('order-2', 7); UPDATE orders SET amount = 8`)
	require.NoError(t, err)
	var keys, payloads []string
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT array_agg(convert_from(key, 'UTF8') ORDER BY seq), array_agg(convert_from(payload, 'UTF8')::jsonb ->> 'amount' ORDER BY seq)
		FROM effectonce.outbox WHERE convert_from(key, 'UTF8') = 'order-2'`).Scan(&keys, &payloads))
	require.Equal(t, []string{"order-2", "order-2"}, keys)
	require.Equal(t, []string{"7", "8"}, payloads)
	var rows int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM effectonce.outbox WHERE convert_from(key, 'UTF8') = 'order-1'`).Scan(&rows))
	require.Equal(t, 2, rows)
}
