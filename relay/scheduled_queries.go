package relay

// nextDueSQL is the query of an idle relay: in how many milliseconds the next message for later is
// due, at most two seconds.
const nextDueSQL = `-- relay.next_due
SELECT coalesce((
  SELECT CASE WHEN due_at <= clock_timestamp() THEN 0
    WHEN due_at < clock_timestamp() + interval '2 seconds' THEN pg_catalog.ceil(extract(epoch FROM due_at - clock_timestamp()) * 1000::numeric)
    ELSE 2000 END
  FROM effectonce.outbox_scheduled s WHERE refused IS NULL ORDER BY due_at LIMIT 1), 2000)::bigint`

// promoteSQL moves due messages into the outbox, in the order of their times: about $1 of those
// behind the place ($2, $3). Messages of the same time move in the order in which they were
// inserted. The lock lets one session at a time do it: of two at the same time, the later batch
// could commit first. A subquery reads the time, as a constant of the statement: a volatile
// function would not be an index condition.
//
// It waits for no row lock. It takes the rows of an ID that are due together all or none (or a full
// batch of them). So a DELETE by ID, which takes one row after the other, also gets all or none,
// and neither blocks the other forever. A row that was added or removed since the statement's
// snapshot leaves its ID for the next time. Another publisher's rows of the same ID are other
// messages, with a time of their own.
//
// The first $1 rows may be of IDs that have more rows behind these. The missing rows are taken, too,
// up to $1, the first IDs first: so the first ID is complete, unless another session has locked one
// of its rows. The statement returns how many rows it looked at first, how many it moved, and the
// last place that it looked at: see promoteDue.
const promoteSQL = `-- relay.promote
WITH mine AS MATERIALIZED (
  SELECT true AS locked FROM effectonce.outbox_locks WHERE name = 'promote' FOR UPDATE SKIP LOCKED
), first AS MATERIALIZED (
  SELECT due_at, id, topic, publisher, place FROM effectonce.outbox_scheduled s
  WHERE (SELECT locked FROM mine) AND refused IS NULL AND due_at <= (SELECT clock_timestamp()) AND (due_at, place) > ($2::timestamptz, $3::bigint)
  ORDER BY due_at, place LIMIT $1 FOR UPDATE SKIP LOCKED
), ids AS MATERIALIZED (
  SELECT f.due_at, f.id, f.publisher, count(*) AS taken, pg_catalog.min(f.place) AS place, (SELECT count(*) FROM (
    SELECT FROM effectonce.outbox_scheduled s WHERE s.id = f.id AND s.due_at = f.due_at AND s.publisher = f.publisher AND s.refused IS NULL LIMIT $1) AS s) AS size
  FROM first f GROUP BY f.due_at, f.id, f.publisher
), rest AS MATERIALIZED (
  SELECT r.due_at, r.id, r.topic, r.publisher
  FROM (SELECT * FROM ids WHERE taken < size ORDER BY due_at, place) AS i CROSS JOIN LATERAL (
    SELECT s.due_at, s.id, s.topic, s.publisher FROM effectonce.outbox_scheduled s
    WHERE s.id = i.id AND s.due_at = i.due_at AND s.publisher = i.publisher AND s.refused IS NULL
      AND (s.id, s.topic, s.publisher) NOT IN (SELECT f.id, f.topic, f.publisher FROM first f)
    LIMIT $1 FOR UPDATE SKIP LOCKED) AS r
  LIMIT $1
), due AS MATERIALIZED (
  SELECT due_at, id, topic, publisher FROM first UNION ALL SELECT due_at, id, topic, publisher FROM rest
), whole AS MATERIALIZED (
  SELECT due_at, id, publisher FROM due JOIN ids USING (due_at, id, publisher) GROUP BY due_at, id, publisher, size HAVING count(*) >= size
), gone AS (
  DELETE FROM effectonce.outbox_scheduled s USING due JOIN whole USING (due_at, id, publisher)
  WHERE s.id = due.id AND s.topic = due.topic AND s.publisher = due.publisher
  RETURNING s.due_at, s.place, s.id, s.topic, s.key, s.payload, s.headers, s.created_at
), moved AS (
  INSERT INTO effectonce.outbox (id, topic, key, payload, headers, created_at)
  SELECT id, topic, key, payload, headers, greatest(due_at, created_at) FROM gone ORDER BY due_at, place
  RETURNING 1
), last AS (
  SELECT due_at, place FROM first ORDER BY due_at DESC, place DESC LIMIT 1
)
SELECT (SELECT count(*) FROM first), (SELECT count(*) FROM moved), (SELECT due_at FROM last), (SELECT place FROM last)`

// firstDueSQL locks the first message that is due behind a place, and setAsideSQL stores why the outbox
// refused it and the other topics of its ID: see promoteOne.
const firstDueSQL = `-- relay.first_due
SELECT due_at, place, id, topic FROM effectonce.outbox_scheduled s
WHERE refused IS NULL AND due_at <= (SELECT clock_timestamp()) AND (due_at, place) > ($1::timestamptz, $2::bigint)
ORDER BY due_at, place LIMIT 1 FOR UPDATE SKIP LOCKED`

const setAsideSQL = `-- relay.set_aside
UPDATE effectonce.outbox_scheduled s SET refused = $3
FROM effectonce.outbox_scheduled f WHERE f.due_at = $1 AND f.place = $2 AND f.refused IS NULL
  AND s.id = f.id AND s.due_at = f.due_at AND s.publisher = f.publisher AND s.refused IS NULL`
