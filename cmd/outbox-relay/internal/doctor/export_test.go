package doctor

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// KeysSQL is a statement whose plan a test checks.
const KeysSQL = keysSQL

// WaitingSeqs returns what the statement behind every count finds, for each relay.
func WaitingSeqs(ctx context.Context, db operator.Querier, schema string, limit int) (map[string][]int64, error) {
	all, err := ReadProgress(ctx, db, schema)
	if err != nil {
		return nil, err
	}
	found := map[string][]int64{}
	for _, p := range all {
		rows, err := db.Query(ctx, inSchema("SELECT seq FROM ("+waitingRows+") w ORDER BY seq", schema), p.waiting().args(limit)...)
		if err != nil {
			return nil, err
		}
		if found[p.relay], err = pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// ExplainWaiting runs the same statement and returns its plan.
func ExplainWaiting(ctx context.Context, db operator.Querier, schema string, limit int) ([]byte, error) {
	all, err := ReadProgress(ctx, db, schema)
	if err != nil {
		return nil, err
	}
	var plan []byte
	sql := inSchema("EXPLAIN (ANALYZE, FORMAT JSON) SELECT count(*), min(created_at) FROM ("+waitingRows+") w", schema)
	err = db.QueryRow(ctx, sql, all[0].waiting().args(limit)...).Scan(&plan)
	return plan, err
}

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
