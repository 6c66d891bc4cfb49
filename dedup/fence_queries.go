package dedup

// fenceSQL stores a version that is newer than the stored one; for a resource that was never fenced,
// any version is newer. The WHERE of the update decides. A row that fails it is locked too.
const fenceSQL = `-- dedup.fence
INSERT INTO effectonce.fences AS f (scope, resource, version) VALUES ($1, $2, $3)
ON CONFLICT (scope, resource) DO UPDATE SET version = excluded.version WHERE f.version OPERATOR(pg_catalog.<) excluded.version`
