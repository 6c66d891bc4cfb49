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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
)

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
