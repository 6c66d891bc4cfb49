package dedup

import (
	"strings"

	"github.com/effectonce/effectonce/migrations"
)

// insertSQL inserts every ID in one statement. The IDs are sorted and unique: two batches that lock
// the same rows in the same order cannot deadlock, and RETURNING lists exactly the fresh IDs. There
// is no conflict target because the primary key is the only constraint. (An unnest of several arrays
// is always PostgreSQL's own.) freshSQL takes every ID as fresh.
const (
	insertSQL = `
INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint)
SELECT m.id, $2, m.fingerprint FROM unnest($1::uuid[], $3::int4[]) AS m (id, fingerprint)`
	freshSQL = `-- dedup.fresh` + insertSQL
	claimSQL = `-- dedup.claim` + insertSQL + `
ON CONFLICT DO NOTHING
RETURNING message_id`
)

// conflictsSQL is planned each time, for the partitions of its IDs: a plan for all arguments that was made while a
// partition was empty reads it once for each message.
const conflictsSQL = `-- dedup.conflicts
SELECT m.n FROM unnest($1::uuid[], $3::int4[]) WITH ORDINALITY AS m (id, fingerprint, n)
JOIN effectonce.processed_messages p ON p.message_id = m.id AND p.consumer = $2
WHERE p.message_id = ANY ($1::uuid[]) AND p.fingerprint <> m.fingerprint`

// registerSQL returns the row whether it is new or not, so that the caller can compare the group.
// DO UPDATE lets RETURNING see a row of another transaction; it also locks the row against a
// concurrent registration. It never overwrites the group, the rule for IDs, nor whether the consumer
// forgets.
const registerSQL = `-- dedup.register
INSERT INTO effectonce.consumers AS c (name, consumer_group, topics, dedup_window, id_rule, aliases) VALUES ($1, $2, coalesce($3::text[], '{}'), $4::interval, $5, coalesce($6::text[], '{}'))
ON CONFLICT (name) DO UPDATE SET
  topics = CASE WHEN c.consumer_group = excluded.consumer_group THEN excluded.topics ELSE c.topics END,
  aliases = CASE WHEN c.consumer_group = excluded.consumer_group THEN excluded.aliases ELSE c.aliases END,
  dedup_window = CASE WHEN c.consumer_group = excluded.consumer_group AND (c.dedup_window IS NULL) = (excluded.dedup_window IS NULL)
    THEN excluded.dedup_window ELSE c.dedup_window END
RETURNING id, consumer_group, dedup_window IS NULL, id_rule, coalesce((SELECT extract(epoch FROM before.dedup_window)::float8 FROM effectonce.consumers before
  WHERE before.name = $1 AND before.dedup_window <> $4::interval), 0)`

// forgottenSQL follows the claim. A claim that waited for maintenance, or came after it, sees the
// mark here, because each statement has its own snapshot.
const forgottenSQL = `-- dedup.forgotten
SELECT (SELECT forgotten_to FROM effectonce.consumers WHERE id = $1)`

// forgottenLockedSQL is for transactions that have one snapshot for all statements. The lock makes
// PostgreSQL report that the row is newer than the snapshot (40001). The lock is released at once:
// otherwise maintenance, which writes the row, would never find it unlocked.
const (
	forgottenBeforeSQL = "SAVEPOINT effectonce_forgotten"
	forgottenLockedSQL = `-- dedup.forgotten_locked
SELECT (SELECT forgotten_to FROM effectonce.consumers WHERE id = $1 FOR SHARE)`
	forgottenAfterSQL  = "ROLLBACK TO SAVEPOINT effectonce_forgotten"
	forgottenBehindSQL = "RELEASE SAVEPOINT effectonce_forgotten"
)

// leaseSQL takes the lease if it is free.
const leaseSQL = `-- dedup.lease
INSERT INTO effectonce.maintenance AS m (job, owner, lease_until, epoch) VALUES ('claims', $1, clock_timestamp() + $2::interval, 1)
ON CONFLICT (job) DO UPDATE SET owner = excluded.owner, lease_until = clock_timestamp() + $2::interval, epoch = m.epoch + 1
WHERE m.lease_until IS NULL OR m.lease_until < clock_timestamp()
RETURNING epoch`

const leaseDoneSQL = `-- dedup.lease_done
UPDATE effectonce.maintenance SET lease_until = NULL, done_at = CASE WHEN $2 THEN clock_timestamp() ELSE done_at END
WHERE job = 'claims' AND epoch = $1`

const lockSettingsSQL = `-- dedup.lock_settings
SELECT set_config('lock_timeout', $1, true), set_config('statement_timeout', $2, true),
  set_config('idle_in_transaction_session_timeout', $3, true)`

// aheadSQL reads where the partition for later times begins, and where it should begin.
const aheadSQL = `-- dedup.ahead
SELECT pg_catalog.to_timestamp(('x' || pg_catalog.substr(replace(bound, '-', ''), 1, 12))::bit(48)::bigint::numeric / 1000.0),
  (pg_catalog.date_trunc('day', clock_timestamp() AT TIME ZONE 'UTC') + pg_catalog.make_interval(days => $2)) AT TIME ZONE 'UTC'
FROM (SELECT (pg_catalog.regexp_match(pg_catalog.pg_get_expr(c.relpartbound, c.oid), 'FROM \(''([0-9a-f-]{36})''\)'))[1] AS bound
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = 'processed_messages_ahead') b`

// daysSQL lists the daily partitions by their bounds; their names are only for people. A partition
// of zero bytes was truncated, or never used.
const daysSQL = `-- dedup.days
SELECT relname, bounds[1]::uuid, bounds[2]::uuid, bytes
FROM (SELECT c.relname, coalesce(pg_catalog.pg_relation_size(c.oid), 0) AS bytes, pg_catalog.regexp_match(pg_catalog.pg_get_expr(c.relpartbound, c.oid), 'FROM \(''([0-9a-f-]{36})''\) TO \(''([0-9a-f-]{36})''\)') AS bounds
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = $1 AND c.relispartition AND c.relname OPERATOR(pg_catalog.~) '^processed_messages_[0-9]{8}$') d
WHERE bounds IS NOT NULL ORDER BY 2`

// horizonSQL reads the time up to which the longest window allows forgetting, and the slowest
// position of the consumers that forget, both with a margin. A position without any record has no
// time until its consumer has reached the end of its partition. A record from the future proves
// nothing. Of several positions as slow, the first one is named, always the same.
const horizonSQL = `-- dedup.horizon
SELECT (SELECT clock_timestamp() - pg_catalog.max(dedup_window) - $1::interval FROM effectonce.consumers),
  p.passed, CASE WHEN p.topic IS NOT NULL THEN pg_catalog.format('group %s, topic %s, partition %s', p.consumer_group, p.topic, p.partition) END
FROM (SELECT 1) AS one
LEFT JOIN LATERAL (SELECT q.*,
    CASE WHEN greatest(q.record_time, q.caught_up_at) < clock_timestamp() THEN greatest(q.record_time, q.caught_up_at)
      WHEN greatest(q.record_time, q.caught_up_at) IS NOT NULL THEN clock_timestamp() END - $1::interval AS passed
  FROM effectonce.consumer_positions q
  WHERE EXISTS (SELECT FROM effectonce.consumers c WHERE c.consumer_group = q.consumer_group AND c.dedup_window IS NOT NULL)
  ORDER BY greatest(q.record_time, q.caught_up_at) NULLS FIRST, q.consumer_group, q.topic, q.partition LIMIT 1) AS p ON true`

// holdersSQL lists the consumers that have claims in a day.
const holdersSQL = `-- dedup.holders
SELECT DISTINCT consumer FROM %s`

// markSQL records that claims of messages up to a time may be missing: of the given consumers, or
// of all that forget.
const markSQL = `-- dedup.mark
UPDATE effectonce.consumers SET forgotten_to = greatest(forgotten_to, $1)
WHERE dedup_window IS NOT NULL AND ($2::int[] IS NULL OR id = ANY ($2::int[])) AND (forgotten_to < $1) IS NOT FALSE`

// sweepStateSQL reads the number of blocks of a table, and the block at which the sweep continues.
const sweepStateSQL = `-- dedup.sweep_state
SELECT pg_catalog.pg_relation_size($1::regclass) / pg_catalog.current_setting('block_size')::bigint,
  coalesce((SELECT (state ->> $2)::bigint FROM effectonce.maintenance WHERE job = 'claims'), 0)`

const sweptSQL = `-- dedup.swept
UPDATE effectonce.maintenance SET state = state || pg_catalog.jsonb_build_object($2::text, $3::bigint) WHERE job = 'claims' AND epoch = $1`

// sweepSQL reads only a range of blocks. It uses the longest window for a consumer that is no
// longer registered. It deletes a claim when the claim's window is over and the slowest position of
// its group has passed the claim's time. The same statement moves the marks. A message was produced
// before its claim, but by a clock that may be ahead. So the mark gets the same margin that the
// deleted claims had before the slowest position.
const sweepSQL = `-- dedup.sweep
WITH slowest AS MATERIALIZED (
  SELECT consumer_group, pg_catalog.min(coalesce(greatest(record_time, caught_up_at), '-infinity')) AS passed
  FROM effectonce.consumer_positions GROUP BY consumer_group
), cutoff AS MATERIALIZED (
  SELECT c.id, least(clock_timestamp() - c.dedup_window, s.passed) - $3::interval AS before
  FROM effectonce.consumers c LEFT JOIN slowest s USING (consumer_group) WHERE c.dedup_window IS NOT NULL
), gone AS (
  DELETE FROM %s p WHERE p.ctid >= $1 AND p.ctid < $2
    AND p.processed_at < coalesce((SELECT before FROM cutoff WHERE id = p.consumer),
      (SELECT clock_timestamp() - pg_catalog.max(dedup_window) - $3::interval FROM effectonce.consumers
       WHERE NOT EXISTS (SELECT FROM effectonce.consumers c WHERE c.id = p.consumer)))
  RETURNING p.consumer, p.processed_at
), marks AS MATERIALIZED (
  SELECT consumer, pg_catalog.max(processed_at) + $3::interval AS forgotten_to, count(*) AS n FROM gone GROUP BY consumer
), raised AS (
  UPDATE effectonce.consumers c SET forgotten_to = greatest(c.forgotten_to, m.forgotten_to)
  FROM marks m WHERE m.consumer = c.id AND (c.forgotten_to < m.forgotten_to) IS NOT FALSE
)
SELECT coalesce(pg_catalog.sum(n), 0)::bigint FROM marks`

const statsSQL = `-- dedup.stats
SELECT coalesce(pg_catalog.sum(pg_catalog.pg_stat_get_live_tuples(relid::oid)), 0)::bigint, coalesce(pg_catalog.sum(pg_catalog.pg_total_relation_size(relid)), 0)::bigint,
  pg_catalog.pg_stat_get_live_tuples('effectonce.processed_messages_untimed'::regclass::oid), pg_catalog.pg_stat_get_live_tuples('effectonce.processed_forever'::regclass::oid),
  pg_catalog.pg_total_relation_size('effectonce.processed_forever'::regclass),
  (SELECT extract(epoch FROM clock_timestamp() - done_at)::float8 FROM effectonce.maintenance WHERE job = 'claims')
FROM pg_catalog.pg_partition_tree('effectonce.processed_messages') WHERE isleaf`

// fenceSQL stores a version that is newer than the stored one; for a resource that was never fenced,
// any version is newer. The WHERE of the update decides. A row that fails it is locked too.
const fenceSQL = `-- dedup.fence
INSERT INTO effectonce.fences AS f (scope, resource, version) VALUES ($1, $2, $3)
ON CONFLICT (scope, resource) DO UPDATE SET version = excluded.version WHERE f.version OPERATOR(pg_catalog.<) excluded.version`

// queries are the statements for one schema and one table of claims.
type queries struct {
	claim, conflicts, fresh              string
	register, forgotten, forgottenLocked string
}

func newQueries(schema string) map[bool]queries {
	sql := map[bool]queries{}
	for forever, table := range map[bool]string{false: "effectonce.processed_messages", true: "effectonce.processed_forever"} {
		in := func(sql string) string {
			return migrations.InSchema(strings.ReplaceAll(sql, "effectonce.processed_messages", table), schema)
		}
		sql[forever] = queries{
			claim: in(claimSQL), conflicts: in(conflictsSQL), fresh: in(freshSQL),
			register: in(registerSQL), forgotten: in(forgottenSQL), forgottenLocked: in(forgottenLockedSQL),
		}
	}
	return sql
}
