package relay

import (
	"strings"
	"sync"

	"github.com/effectonce/effectonce/migrations"
)

// fetchSettingsSQL forces the planner to walk the indexes in order, with one generic plan. On
// outdated statistics the planner would sort the rest of the outbox for each page, and planning
// costs ten times as much as a poll that finds nothing. The settings end with the transaction. They
// precede *every* fetch: a plan that was made without them stays with the statement, since these
// settings do not invalidate it.
const fetchSettingsSQL = `-- relay.fetch_settings
SELECT set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true),
  set_config('jit', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true)`

// probeSQL is the query of a reader whose last page had few rows: while the snapshot is the same,
// no other row is visible.
const probeSQL = `-- relay.probe
SELECT pg_current_snapshot()::text`

// enrollSQL registers a relay with its initial number of shards.
const enrollSQL = `-- relay.enroll
INSERT INTO effectonce.outbox_relays (relay, shards) VALUES ($1, $2) ON CONFLICT (relay) DO NOTHING`

// beatSQL registers this replica as alive and renews the leases that it holds. $4 to $6 are their
// shards and epochs, and the runs of the server that they were taken in; a lease that was released
// concurrently has no owner. It returns one row for each shard: whether it was renewed, and which
// topics are paused. $7 are the pauses that this replica obeys. $8 and $9 are its state and its
// problem. The other replicas decide by the state which ones share the shards.
const beatSQL = `-- relay.beat
WITH alive AS (
  INSERT INTO effectonce.outbox_replicas AS r (relay, owner, alive_until, obeys, state, problem)
  VALUES ($1, $2, clock_timestamp() + $3::interval, $7::text[]::uuid[], $8, $9)
  ON CONFLICT (relay, owner) DO UPDATE SET alive_until = excluded.alive_until, obeys = excluded.obeys, state = excluded.state, problem = excluded.problem
), renewed AS (
  UPDATE effectonce.outbox_progress p SET lease_until = clock_timestamp() + $3::interval
  FROM unnest($4::smallint[], $5::bigint[], $6::text[]) AS mine (shard, epoch, run)
  WHERE p.relay = $1 AND p.shard = mine.shard AND p.epoch = mine.epoch AND p.owner = $2 AND mine.run = ` + serverRun + `
  RETURNING p.shard
)
SELECT r.shards, others.states, s.shard::smallint,
  p.shard IS NULL OR p.lease_until IS NULL OR p.lease_until < clock_timestamp() AS free,
  EXISTS (SELECT FROM renewed WHERE renewed.shard = s.shard) AS renewed, waiting.topics AS paused, waiting.ids AS pauses
FROM effectonce.outbox_relays r
CROSS JOIN LATERAL (SELECT coalesce(pg_catalog.jsonb_object_agg(owner, coalesce(state, '')), '{}') AS states
  FROM effectonce.outbox_replicas
  WHERE relay = $1 AND owner <> $2 AND alive_until > clock_timestamp()) others
CROSS JOIN LATERAL (SELECT coalesce(pg_catalog.array_agg(topic ORDER BY id), '{}') AS topics, coalesce(pg_catalog.array_agg(id::text ORDER BY id), '{}') AS ids
  FROM effectonce.outbox_paused WHERE relay = $1) waiting
CROSS JOIN LATERAL generate_series(0, r.shards - 1) AS s (shard)
LEFT JOIN effectonce.outbox_progress p ON p.relay = r.relay AND p.shard = s.shard
WHERE r.relay = $1
ORDER BY s.shard`

// leaveSQL removes a replica from the list, and replicas that died an hour ago or more. With $3 it
// releases what the replica may still hold: a stop can interrupt a statement that takes a lease.
const leaveSQL = `-- relay.leave
WITH released AS (UPDATE effectonce.outbox_progress SET lease_until = NULL, owner = NULL WHERE relay = $1 AND owner = $2 AND $3)
DELETE FROM effectonce.outbox_replicas WHERE relay = $1 AND (owner = $2 OR alive_until < clock_timestamp() - interval '1 hour')`

// acquireSQL takes a lease that is free or expired, on the database's clock, and begins a new
// epoch. It returns no row while another replica holds the lease, and no row on a server whose run
// is not $1. It locks the relay's row, so that the number of shards does not change during the
// statement.
//
// The chain of progress continues with a row that repeats the last one. From then on a previous
// holder finds its next number taken. If that holder wrote a row after this statement's snapshot, the
// statement fails with 23505. The place in the progress topic is only where a search begins, so the
// one in the last row is correct, no matter who wrote it.
const acquireSQL = `-- relay.acquire
WITH taken AS (
INSERT INTO effectonce.outbox_progress AS p (relay, shard, shards, owner, lease_until, epoch, system_identifier, timeline)
SELECT r.relay, $3, r.shards, $4, clock_timestamp() + $5::interval,
  greatest((SELECT a.epoch FROM effectonce.outbox_advances a WHERE a.relay = $2 AND a.shard = $3 ORDER BY a.n DESC LIMIT 1), 0) + 1, $6, $7
FROM effectonce.outbox_relays r WHERE r.relay = $2 AND r.shards > $3 AND ` + here + ` FOR SHARE
ON CONFLICT (relay, shard) DO UPDATE SET
  owner = excluded.owner, lease_until = excluded.lease_until, epoch = p.epoch + 1,
  system_identifier = coalesce(p.system_identifier, excluded.system_identifier), timeline = greatest(p.timeline, excluded.timeline)
WHERE p.lease_until IS NULL OR p.lease_until < clock_timestamp()
RETURNING relay, shard, epoch, shards, system_identifier, timeline
), newest AS (
  SELECT a.* FROM effectonce.outbox_advances a WHERE a.relay = $2 AND a.shard = $3 ORDER BY a.n DESC LIMIT 1
), known AS (
  SELECT t.*, coalesce(a.tick, 0) AS tick, a.next_tick, coalesce(a.seq, 0) AS seq, coalesce(a.floor, 0) AS floor, coalesce(a.epoch, 0) AS made,
    coalesce(a.published, 0) AS published, (SELECT journal_offset FROM newest) AS journal_offset, coalesce((SELECT n FROM newest), 0) + 1 AS n
  FROM taken t LEFT JOIN newest a ON a.epoch >= 0
), begun AS (
  INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published, journal_offset)
  SELECT relay, shard, n, made, tick, next_tick, seq, floor, published, journal_offset FROM known
)
SELECT epoch, shards, tick, next_tick, seq, floor, system_identifier, timeline, made, published, n, journal_offset FROM known`

// releaseSQL ends the lease now, so that another replica need not wait until it expires.
const releaseSQL = `-- relay.release
UPDATE effectonce.outbox_progress SET lease_until = NULL, owner = NULL WHERE relay = $1 AND shard = $2 AND epoch = $3`

// slotsSQL reads the state of the outbox's slots. The relay keeps a slot for $1 after it turned
// away from it. It turns away from a slot that has been filled for half of $1, or that is larger
// than $2.
const slotsSQL = `-- relay.slots
SELECT s.slot, s.slot = c.last_value, size.bytes,
  size.bytes > 0 AND (s.turned_to + $1::interval / 2::float8 < clock_timestamp() OR size.bytes > $2::bigint),
  coalesce(s.turned_away, s.turned_to) + $1::interval < clock_timestamp()
FROM effectonce.outbox_slots s, effectonce.outbox_slot c
CROSS JOIN LATERAL pg_relation_size(('effectonce.outbox_' || s.slot::text)::regclass) AS size (bytes)
ORDER BY s.slot`

// rotateSQL rotates from slot $1 to slot $2. The sequence is not part of the transaction. If the
// sequence turns and the rest does not happen, the times are wrong until the next turn, which only
// keeps rows for longer.
const rotateSQL = `-- relay.rotate
WITH away AS (UPDATE effectonce.outbox_slots SET turned_away = clock_timestamp() WHERE slot = $1),
towards AS (UPDATE effectonce.outbox_slots SET turned_to = clock_timestamp(), turned_away = NULL WHERE slot = $2)
SELECT pg_catalog.setval('effectonce.outbox_slot', $2) WHERE (SELECT last_value FROM effectonce.outbox_slot) = $1`

// lockSettingsSQL limits the wait for a lock. It also ends a transaction whose process froze inside
// it, or was cut off: otherwise its locks would block all other sessions until TCP gives up.
const lockSettingsSQL = `-- relay.lock_settings
SELECT set_config('lock_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $2, true), ` + flushed

// flushed makes the commit of a transaction, and all commits before it, outlive a crash, also where the
// database's default is synchronous_commit off. With ExactlyOnce the next commit in Kafka no longer names
// what the last one did to dead rows.
const flushed = `set_config('synchronous_commit',
  CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'off' THEN 'on' ELSE pg_catalog.current_setting('synchronous_commit') END, true)`

// unpublishedSQL reports whether a slot has rows that some relay has not published. These are the
// rows that were not visible in its tick; they are found by their transaction ids. Up to the floor
// everything is published. That includes rows that a restore brought with transaction ids that this
// cluster has not reached: such a row was written under another id than the one it names. A row
// that was written here (its xmin is the transaction that it names, or one of its subtransactions,
// which have the ids behind it) and that is not visible is unpublished, whatever its number is:
// that number may have been assigned twice. Where the sequence is behind, other rows may be
// unpublished, too. A shard that was never leased, or whose ticks belong to another cluster ($1), is
// not known to have published anything.
//
// The first part locks the outbox before the slot, and is not executed: see lockSlotSQL.
const unpublishedSQL = `-- relay.unpublished
WITH outbox_first AS (SELECT FROM effectonce.outbox WHERE false)
SELECT EXISTS (
  SELECT FROM effectonce.outbox_progress_now p LEFT JOIN effectonce.outbox_ticks t USING (tick)
  WHERE t.tick IS NULL OR p.system_identifier <> $1 OR EXISTS (
    SELECT FROM effectonce.outbox_%[1]d o
    WHERE (o.txid >= pg_snapshot_xmax(t.snapshot) OR o.txid = ANY (ARRAY(SELECT pg_snapshot_xip(t.snapshot)))) AND o.shard OPERATOR(pg_catalog.%%) p.shards = p.shard
      AND (o.seq > p.floor OR pg_catalog.mod(o.xmin::text::numeric - pg_catalog.mod(o.txid::text::numeric, 4294967296::numeric) + 4294967296::numeric, 4294967296::numeric) < 1000000::numeric))
) OR EXISTS (
  SELECT FROM effectonce.outbox_relays r WHERE r.shards > (SELECT count(*) FROM effectonce.outbox_progress p WHERE p.relay = r.relay))
OR (SELECT behind FROM effectonce.outbox_sequence_state())`

// lockSlotSQL takes the locks in the order of a TRUNCATE of the outbox: the table, the slot, and
// its sequence. fetchSQL does the same: it reads the sequence while it runs.
const lockSlotSQL = `-- relay.lock_slot
LOCK TABLE ONLY effectonce.outbox IN ACCESS SHARE MODE;
LOCK TABLE effectonce.outbox_%d IN ACCESS EXCLUSIVE MODE`

const truncateSQL = `-- relay.truncate
TRUNCATE effectonce.outbox_%d`

const truncatedSQL = `-- relay.truncated
UPDATE effectonce.outbox_slots SET truncated_at = clock_timestamp() WHERE slot = $1`

// clusterSQL identifies the cluster. Transaction ids and ticks mean nothing in another cluster. An
// earlier timeline is that of an old primary. The name of the WAL file shows the timeline at once;
// pg_control_checkpoint shows it only after the next checkpoint. A standby returns no row: what it does not show (55000) is not hidden.
const clusterSQL = `-- relay.cluster
SELECT (SELECT system_identifier FROM pg_control_system()), ('x' || pg_catalog.substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int
WHERE NOT pg_is_in_recovery()`

// serverRun names a run of the server. A crash or a promotion begins another run. Only those lose
// commits that another session has seen, and assign their transaction ids again. Statistics survive
// a clean stop, and the recovery from a crash discards them. (A manual reset of the statistics
// costs the relay a lease.)
//
// TRUNCATE … RESTART IDENTITY and a repair also begin another run, through another file of the
// sequence. The numbers that a lease knows belong to the previous file, even if the new one has
// passed them when the relay polls.
const serverRun = `pg_catalog.concat_ws('/', pg_catalog.substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()),
  pg_catalog.pg_relation_filenode('effectonce.outbox_seq_seq'))`

// hiddenRun is serverRun where the database hides the functions that serverRun needs. A crash that loses
// asynchronous commits begins no other run, unless the server was started again.
const hiddenRun = `pg_catalog.concat_ws('/', '', extract(epoch FROM pg_postmaster_start_time()), pg_catalog.pg_relation_filenode('effectonce.outbox_seq_seq'))`

// here reports whether a statement runs on the server whose run is $1. After a
// failover, another connection of the pool may lead to another server. What a standby shows as
// committed, or an old primary as visible, is not valid for this lease.
const here = `CASE WHEN pg_is_in_recovery() THEN false ELSE $1::text = ` + serverRun + ` END`

const runSQL = `-- relay.run
SELECT ` + serverRun + `
WHERE NOT pg_is_in_recovery()`

// lastSeq is the last assigned number. It is not read from the sequence's row, which may briefly be
// up to 32 ahead: nextval writes that value for the write-ahead log, under a lock that this
// function takes, too. 0: no number was assigned since the sequence was created or set.
const lastSeq = `coalesce(pg_catalog.pg_sequence_last_value('effectonce.outbox_seq_seq'), 0)`

// seqSQL fails if the role may not read the sequence; lastSeq alone would not report that.
const seqSQL = `-- relay.seq
SELECT ` + serverRun + `, current_database()::text, ` + lastSeq + `
FROM effectonce.outbox_seq_seq WHERE NOT pg_is_in_recovery()`

// fetchSQL reads, in seq order, the rows that became visible between the tick behind the cursor and
// the tick before it. $2 divides the rows. A row with a seq above the earlier tick's seq_last is
// found by its seq and must not be visible in the earlier snapshot ($3). A row up to it belongs to
// a transaction that was open in that snapshot, and each of those ($9) that has ended is looked up by its id. $10
// is where the last page ended. Both branches walk an index in order and stop at the page's size,
// so a page costs the same on a backlog of ten rows and of ten million. (The second branch compares
// pairs: with txid = … the planner would, on some statistics, walk the index on seq and filter the
// whole table.) If no transaction was open, fetchNewSQL is used. It has only the first branch and
// costs the server two thirds.
//
// Rows of other shards are read and skipped: this shard is $7 of $6.
//
// $5 is the later tick while a batch takes several pages, so that each page reads the same batch.
// Null reads up to now, and the statement's own snapshot, which is returned with the rows, becomes
// the tick. The sequence is read after the snapshot was taken, and the next transaction id after
// that: see passing.
//
// $1 is the run of the server that the lease was taken on: see here. The snapshots are computed
// once, in now. In the conditions they would be computed for each row.
//
// The first row of the result describes the statement, so that the snapshot is sent once. Its seq
// is null, its topic is the snapshot, and its size is the last assigned seq. Its headers_text is
// how many transaction ids from the snapshot's xmax on were assigned before the statement read the
// seq. The page follows, in order, which readPage checks: sorting again would copy every row. Casts
// get new names: under the old name a cast would be what ORDER BY sees. Headers that are the empty
// object are null: a cast to text costs as much as a third of the row.
//
// A payload above $8 bytes is left out, and its size is sent instead; fetchSizedSQL reads the rows
// from there on. octet_length of a value that is stored out of line does not read it.
const (
	fetchSQL    = "-- relay.fetch\n" + fetchNow + fetchPlain + fetchFrom + fetchNew + fetchLate + fetchTo
	fetchNewSQL = "-- relay.fetch\n" + fetchNow + fetchPlain + fetchFrom + fetchNew + fetchTo
)

const fetchPlain = `
UNION ALL
SELECT page.seq, page.id, page.topic, page.key, CASE WHEN octet_length(page.payload) <= $8::int THEN page.payload END, ` + fetchHeaders + `, page.created_at,
  CASE WHEN octet_length(page.payload) > $8::int THEN octet_length(page.payload)::bigint END, NULL
`

// fetchSizedSQL is fetchSQL with a page that ends with the row which passes $8 bytes, so that large
// rows are not sent and discarded. For small rows the sum costs half as much as everything else.
const fetchSizedSQL = `-- relay.fetch_sized
` + fetchNow + `
UNION ALL
SELECT page.seq, page.id, page.topic, page.key, page.payload, ` + fetchHeaders + `, page.created_at, NULL, NULL
FROM (
  SELECT *, pg_catalog.sum(coalesce(octet_length(payload), 0) + coalesce(octet_length(key), 0)) OVER (ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
  ` + fetchFrom + fetchNew + fetchLate + fetchTo + `) page
WHERE page.before IS NULL OR page.before < $8::int`

const fetchHeaders = `CASE WHEN pg_catalog.pg_column_size(page.headers) > 8 THEN page.headers::text END`

// The condition on seq_last makes age, which returns the next transaction id, wait for the
// sequence.
const fetchNow = `WITH now AS MATERIALIZED (
  SELECT pg_current_snapshot() AS snapshot, ` + lastSeq + ` AS seq_last,
    ` + here + ` AS here, $3::text::pg_snapshot AS since, coalesce($5::text::pg_snapshot, pg_current_snapshot()) AS until
)
SELECT NULL::bigint AS seq, NULL::uuid AS id, now.snapshot::text AS topic, NULL::bytea AS key, NULL::bytea AS payload,
  age(CASE WHEN now.seq_last IS NOT NULL THEN pg_snapshot_xmax(now.snapshot)::xid END)::text AS headers_text,
  NULL::timestamptz AS created_at, now.seq_last AS size, now.here
FROM now`

const fetchFrom = `FROM (`

const fetchNew = `
  SELECT * FROM (
    (SELECT o.seq, o.id, o.topic, o.key, o.payload, o.headers, o.created_at
     FROM effectonce.outbox o
     WHERE o.seq > $2 AND o.shard OPERATOR(pg_catalog.%) $6::int = $7::int AND NOT pg_visible_in_snapshot(o.txid, (SELECT since FROM now))
       AND pg_visible_in_snapshot(o.txid, (SELECT until FROM now))
     ORDER BY o.seq LIMIT $4)`

const fetchLate = `
    UNION ALL
    (SELECT late.*
     FROM pg_catalog.unnest($9::text[]::xid8[]) AS open (txid) CROSS JOIN LATERAL (
       SELECT o.seq, o.id, o.topic, o.key, o.payload, o.headers, o.created_at
       FROM effectonce.outbox o
       WHERE (o.txid, o.seq) > (open.txid, $10) AND (o.txid, o.seq) <= (open.txid, $2) AND o.shard OPERATOR(pg_catalog.%) $6::int = $7::int
       ORDER BY o.txid, o.seq LIMIT $4) late
     WHERE pg_visible_in_snapshot(open.txid, (SELECT until FROM now)))`

const fetchTo = `
  ) candidates ORDER BY seq LIMIT $4
) page`

const hasTicksSQL = `-- relay.has_ticks
SELECT EXISTS (SELECT FROM effectonce.outbox_ticks WHERE tick = $2 AND token = $3::text::uuid)
  AND ($4::bigint IS NULL OR EXISTS (SELECT FROM effectonce.outbox_ticks WHERE tick = $4 AND token = $5::text::uuid)), ` + here

const loadTickSQL = `-- relay.load_tick
SELECT snapshot::text, seq_last, token::text FROM effectonce.outbox_ticks WHERE tick = $2 AND ` + here + `
`

// storeTickSQL makes a tick durable, and with it every commit that it saw. It stores nothing in
// another run of the server ($3): the tick may have seen commits that are lost. Their transaction
// ids, assigned again, would then count as published.
const storeTickSQL = `-- relay.store_tick
INSERT INTO effectonce.outbox_ticks (snapshot, seq_last)
SELECT $1::text::pg_snapshot, $2 FROM (SELECT ` + flushed + ` AS setting) AS durable
WHERE durable.setting IS NOT NULL AND $3::text = ` + serverRun + `
RETURNING tick, token::text`

// advanceSQL adds a row to the chain. It fails with 23505 when the lease is over: then another
// replica publishes, or did. In another run of the server, or if that has another tick under the
// number, it changes nothing: see storeTickSQL.
const advanceSQL = `-- relay.advance
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, next_tick, seq, floor, published, journal_offset)
SELECT $2, $3, $4, $5, $6, $7, $8, $9, $10, $11 WHERE ` + here + `
  AND EXISTS (SELECT FROM effectonce.outbox_ticks WHERE tick = $6 AND token = $12::text::uuid)
  AND ($7::bigint IS NULL OR EXISTS (SELECT FROM effectonce.outbox_ticks WHERE tick = $7 AND token = $13::text::uuid))`

// clearAdvancesSQL deletes the rows of the chain between two numbers.
const clearAdvancesSQL = `-- relay.clear_advances
DELETE FROM effectonce.outbox_advances WHERE relay = $1 AND shard = $2 AND n > $3 AND n <= $4`

// pruneSQL deletes ticks that no reader refers to, the oldest $1. The ticks of the last ten minutes
// stay, for a session that is about to read a tick that progress has just left.
const pruneSQL = `-- relay.prune_ticks
DELETE FROM effectonce.outbox_ticks
WHERE tick IN (
  SELECT tick FROM effectonce.outbox_ticks
  WHERE tick > 0 AND created_at < clock_timestamp() - interval '10 minutes'
    AND tick < (SELECT pg_catalog.min(least(tick, next_tick)) FROM effectonce.outbox_progress_now)
  ORDER BY tick LIMIT $1)`

// lockStampsSQL and the statements after it: see recover.go.
const lockStampsSQL = `-- relay.lock_stamps
SELECT FROM effectonce.outbox_locks WHERE name = 'stamps' FOR UPDATE`

// foreign is true of a row above the floor whose transaction id this cluster has not reached, or
// has assigned to a transaction that is still open. These are exactly the visible rows that the
// statement's own snapshot does not show as visible.
const foreign = `o.seq > $1 AND o.shard OPERATOR(pg_catalog.%) $2::int = $3::int
  AND (o.txid >= pg_snapshot_xmax(pg_current_snapshot()) OR o.txid = ANY (ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot()))))`

// foreignSQL asks the index of ids first: for the condition the planner would read the whole outbox.
const foreignSQL = `-- relay.foreign
SELECT ((SELECT txid FROM effectonce.outbox ORDER BY txid DESC LIMIT 1) >= pg_snapshot_xmax(pg_current_snapshot())
    OR EXISTS (SELECT FROM pg_snapshot_xip(pg_current_snapshot()) AS open (txid) CROSS JOIN LATERAL (SELECT FROM effectonce.outbox o WHERE o.txid = open.txid ORDER BY o.txid, o.seq LIMIT 1) o))
  AND EXISTS (SELECT FROM effectonce.outbox o WHERE ` + foreign + `)`

// restampSQL gives such rows an id that each snapshot shows, except that of tick 0, where a relay
// without progress begins. It does not use this transaction's id: relays past this row would
// report its seq as reused.
const restampSQL = `-- relay.restamp
UPDATE effectonce.outbox o SET txid = '1' WHERE ` + foreign

const rebaseSQL = `-- relay.rebase
WITH moved AS (
  UPDATE effectonce.outbox_progress SET system_identifier = $5, timeline = $6
  WHERE relay = $1 AND shard = $2 AND epoch = $3 AND $7::text = ` + serverRun + `
  RETURNING epoch)
INSERT INTO effectonce.outbox_advances (relay, shard, n, epoch, tick, seq, floor, published)
SELECT $1, $2, $8, epoch, $4, 0, $9, $10 FROM moved`

// statements are those of this package, for a schema and for what the database shows of its run: see
// Relay.adapt. PostgreSQL rejects a function without permission even where a CASE would not evaluate it.
type statements struct {
	schema, run string   // run is serverRun or hiddenRun
	rewritten   sync.Map // by the text in the source
}

func (s *statements) of(sql string) string {
	if known, ok := s.rewritten.Load(sql); ok {
		return known.(string)
	}
	own := migrations.InSchema(strings.ReplaceAll(sql, serverRun, s.run), s.schema)
	s.rewritten.Store(sql, own)
	return own
}
