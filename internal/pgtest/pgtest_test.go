package pgtest_test

import (
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/pgtest"
)

// A transaction that a test forgot, and an outbox row from another cluster, fail the test with
// words that lead to the cause.
func TestInvariantsAreChecked(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn, observer := pgtest.Connect(t, address), pgtest.Connect(t, address)
	violations := func() string {
		found, err := pgtest.Violations(t.Context(), observer)
		require.NoError(t, err)
		return found
	}
	require.Empty(t, violations())

	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT 'forgotten'")
	require.NoError(t, err)
	require.Contains(t, violations(), "idle in transaction")
	require.Contains(t, violations(), "forgotten")
	require.NoError(t, tx.Rollback(t.Context()))

	_, err = conn.Exec(t.Context(), `INSERT INTO effectonce.outbox (txid, topic) VALUES ('9000000000', 'restored')`)
	require.NoError(t, err)
	require.Equal(t, "an outbox row is newer than the cluster's transactions: txid 9000000000", violations())
	_, err = conn.Exec(t.Context(), "DELETE FROM effectonce.outbox")
	require.NoError(t, err)
	require.Empty(t, violations())
}

// DATABASE_URL may have both forms that libpq knows.
func TestAnotherDatabaseOfTheSameServer(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"postgres://u:p@host:1/app?sslmode=disable": "postgres://u:p@host:1/own?sslmode=disable",
		"host=h dbname=app user=u":                  "host=h dbname=app user=u dbname=own",
	} {
		assert.Equal(t, want, pgtest.WithDatabase(address, "own"))
		config, err := pgx.ParseConfig(pgtest.WithDatabase(address, "own"))
		require.NoError(t, err)
		assert.Equal(t, "own", config.Database)
	}
}

// The clock of the tests' servers is as far from the tests' own as .ci/clock says: the shared one's and
// a cluster's. Their timeouts last as long as without it.
func TestClockIsAsFarAwayAsAsked(t *testing.T) {
	t.Parallel()
	hours, _ := strconv.Atoi(os.Getenv("TEST_CLOCK_HOURS"))
	for name, address := range map[string]string{"shared": pgtest.Database(t), "own": pgtest.Cluster(t, nil).URL} {
		var there time.Time
		conn := pgtest.Connect(t, address)
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&there))
		require.WithinDuration(t, time.Now().Add(time.Duration(hours)*time.Hour), there, time.Minute, name)
		begun := time.Now()
		_, err := conn.Exec(t.Context(), "SET statement_timeout = 300; SELECT pg_sleep(60)")
		require.ErrorContains(t, err, "statement timeout")
		require.GreaterOrEqual(t, time.Since(begun), 250*time.Millisecond)
	}
}
