package relay

// nextDueSQL is the query of an idle relay: in how many milliseconds the next message for later is
// due, at most two seconds.
const nextDueSQL = `-- relay.next_due
SELECT coalesce((
  SELECT CASE WHEN due_at <= clock_timestamp() THEN 0
    WHEN due_at < clock_timestamp() + interval '2 seconds' THEN pg_catalog.ceil(extract(epoch FROM due_at - clock_timestamp()) * 1000::numeric)
    ELSE 2000 END
  FROM effectonce.outbox_scheduled s WHERE refused IS NULL ORDER BY due_at LIMIT 1), 2000)::bigint`

// promoteSQL moves at most $1 due messages into the outbox, in the order of their times, and returns how
// many. Messages of the same time move in the order in which they were inserted. With $2 it moves only the
// one in that place. The lock lets one session at a time do it: of two at the same time, the later batch
// could commit first. A subquery reads the time, as a constant of the statement: a volatile function would
// not be an index condition. It waits for no row lock: what another session cancels now is skipped. A
// message that was rescheduled since the statement's snapshot waits for the next turn.
const promoteSQL = `-- relay.promote
WITH mine AS MATERIALIZED (
  SELECT true AS locked FROM effectonce.outbox_locks WHERE name = 'promote' FOR UPDATE SKIP LOCKED
), due AS MATERIALIZED (
  SELECT ctid FROM effectonce.outbox_scheduled
  WHERE (SELECT locked FROM mine) AND refused IS NULL AND due_at <= (SELECT clock_timestamp()) AND ($2::bigint IS NULL OR place = $2)
  ORDER BY due_at, place LIMIT $1 FOR UPDATE SKIP LOCKED
), gone AS (
  DELETE FROM effectonce.outbox_scheduled WHERE ctid = ANY (ARRAY(SELECT ctid FROM due))
  RETURNING due_at, place, id, topic, key, payload, headers, created_at
), moved AS (
  INSERT INTO effectonce.outbox (id, topic, key, payload, headers, created_at)
  SELECT id, topic, key, payload, headers, greatest(due_at, created_at) FROM gone ORDER BY due_at, place
  RETURNING 1
)
SELECT count(*) FROM moved`

// firstDueSQL locks the first message that is due, and setAsideSQL stores why the outbox refused it: see
// promoteOne.
const firstDueSQL = `-- relay.first_due
SELECT place, id, topic, publisher FROM effectonce.outbox_scheduled
WHERE refused IS NULL AND due_at <= (SELECT clock_timestamp()) ORDER BY due_at, place LIMIT 1 FOR UPDATE SKIP LOCKED`

const setAsideSQL = `-- relay.set_aside
UPDATE effectonce.outbox_scheduled SET refused = $4 WHERE id = $1 AND topic = $2 AND publisher = $3`
