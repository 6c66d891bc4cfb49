package dedup

import "github.com/effectonce/effectonce/migrations"

// claimSQL inserts every ID in one statement. The IDs arrive sorted and without repetition: two batches
// that lock the same rows in the same order cannot deadlock, and what RETURNING lists is exactly what
// was fresh. There is no conflict target because the primary key is the only constraint. An unqualified
// unnest could be one for uuid[] in the caller's search path, which fits better than PostgreSQL's own.
const claimSQL = `-- dedup.claim
INSERT INTO effectonce.processed_messages (message_id, consumer)
SELECT id, $2 FROM pg_catalog.unnest($1::uuid[]) AS id
ON CONFLICT DO NOTHING
RETURNING message_id`

// registerSQL hands the row back whether it is new or not, so that the caller can compare the group.
// DO UPDATE is what makes RETURNING see a row of somebody else; it also locks it against a concurrent
// registration. The group is never overwritten.
const registerSQL = `-- dedup.register
INSERT INTO effectonce.consumers AS c (name, consumer_group, topics) VALUES ($1, $2, coalesce($3::text[], '{}'))
ON CONFLICT (name) DO UPDATE SET topics = CASE WHEN c.consumer_group = excluded.consumer_group THEN excluded.topics ELSE c.topics END
RETURNING id, consumer_group`

type queries struct{ claim, register string }

func newQueries(schema string) queries {
	return queries{
		claim:    migrations.InSchema(claimSQL, schema),
		register: migrations.InSchema(registerSQL, schema),
	}
}
