package dedup

import "github.com/effectonce/effectonce/migrations"

// fenceSQL stores the versions that are newer than what is stored, and lists them; the WHERE of the update
// decides. Where it refuses, the row is locked all the same, so that readFencesSQL in the same transaction
// shows what it was compared with. Each resource occurs once and they come sorted: two calls that lock the
// same rows in the same order cannot deadlock. A resource that was never fenced counts as older than any.
const fenceSQL = `-- dedup.fence
INSERT INTO effectonce.fences AS f (scope, resource, version, content)
SELECT $1, v.resource, v.version, v.content
FROM ROWS FROM (pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::bigint[]), pg_catalog.unnest($4::uuid[])) AS v (resource, version, content)
ON CONFLICT (scope, resource) DO UPDATE SET version = excluded.version, content = excluded.content
WHERE f.version < excluded.version
RETURNING resource`

// fenceNextSQL stores only the version that follows the stored one. A resource that was never fenced begins
// with $5 at most. The look for its row is no race: whoever inserts it meanwhile makes this a gap, which the
// next attempt finds closed. It is a scalar subquery because EXISTS could become a hash of all fences.
const fenceNextSQL = `-- dedup.fence_next
INSERT INTO effectonce.fences AS f (scope, resource, version, content)
SELECT $1, v.resource, v.version, v.content
FROM ROWS FROM (pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::bigint[]), pg_catalog.unnest($4::uuid[])) AS v (resource, version, content)
WHERE v.version <= $5 OR (SELECT true FROM effectonce.fences AS known WHERE known.scope = $1 AND known.resource = v.resource)
ON CONFLICT (scope, resource) DO UPDATE SET version = excluded.version, content = excluded.content
WHERE f.version = excluded.version - 1
RETURNING resource`

// readFencesSQL follows one of the two above in the same round trip. It is a statement of its own because
// theirs sees neither what they wrote nor a row that was committed after they began.
const readFencesSQL = `-- dedup.read_fences
SELECT resource, version, content FROM effectonce.fences WHERE scope = $1 AND resource = ANY ($2::text[])`

type fenceQueries struct{ newer, next, read string }

func newFenceQueries(schema string) fenceQueries {
	return fenceQueries{
		newer: migrations.InSchema(fenceSQL, schema),
		next:  migrations.InSchema(fenceNextSQL, schema),
		read:  migrations.InSchema(readFencesSQL, schema),
	}
}
