package doctor_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func readStatus(t *testing.T, conn *pgx.Conn, opts pipeline.StatusOptions) *pipeline.Status {
	t.Helper()
	status, err := pipeline.ReadStatus(t.Context(), conn, "effectonce", opts)
	require.NoError(t, err)
	return status
}

// Each kind of problem with requests is found alone, with its remedy. A request that is running, or
// finished within its window, is none.
func TestRequestsThatNobodyEnds(t *testing.T) {
	t.Parallel()
	const insert = `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state, created_at, locked_until, retry_at, expires_at)
		VALUES ('t', 'charge', 'k', sha256('x'), $1, now() - interval '3 hours', now() + $2::interval, now() + $3::interval, now() + $4::interval)`
	conn := connect(t, pgtest.Database(t))
	for name, c := range map[string]struct {
		values []any
		want   string // empty: all is well
		remedy string
	}{
		"indeterminate":             {[]any{"indeterminate", nil, nil, nil}, "1 requests are indeterminate", "outbox-relay keys list --state indeterminate"},
		"abandoned":                 {[]any{"abandoned", nil, nil, nil}, "1 requests are abandoned", "outbox-relay keys list --state abandoned"},
		"stuck":                     {[]any{"running", "-61 min", nil, nil}, "no process has worked on them for 1h", "outbox-relay keys list --state stuck --older-than 1h"},
		"never locked":              {[]any{"running", nil, nil, nil}, "no process has worked on them", "--state stuck"},
		"over":                      {[]any{"finished", nil, nil, "-2 hours"}, "whose window ended 2h", "outbox-relay keys reap"},
		"locked":                    {[]any{"running", "1 min", nil, nil}, "", ""},
		"its lock has just ended":   {[]any{"running", "-1 min", nil, nil}, "", ""},
		"put off for hours":         {[]any{"running", nil, "1 min", nil}, "are postponed repeatedly", "keys list --state running --older-than 1h"},
		"over for a moment":         {[]any{"finished", nil, nil, "-1 min"}, "", ""},
		"within its window":         {[]any{"finished", nil, nil, "1 hour"}, "", ""},
		"finished, never forgotten": {[]any{"finished", nil, nil, nil}, "", ""},
	} {
		exec(t, conn, "TRUNCATE effectonce.idempotency_keys")
		exec(t, conn, insert, c.values...)
		f := only(t, doctor.IdempotencyKeys(t.Context(), conn, "effectonce"))
		if c.want == "" {
			assert.Equal(t, doctor.OK, f.Severity, "%s: %s", name, f.Message)
			continue
		}
		says(t, f, doctor.Warn, c.want, c.remedy)
	}
	exec(t, conn, "TRUNCATE effectonce.idempotency_keys")
	exec(t, conn, `INSERT INTO effectonce.idempotency_keys (scope, operation, key, fingerprint, state) SELECT 't', 'charge', n::text, sha256('x'), 'abandoned' FROM generate_series(1, 10010) n`)
	says(t, about(doctor.IdempotencyKeys(t.Context(), conn, "effectonce"), "keys")[0], doctor.Warn, "10000 or more requests", "--state abandoned")
}

// destroys finds commands that take away what is stored: records of a topic, positions, claims,
// rows, slots, promises of a prepared transaction. (delete.retention.ms is how long the compactor
// keeps marks, not records.)
var destroys = regexp.MustCompile(`(?i)(^|[^.])retention\.(ms|bytes)\s*=|cleanup\.policy\s*=|` +
	`kafka-delete-records|--delete\b|reset-offsets|unclean|` +
	`\bdelete\s+from\b|\btruncate\s+(table|only|%|"|[a-z_]+[.;"])|\bdrop\s+(table|schema|database|role|owned|topic|index|column|constraint|trigger|function|if)\b|pg_drop_|\brollback prepared\b|` +
	`pg_resetwal|\bmigrate (down|to)\b|\b(relays|topics|position) delete\b|\b(parked|dead) discard\b|\bdiscard them\b|\bkeep less\b`)

// harmless asserts that a remedy destroys nothing.
func harmless(t *testing.T, f doctor.Finding) {
	t.Helper()
	assert.NotRegexp(t, destroys, f.Remedy, f.Check)
}

// tables are literals that destroy nothing although they name what does: they are no remedies.
var tables = regexp.MustCompile(`^((SELECT|INSERT|UPDATE|DELETE|TRUNCATE)(\([a-z_ ]+\))?,?)+$`)

// Property: no text of this package, of which every remedy is made, proposes what destroys; and
// topics are only given settings that delete no record.
func TestRemediesDestroyNothing(t *testing.T) {
	t.Parallel()
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	texts, settings := 0, 0
	for _, entry := range files {
		if !strings.HasSuffix(entry.Name(), ".go") || strings.HasSuffix(entry.Name(), "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), entry.Name(), nil, 0)
		require.NoError(t, err)
		ast.Inspect(file, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.CallExpr:
				if name, ok := node.Fun.(*ast.Ident); ok && name.Name == "alterTopic" {
					settings++
					setting, ok := node.Args[1].(*ast.BasicLit)
					require.True(t, ok, "%s: the setting is a literal", entry.Name())
					assert.Contains(t, []string{`"max.message.bytes"`, `"min.insync.replicas"`, `"segment.bytes"`}, setting.Value, entry.Name())
				}
			case *ast.BasicLit:
				if node.Kind != token.STRING {
					break
				}
				text, err := strconv.Unquote(node.Value)
				require.NoError(t, err)
				texts++
				if !tables.MatchString(text) {
					assert.NotRegexp(t, destroys, text, entry.Name())
				}
			}
			return true
		})
	}
	assert.Greater(t, texts, 300)
	assert.GreaterOrEqual(t, settings, 5)
}

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	connect = pgtest.Connect
	exec    = pgtest.Exec
)

// says requires what a finding says, with a remedy that destroys nothing if all is not well.
func says(t *testing.T, f doctor.Finding, severity doctor.Severity, message string, remedies ...string) {
	t.Helper()
	assert.Equal(t, severity, f.Severity, "%+v", f)
	assert.Contains(t, f.Message, message)
	for _, remedy := range remedies {
		assert.Contains(t, f.Remedy, remedy, f.Message)
	}
	if f.Severity != doctor.OK {
		assert.NotEmpty(t, f.Remedy, "%+v", f)
		harmless(t, f)
	}
}

// about returns the findings of a check.
func about(findings []doctor.Finding, check string) (found []doctor.Finding) {
	for _, f := range findings {
		if f.Check == check {
			found = append(found, f)
		}
	}
	return found
}

// only returns the one finding of a check.
func only(t *testing.T, findings []doctor.Finding) doctor.Finding {
	t.Helper()
	require.Len(t, findings, 1, "%+v", findings)
	f := findings[0]
	if f.Severity != doctor.OK {
		require.NotEmpty(t, f.Remedy, "%+v", f)
	}
	return f
}
