package migrations

import (
	"cmp"
	_ "embed" // of roles.sql
	"fmt"
	"regexp"
	"strings"
)

//go:embed roles.sql
var rolesSQL string

var roleWord = regexp.MustCompile(`\b` + DefaultSchema + `_(publisher|relay|consumer|endpoint|operator)\b`)

// Roles returns the SQL that creates the group roles PREFIX_publisher, PREFIX_relay,
// PREFIX_consumer, PREFIX_endpoint and PREFIX_operator, each with the rights that it needs in the
// schema of opts. Run it in one transaction as the role that owns the tables, at the latest version
// of the schema. It may be run again at any time. The prefix has the bounds of a schema's name; if
// it is empty, it is the schema's name.
func Roles(opts Options, prefix string) (string, error) {
	schema, err := opts.Resolve()
	if err != nil {
		return "", err
	}
	prefix = cmp.Or(prefix, schema)
	if !schemaName.MatchString(prefix) || strings.HasPrefix(prefix, "pg_") {
		return "", fmt.Errorf("prefix of roles %q: want at most 49 lower-case letters, digits and underscores, not starting with a digit or pg_", prefix)
	}
	// Replace the roles first: a schema may have the same name as a role. The inserted names need
	// no quotes.
	return InSchema(roleWord.ReplaceAllString(rolesSQL, prefix+"_$1"), schema), nil
}
