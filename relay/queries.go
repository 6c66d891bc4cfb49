package relay

import "github.com/effectonce/effectonce/migrations"

// acquireSQL takes a lease that is free or over, on the database's clock, and begins a new epoch. It
// returns no row while somebody else holds it.
const acquireSQL = `-- relay.acquire
INSERT INTO effectonce.outbox_progress AS p (relay, shard, owner, lease_until, epoch, system_identifier)
VALUES ($1, $2, $3, clock_timestamp() + $4::interval, 1, $5)
ON CONFLICT (relay, shard) DO UPDATE SET
  owner = excluded.owner, lease_until = excluded.lease_until, epoch = p.epoch + 1,
  system_identifier = coalesce(p.system_identifier, excluded.system_identifier)
WHERE p.lease_until IS NULL OR p.lease_until < clock_timestamp()
RETURNING epoch, tick, next_tick, seq, floor, system_identifier`

const renewSQL = `-- relay.renew
UPDATE effectonce.outbox_progress SET lease_until = clock_timestamp() + $4::interval
WHERE relay = $1 AND shard = $2 AND epoch = $3`

// releaseSQL ends the lease now, so that another replica need not wait for it to run out.
const releaseSQL = `-- relay.release
UPDATE effectonce.outbox_progress SET lease_until = NULL, owner = NULL
WHERE relay = $1 AND shard = $2 AND epoch = $3`

const systemSQL = `-- relay.system
SELECT system_identifier FROM pg_control_system()`

const seqSQL = `-- relay.seq
SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM effectonce.outbox_seq_seq`

const primarySQL = `-- relay.primary
SELECT NOT pg_is_in_recovery()`

// fetchSQL reads, in seq order, the rows that became visible between the tick behind the cursor and the
// tick before it. $1 divides them: a row with a seq above the earlier tick's seq_last is found by its
// seq and must not be visible in the earlier snapshot ($2); a row up to it belongs to a transaction that
// was open in that snapshot, and each of those ($3) is looked up by its id. $4 is where the last page ended.
// Both branches walk an index in order and stop at the page's size, so a page costs the same on a backlog
// of ten rows and of ten million. (The second compares pairs: with txid = … the planner would, on some
// statistics, walk the index on seq and filter the whole table.)
//
// $6 is the later tick while a batch takes several pages, so that each page reads the same batch; null
// reads up to now, and the statement's own snapshot, which comes back with the rows, becomes the tick.
// The sequence is read after the snapshot was taken: what it says counts for later ticks (publisher.seqSafe).
//
// The snapshots are computed once, in now: written into the conditions they would be computed for each
// row. The join keeps the order of the page, and readPage checks it: sorting again would copy every row.
// Casts get new names: under the old name a cast would be what ORDER BY sees.
const fetchSQL = `-- relay.fetch
WITH now AS MATERIALIZED (
  SELECT pg_current_snapshot()::text AS snapshot,
    (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM effectonce.outbox_seq_seq) AS seq_last,
    $2::text::pg_snapshot AS since, coalesce($6::text::pg_snapshot, pg_current_snapshot()) AS until
)
SELECT now.snapshot, now.seq_last, page.seq, page.id, page.topic, page.key, page.payload, page.headers::text AS headers_text, page.created_at
FROM now LEFT JOIN (
  SELECT * FROM (
    (SELECT o.seq, o.id, o.topic, o.key, o.payload, o.headers, o.created_at
     FROM effectonce.outbox o
     WHERE o.seq > $1 AND NOT pg_visible_in_snapshot(o.txid, (SELECT since FROM now))
       AND pg_visible_in_snapshot(o.txid, (SELECT until FROM now))
     ORDER BY o.seq LIMIT $5)
    UNION ALL
    (SELECT late.*
     FROM pg_catalog.unnest($3::text[]::xid8[]) AS open (txid) CROSS JOIN LATERAL (
       SELECT o.seq, o.id, o.topic, o.key, o.payload, o.headers, o.created_at
       FROM effectonce.outbox o
       WHERE (o.txid, o.seq) > (open.txid, $4) AND (o.txid, o.seq) <= (open.txid, $1)
         AND pg_visible_in_snapshot(o.txid, (SELECT until FROM now))
       ORDER BY o.txid, o.seq LIMIT $5) late)
  ) candidates ORDER BY seq LIMIT $5
) page ON true`

const loadTickSQL = `-- relay.load_tick
SELECT snapshot::text, seq_last FROM effectonce.outbox_ticks WHERE tick = $1`

const storeTickSQL = `-- relay.store_tick
INSERT INTO effectonce.outbox_ticks (snapshot, seq_last) VALUES ($1::text::pg_snapshot, $2) RETURNING tick`

// advanceSQL changes nothing when the epoch is over: then somebody else publishes.
const advanceSQL = `-- relay.advance
UPDATE effectonce.outbox_progress SET
  tick = $4, next_tick = $5, seq = $6, floor = greatest(floor, $7), published = published + $8,
  updated_at = clock_timestamp()
WHERE relay = $1 AND shard = $2 AND epoch = $3`

// pruneSQL forgets ticks that no reader stands on. An hour of them stays, for people.
const pruneSQL = `-- relay.prune_ticks
DELETE FROM effectonce.outbox_ticks
WHERE tick IN (
  SELECT tick FROM effectonce.outbox_ticks
  WHERE tick > 0 AND created_at < clock_timestamp() - interval '1 hour'
    AND tick < (SELECT min(tick) FROM effectonce.outbox_progress)
  ORDER BY tick LIMIT 10000)`

// restampSQL and rebaseSQL: see recover.go.
const restampSQL = `-- relay.restamp
UPDATE effectonce.outbox SET txid = pg_current_xact_id() WHERE seq > $1`

const rebaseSQL = `-- relay.rebase
UPDATE effectonce.outbox_progress SET tick = $4, next_tick = NULL, seq = 0, system_identifier = $5, updated_at = clock_timestamp()
WHERE relay = $1 AND shard = $2 AND epoch = $3`

const deadExistSQL = `-- relay.dead_exist
SELECT EXISTS (SELECT FROM effectonce.outbox_dead WHERE relay = $1)`

// heldSQL finds which rows of a page stand behind a dead one of their key.
const heldSQL = `-- relay.held
SELECT page.place::int FROM unnest($2::text[], $3::bytea[]) WITH ORDINALITY AS page (topic, key, place)
WHERE EXISTS (
  SELECT FROM effectonce.outbox_dead d
  WHERE d.relay = $1 AND d.topic = page.topic AND sha256(d.key) = sha256(page.key) AND d.key = page.key)`

const burySQL = `-- relay.bury
INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, key, payload, headers, created_at, reason, error, state)
SELECT $1, o.seq, o.id, o.topic, o.key, o.payload, o.headers, o.created_at, d.reason, d.error,
  CASE d.reason WHEN 'behind' THEN 'behind' ELSE 'held' END
FROM unnest($2::bigint[], $3::text[], $4::text[]) AS d (seq, reason, error)
JOIN effectonce.outbox o USING (seq)
ON CONFLICT (relay, seq) DO NOTHING`

// missingTopicsSQL lists what waits for a topic to be created.
const missingTopicsSQL = `-- relay.missing_topics
SELECT DISTINCT topic FROM effectonce.outbox_dead WHERE relay = $1 AND reason = 'unknown_topic' AND state = 'held'`

const retryTopicSQL = `-- relay.retry_topic
UPDATE effectonce.outbox_dead SET state = 'retry'
WHERE relay = $1 AND topic = ANY ($2) AND reason = 'unknown_topic' AND state = 'held'`

// releasableSQL lists dead rows with no held row of their key at or before them, in order. Rows without
// a key hold nobody.
const releasableSQL = `-- relay.releasable
SELECT d.seq, d.id, d.topic, d.key, d.payload, d.headers::text AS headers_text, d.created_at
FROM effectonce.outbox_dead d
WHERE d.relay = $1 AND d.state <> 'held' AND NOT EXISTS (
  SELECT FROM effectonce.outbox_dead h
  WHERE h.relay = d.relay AND h.topic = d.topic AND sha256(h.key) = sha256(d.key) AND h.key = d.key
    AND h.seq < d.seq AND h.state = 'held')
ORDER BY d.seq LIMIT $2`

// exhumeSQL removes released rows, if the epoch still is the caller's.
const exhumeSQL = `-- relay.exhume
DELETE FROM effectonce.outbox_dead WHERE relay = $1 AND seq = ANY ($4)
  AND EXISTS (SELECT FROM effectonce.outbox_progress WHERE relay = $1 AND shard = $2 AND epoch = $3)`

const holdAgainSQL = `-- relay.hold_again
UPDATE effectonce.outbox_dead d SET state = 'held', reason = f.reason, error = f.error, attempts = d.attempts + 1
FROM unnest($2::bigint[], $3::text[], $4::text[]) AS f (seq, reason, error)
WHERE d.relay = $1 AND d.seq = f.seq`

type queries struct {
	seq, acquire, renew, release, fetch, loadTick, storeTick, advance, prune, restamp, rebase string
	deadExist, held, bury, missingTopics, retryTopic, releasable, exhume, holdAgain           string
}

func newQueries(schema string) queries {
	in := func(sql string) string { return migrations.InSchema(sql, schema) }
	return queries{
		seq: in(seqSQL), acquire: in(acquireSQL), renew: in(renewSQL), release: in(releaseSQL), fetch: in(fetchSQL),
		loadTick: in(loadTickSQL), storeTick: in(storeTickSQL), advance: in(advanceSQL), prune: in(pruneSQL),
		restamp: in(restampSQL), rebase: in(rebaseSQL), deadExist: in(deadExistSQL), held: in(heldSQL),
		bury: in(burySQL), missingTopics: in(missingTopicsSQL), retryTopic: in(retryTopicSQL),
		releasable: in(releasableSQL), exhume: in(exhumeSQL), holdAgain: in(holdAgainSQL),
	}
}
