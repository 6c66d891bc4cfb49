package doctor

import (
	"context"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Publishers checks that lists of topics limit the roles that they name. It returns no finding if
// the role may not read the lists. There are none then, unless they were copied without what
// enforces them.
func Publishers(ctx context.Context, db operator.Querier, schema string) []Finding {
	const check = "publishers"
	var readable bool
	if err := db.QueryRow(ctx, inSchema(publishersReadableSQL, schema)).Scan(&readable); err != nil {
		return broken(check, err)
	}
	if !readable {
		return nil
	}
	var lists int64
	var missing, unknown, mighty []string
	if err := db.QueryRow(ctx, inSchema(publishersSQL, schema)).Scan(&lists, &missing, &unknown, &mighty); err != nil {
		return broken(check, err)
	}
	var found []Finding
	if lists > 0 && len(missing) > 0 {
		found = append(found, fail(check, "as the owner of the tables: outbox-relay migrate roles --apply; where the trigger is disabled: ALTER TABLE … ENABLE TRIGGER outbox_topic_allowed",
			"%s limited to listed topics, and nothing checks inserts into %s: any publisher can publish to any topic", human.Count(lists, "role"), strings.Join(missing, ", ")))
	}
	if len(unknown) > 0 {
		found = append(found, warn(check, "outbox-relay publishers free ROLE; then limit the role under its current name",
			"lists of topics name roles that do not exist, and so limit no role: %s", oneLine(strings.Join(unknown, ", "))))
	}
	if len(mighty) > 0 {
		found = append(found, warn(check, "REVOKE UPDATE ON outbox FROM ROLE, or outbox-relay publishers free ROLE",
			"lists of topics do not limit roles that may update the outbox: %s", oneLine(strings.Join(mighty, ", "))))
	}
	switch {
	case len(found) > 0:
		return found
	case lists == 0:
		return []Finding{ok(check, "no role is limited to topics")}
	}
	return []Finding{ok(check, "%s limited to listed topics", human.Count(lists, "role"))}
}
