package dedup

import "github.com/effectonce/effectonce/migrations"

// fenceSQL stores the versions that are newer than the stored ones, and returns their resources.
// The WHERE of the update decides. A row that fails it is locked too, so readFencesSQL in the same
// transaction shows the version that it was compared with. Each resource occurs once, and they are
// sorted: two calls that lock the same rows in the same order cannot deadlock. For a resource that
// was never fenced, any version is newer.
const fenceSQL = `-- dedup.fence
INSERT INTO effectonce.fences AS f (scope, resource, version, content)
SELECT $1, v.resource, v.version, v.content
FROM ROWS FROM (pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::bigint[]), pg_catalog.unnest($4::uuid[])) AS v (resource, version, content)
ON CONFLICT (scope, resource) DO UPDATE SET version = excluded.version, content = excluded.content
WHERE f.version < excluded.version
RETURNING resource`

// fenceNextSQL stores only the version that follows the stored one. A resource that was never
// fenced begins with $5 at most. Reading its row is not a race: a concurrent insert makes this a
// gap, and the next attempt finds the gap closed. It is a scalar subquery because EXISTS could
// become a hash of all fences.
const fenceNextSQL = `-- dedup.fence_next
INSERT INTO effectonce.fences AS f (scope, resource, version, content)
SELECT $1, v.resource, v.version, v.content
FROM ROWS FROM (pg_catalog.unnest($2::text[]), pg_catalog.unnest($3::bigint[]), pg_catalog.unnest($4::uuid[])) AS v (resource, version, content)
WHERE v.version <= $5 OR (SELECT true FROM effectonce.fences AS known WHERE known.scope = $1 AND known.resource = v.resource)
ON CONFLICT (scope, resource) DO UPDATE SET version = excluded.version, content = excluded.content
WHERE f.version = excluded.version - 1
RETURNING resource`

// readFencesSQL follows one of the two above in the same round trip. It is a separate statement
// because those two see neither their own writes nor rows that were committed after they began.
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
