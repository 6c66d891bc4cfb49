package outbox

// With several arguments, unnest is always PostgreSQL's own, whatever the search path (and it must
// have no schema).

// insertSQL takes any number of messages in one statement. The order of the arrays is the order of
// seq.
const insertSQL = `-- outbox.publish
INSERT INTO effectonce.outbox (id, topic, key, payload, headers)
SELECT coalesce(m.id, effectonce.uuid_v7()), m.topic, m.key, m.payload, m.headers
FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[], $5::jsonb[])
  WITH ORDINALITY AS m (id, topic, key, payload, headers, place)
ORDER BY m.place`

// scheduleSQL takes messages for later. An ID that the database creates has the time at which the
// message is due, because consumers park a message as expired if its ID is older than their window.
// A message that already waits under the ID is unchanged, so a caller that does not know whether
// its transaction committed may retry.
const scheduleSQL = `-- outbox.schedule
INSERT INTO effectonce.outbox_scheduled (due_at, id, topic, key, payload, headers)
SELECT m.due_at, coalesce(m.id, (left(effectonce.uuid_floor(greatest(m.due_at, clock_timestamp()))::text, 13) || right(effectonce.uuid_v7()::text, 23))::uuid),
  m.topic, m.key, m.payload, m.headers
FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bytea[], $5::jsonb[], $6::timestamptz[])
  WITH ORDINALITY AS m (id, topic, key, payload, headers, due_at, place)
ORDER BY m.place
ON CONFLICT DO NOTHING`

// cancelSQL and the relay's move, which does not wait for locks, are decided by the row's lock.
const cancelSQL = `-- outbox.cancel
DELETE FROM effectonce.outbox_scheduled WHERE id = $1`

const backlogSQL = `-- outbox.backlog
SELECT coalesce(pg_catalog.max(oldest_seconds), 0)::float8, coalesce(pg_catalog.max(rows), 0)::bigint, coalesce(pg_catalog.max(bytes), 0)::bigint FROM effectonce.outbox_backlog`
