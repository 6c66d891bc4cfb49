package doctor

import (
	"context"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// RoleRights lists what the doctor asks for, as PostgreSQL shows it.
func RoleRights(schema, part string) (lines []string) {
	needed, _ := roleRights(schema, part)
	for _, r := range needed {
		if r.columns == "" {
			lines = append(lines, r.privilege+" "+r.name)
		}
		for column := range strings.FieldsSeq(r.columns) {
			lines = append(lines, r.privilege+" "+r.name+"."+column)
		}
	}
	return lines
}

// StoredDefinitions is what Definitions compares, as definitions.txt has it.
func StoredDefinitions(ctx context.Context, db operator.Querier, schema string) (string, error) {
	stored, _, err := readDefinitions(ctx, db, schema)
	var text strings.Builder
	for _, d := range stored {
		text.WriteString(d.digest(schema) + " " + d.Kind + " " + d.Name + "\n")
	}
	return text.String(), err
}
