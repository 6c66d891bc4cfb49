package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// A table is starved when its dead rows reach starvedFactor times the number at which autovacuum
// begins, and at least starvedRowsMin.
const (
	starvedFactor  = 10
	starvedRowsMin = 10_000
)

// Autovacuum checks that autovacuum is on and keeps up with our tables.
func Autovacuum(ctx context.Context, db operator.Querier, schema string) []Finding {
	const check = "autovacuum"
	var on, counts bool
	if err := db.QueryRow(ctx, autovacuumSQL).Scan(&on, &counts); err != nil {
		return broken(check, err)
	}
	var found []Finding
	for _, setting := range []struct {
		name string
		on   bool
	}{{"autovacuum", on}, {"track_counts", counts}} {
		if !setting.on {
			found = append(found, warn(check, "ALTER SYSTEM SET "+setting.name+" = on; SELECT pg_reload_conf();",
				"%s is off: tables grow, and statements become slower until VACUUM is run by hand", setting.name))
		}
	}
	rows, err := db.Query(ctx, starvedSQL, schema, starvedFactor, starvedRowsMin)
	if err != nil {
		return broken(check, err)
	}
	var name string
	var off, starved bool
	var dead int64
	var vacuumed *float64
	_, err = pgx.ForEachRow(rows, []any{&name, &off, &starved, &dead, &vacuumed}, func() error {
		table := pgx.Identifier{schema, name}.Sanitize()
		if off {
			found = append(found, warn(check, "ALTER TABLE "+table+" RESET (autovacuum_enabled);", "autovacuum is off for table %s", name))
		}
		if starved {
			last := "never vacuumed"
			if vacuumed != nil {
				last = "vacuumed " + age(*vacuumed).String() + " ago"
			}
			found = append(found, warn(check, "VACUUM (ANALYZE) "+table+"; -- if the dead rows stay: see the findings of \"transactions\" and \"replication\"; else raise autovacuum_max_workers or autovacuum_vacuum_cost_limit",
				"table %s has %d dead rows and was %s: autovacuum does not keep up", name, dead, last))
		}
		return nil
	})
	if err != nil {
		return broken(check, err)
	}
	if len(found) == 0 {
		found = append(found, ok(check, "it is on and keeps up"))
	}
	return found
}
