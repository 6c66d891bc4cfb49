package integration_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/servers"
)

// pooler is a PgBouncer in front of a database, in transaction mode.
type pooler struct{ *servers.Pooler }

// newPooler starts a PgBouncer in front of the database at address.
func newPooler(t *testing.T, address string, settings ...string) pooler {
	t.Helper()
	poolerVersion(t)
	p, err := servers.StartPooler(t.Context(), servers.PoolerOptions{DatabaseURL: address, Settings: settings})
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s said:\n%s", p.Description, p.Log())
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		_ = p.Stop(ctx)
	})
	return pooler{p}
}

// describeOnly makes pgx send no named statement, which belongs to one server connection. PgBouncer
// knows named ones from 1.21 on, where max_prepared_statements allows them.
const describeOnly = "default_query_exec_mode=cache_describe"

// poolerVersion is that of the PgBouncer for the tests, without which they are skipped.
func poolerVersion(t *testing.T) string {
	t.Helper()
	_, version, err := servers.FindPooler(t.Context())
	if errors.Is(err, servers.ErrNoPooler) && os.Getenv("REQUIRE_CONTAINERS") != "1" {
		t.Skip("LOUD SKIP: " + err.Error())
	}
	require.NoError(t, err, "with REQUIRE_CONTAINERS=1 it is required")
	return version
}

// url leads to the database through PgBouncer. parameters are of the form name=value.
func (p pooler) url(parameters ...string) string {
	return strings.Join(append([]string{p.URL}, parameters...), "&")
}

// kill ends it like a crash.
func (p pooler) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, p.Kill(t.Context()))
}
