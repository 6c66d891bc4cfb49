package pipeline

import "github.com/effectonce/effectonce/migrations"

// CountSQL is the statement behind every count, of the shards of one relay.
func CountSQL(shards []Progress, limit int) (string, []any) {
	return migrations.InSchema(countSQL, "effectonce"), waitingArgs(shards, limit)
}

// CutOf is the Cut of the shards of one relay.
func CutOf(shards []Progress) *Cut { return cutOf(shards) }

// KeysSQL is a statement whose plan a test checks.
const KeysSQL = keysSQL
