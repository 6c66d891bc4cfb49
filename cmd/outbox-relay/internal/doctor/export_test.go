package doctor

import (
	"context"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// KeysSQL is a statement whose plan a test checks.
const KeysSQL = keysSQL

// RoleRights lists what the doctor asks for: of a relay, and of an operator.
func RoleRights(schema string) (relay, operators []string) {
	list := func(needed []right) (lines []string) {
		for _, r := range needed {
			for privilege := range strings.SplitSeq(r.privileges, ",") {
				privilege, columns, some := strings.Cut(strings.TrimSuffix(privilege, ")"), "(")
				if !some {
					lines = append(lines, privilege+" "+r.name)
				}
				for column := range strings.FieldsSeq(columns) {
					lines = append(lines, privilege+" "+r.name+"."+column)
				}
			}
		}
		return lines
	}
	return list(append(relayRights(schema), statusRights()...)), list(operatorRights(schema))
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
