package consumer

import (
	"github.com/effectonce/effectonce/internal/handlertx"
	"github.com/effectonce/effectonce/migrations"
)

// settingsSQL makes a transaction safe whatever the defaults of the role are: a holder that froze
// loses its claims in bounded time, and commits are durable. set_config with true is SET LOCAL. The
// last column but one identifies the server: after a failover or a restart it is another time.
const settingsSQL = `-- consumer.settings
SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true),
  set_config('idle_in_transaction_session_timeout', $3, true),
  set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true),
  pg_postmaster_start_time(), pg_catalog.current_setting('role')`

// advanceSQL raises EO001 if the caller no longer holds the position.
const advanceSQL = `-- consumer.advance
SELECT effectonce.advance_position($1, $2, $3, $4, $5, $6, $7)`

// rowsSQL inserts missing rows, so that each partition has a row to lock.
const rowsSQL = `-- consumer.rows
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, epoch)
SELECT $1, t.topic, t.partition, 0 FROM unnest($2::text[], $3::int[]) AS t (topic, partition)
ORDER BY t.topic, t.partition
ON CONFLICT (consumer_group, topic, partition) DO NOTHING`

// lockSQL reads positions and locks them, so that their holders cannot advance them until the
// acquisition is stored.
const lockSQL = `-- consumer.lock
SELECT p.topic, p.partition, p.topic_id, p.next_offset, p.epoch, p.handled_from, p.handled_to, p.rewound_from, p.handled_by, p.handled_rule,
  p.resume_at, p.released, p.held_offset, p.stuck, pg_catalog.pg_postmaster_start_time(),
  EXISTS (SELECT FROM effectonce.consumer_pauses c WHERE c.consumer_group = $1 AND c.topic = p.topic)
FROM effectonce.consumer_positions p
WHERE p.consumer_group = $1 AND (p.topic, p.partition) IN (SELECT t.topic, t.partition FROM unnest($2::text[], $3::int[]) AS t (topic, partition))
ORDER BY p.topic, p.partition
FOR UPDATE`

// holdSQL acquires partitions: it begins a new epoch for each, so that earlier holders cannot
// advance them. It matches the epoch on which the decision was based.
const holdSQL = `-- consumer.hold
UPDATE effectonce.consumer_positions p SET
  epoch = p.epoch + 1, owner = $2, updated_at = clock_timestamp(), released = t.halt IS NOT NULL,
  topic_id = coalesce(t.topic_id, p.topic_id), next_offset = t.next, held_offset = t.next, stuck = t.stuck,
  record_time = CASE WHEN t.moved THEN NULL ELSE p.record_time END, caught_up_at = CASE WHEN t.moved THEN NULL ELSE p.caught_up_at END,
  handled_from = t.handled_from, handled_to = t.handled_to, rewound_from = t.rewound_from, handled_by = t.handled_by, handled_rule = t.handled_rule,
  resume_at = CASE WHEN t.ordered THEN NULL ELSE p.resume_at END,
  trouble = t.halt, trouble_since = CASE WHEN t.halt IS NULL THEN NULL WHEN p.trouble = t.halt THEN p.trouble_since ELSE clock_timestamp() END
FROM pg_catalog.jsonb_to_recordset($3::jsonb) AS t (topic text, partition int, epoch bigint, topic_id uuid, next bigint, stuck int, moved boolean, ordered boolean,
  handled_from bigint, handled_to bigint, rewound_from bigint, handled_by int, handled_rule text, halt text)
WHERE p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition AND p.epoch = t.epoch`

const primarySQL = `-- consumer.primary
SELECT NOT pg_is_in_recovery()`

// checkSQL raises EO001 if the caller no longer holds the partition, or if the database is behind the
// position that the caller last saw stored, unless that is null. It changes nothing.
const checkSQL = `-- consumer.check
SELECT effectonce.check_position($1, $2, $3, $4, $5)`

// advanceApartSQL advances a position outside of the transactions that handled the messages, and
// only on the server that handled them. No row: another server answered.
const advanceApartSQL = `-- consumer.advance_apart
SELECT effectonce.advance_position($1, $2, $3, $4, $5, $6, $7) WHERE pg_catalog.pg_postmaster_start_time() = $8`

// troubleSQL stores why a partition does not continue; null: it continues.
const troubleSQL = `-- consumer.trouble
UPDATE effectonce.consumer_positions SET trouble = $5::text, trouble_since = CASE WHEN $5::text IS NOT NULL THEN coalesce(trouble_since, clock_timestamp()) END, updated_at = clock_timestamp()
WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND epoch = $4`

// caughtUpSQL records that partitions were handled up to their end at a time of the database's
// clock.
const caughtUpSQL = `-- consumer.caught_up
UPDATE effectonce.consumer_positions p SET caught_up_at = $2
FROM pg_catalog.jsonb_to_recordset($3::jsonb) AS t (topic text, partition int, epoch bigint, delivered bigint, nothing boolean)
WHERE p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition AND p.epoch = t.epoch
  AND (p.next_offset >= t.delivered OR p.next_offset IS NULL AND t.nothing)`

// pollSQL checks all partitions of a session at once: it lists those that need action. $6 is the
// position that the holder knows. An epoch below the holder's means that a failover lost the
// acquisition, and with it everything that the holder handled since.
const pollSQL = `-- consumer.poll
SELECT t.n - 1,
  coalesce(p.epoch IS NULL OR p.epoch < t.epoch OR p.epoch = t.epoch AND (p.next_offset < t.known OR p.next_offset IS NULL AND t.known IS NOT NULL), false),
  p.resume_at IS NOT NULL, paused.topic IS NOT NULL, due.yes IS NOT NULL
FROM unnest($2::text[], $3::int[], $4::int[], $5::bigint[], $6::bigint[]) WITH ORDINALITY AS t (topic, partition, consumer, epoch, known, n)
LEFT JOIN effectonce.consumer_positions p ON p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition
LEFT JOIN effectonce.consumer_pauses paused ON paused.consumer_group = $1 AND paused.topic = t.topic
LEFT JOIN LATERAL (SELECT true AS yes FROM effectonce.parked_messages m
  WHERE m.consumer = t.consumer AND m.topic = t.topic AND m.partition = t.partition AND m.state = 'retry' AND m.retry_at <= statement_timestamp()
  LIMIT 1) AS due ON true
WHERE p.epoch IS DISTINCT FROM t.epoch OR p.next_offset < t.known OR p.next_offset IS NULL AND t.known IS NOT NULL
  OR p.resume_at IS NOT NULL OR paused.topic IS NOT NULL OR due.yes IS NOT NULL`

const clockSQL = `-- consumer.clock
SELECT clock_timestamp()`

// givenUpSQL records that a holder ended in good order.
const givenUpSQL = `-- consumer.given_up
UPDATE effectonce.consumer_positions p SET released = true
FROM unnest($2::text[], $3::int[], $4::bigint[]) AS t (topic, partition, epoch)
WHERE p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition AND p.epoch = t.epoch`

// parkSQL parks a message; the order of the statements becomes the order of seq. A message that is
// already stored stays unchanged. One that is tried again has its record's time as the time of its
// children, which keep their IDs.
const parkSQL = `-- consumer.park
INSERT INTO effectonce.parked_messages
  (consumer, message_id, topic, topic_id, partition, "offset", key, payload, headers, record_time, reason, error, attempts, state, retry_at, released_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9::text::jsonb, $10, $11, $12, $13, $14, clock_timestamp() + $15::interval, CASE WHEN $14::text = 'retry' THEN $10::timestamptz END)
ON CONFLICT (consumer, topic, partition, "offset", message_id) DO NOTHING`

// headsSQL lists the keys of the first parked messages, from the index of heads alone. It runs when
// a partition is acquired.
const headsSQL = `-- consumer.heads
SELECT DISTINCT sha256(key) FROM effectonce.parked_messages
WHERE consumer = $1 AND topic = $2 AND partition = $3 AND state <> 'behind' AND key IS NOT NULL`

// touchHeadsSQL locks the first parked messages of some keys, so that they cannot be deleted, and
// rewrites them unchanged. An operator's transaction with an earlier snapshot does not see a message
// that is parked behind one of them, and a lock alone would not stop it from deleting the first one:
// the message behind it would wait forever. Because of the write, PostgreSQL refuses the delete
// (40001).
const touchHeadsSQL = `-- consumer.touch_heads
UPDATE effectonce.parked_messages p SET state = p.state
WHERE p.seq = ANY (ARRAY(SELECT first.seq FROM pg_catalog.unnest($4::bytea[]) AS k (hash)
  CROSS JOIN LATERAL (SELECT n.seq FROM effectonce.parked_messages n
    WHERE n.consumer = $1 AND n.topic = $2 AND n.partition = $3 AND pg_catalog.sha256(n.key) = k.hash ORDER BY n.seq LIMIT 1) AS first))
RETURNING pg_catalog.sha256(p.key)`

// heldNowSQL lists which of the keys have a parked message. It follows touchHeadsSQL with a newer
// snapshot: a first message that was deleted during the wait for its lock may have another one
// behind it.
const heldNowSQL = `-- consumer.held_now
SELECT k.hash FROM pg_catalog.unnest($4::bytea[]) AS k (hash)
WHERE EXISTS (SELECT FROM effectonce.parked_messages n
  WHERE n.consumer = $1 AND n.topic = $2 AND n.partition = $3 AND pg_catalog.sha256(n.key) = k.hash)`

// dueSQL lists due messages, in the order in which they became due; if keys are held ($5), only the
// first message of each key: a later one that an operator retries waits for it. It uses the statement's
// time: an index cannot be searched by clock_timestamp().
const dueSQL = `-- consumer.due
SELECT d.seq, sha256(d.key), (d.attempts > 0 OR d.reason = 'crashed') AND d.released_at IS NOT NULL FROM effectonce.parked_messages d
WHERE d.consumer = $1 AND d.topic = $2 AND d.partition = $3 AND d.state = 'retry' AND d.retry_at <= statement_timestamp()
  AND NOT ($5::boolean AND EXISTS (SELECT FROM effectonce.parked_messages n
    WHERE n.consumer = $1 AND n.topic = $2 AND n.partition = $3 AND sha256(n.key) = sha256(d.key) AND n.seq < d.seq))
ORDER BY d.retry_at LIMIT $4`

// releaseSQL chooses the messages to retry: the due messages $6, and up to $7 messages that wait
// behind each, in order and without a gap. It returns up to $4 messages and $5 bytes of these, but
// at least one message. A message with a reason of its own, and the messages behind it, are left
// for an operator. What an operator has locked waits. The time of the release (a young record's own), and the attempt at the due messages,
// are stored before the messages are used.
const releaseSQL = `-- consumer.release
WITH due AS MATERIALIZED (
  SELECT seq, sha256(key) AS hash FROM effectonce.parked_messages
  WHERE seq = ANY ($6::bigint[]) AND consumer = $1 AND topic = $2 AND partition = $3 AND state = 'retry' AND retry_at <= statement_timestamp()
  FOR UPDATE SKIP LOCKED
), line AS MATERIALIZED (
  SELECT seq AS head, seq FROM due
  UNION ALL
  SELECT due.seq, f.seq FROM due CROSS JOIN LATERAL (
    SELECT n.seq, bool_and(n.state = 'behind' AND n.reason = 'behind') OVER (ORDER BY n.seq) AS waits FROM effectonce.parked_messages n
    WHERE n.consumer = $1 AND n.topic = $2 AND n.partition = $3 AND sha256(n.key) = due.hash AND n.seq > due.seq
    ORDER BY n.seq LIMIT $7) AS f
  WHERE f.waits
), chosen AS (
  SELECT l.seq, l.seq = l.head AS first, row_number() OVER w AS n, pg_catalog.sum(coalesce(octet_length(p.payload), 0) + octet_length(p.headers::text)) OVER w AS bytes
  FROM line l JOIN effectonce.parked_messages p USING (seq) WINDOW w AS (ORDER BY l.head, l.seq)
)
UPDATE effectonce.parked_messages p SET
  released_at = coalesce(p.released_at, CASE WHEN p.record_time > statement_timestamp() - interval '10 min' THEN p.record_time ELSE clock_timestamp() END),
  attempts = CASE WHEN p.released_at IS NULL THEN 0 ELSE p.attempts END + c.first::int
FROM chosen c WHERE p.seq = c.seq AND (c.n = 1 OR c.n <= $4 AND c.bytes <= $5)
RETURNING p.seq, p.message_id, p.topic_id, p."offset", p.key, p.payload, p.headers::text, p.record_time, p.released_at, p.attempts, c.first, p.reason = 'too_large'`

// lockParkedSQL locks parked messages before they are handled and deleted, so that only one
// transaction handles them. It locks in the order of seq; otherwise two transactions could
// deadlock.
const lockParkedSQL = `-- consumer.lock_parked
SELECT seq FROM effectonce.parked_messages WHERE seq = ANY ($1::bigint[]) ORDER BY seq FOR UPDATE`

const unparkSQL = `-- consumer.unpark
DELETE FROM effectonce.parked_messages WHERE seq = ANY ($1::bigint[])`

// setBackSQL ends a retry.
const setBackSQL = `-- consumer.set_back
UPDATE effectonce.parked_messages SET state = $2, reason = $3, error = $4, attempts = $5,
  retry_at = clock_timestamp() + $6::interval, released_at = CASE WHEN $2 = 'retry' THEN released_at END
WHERE seq = $1`

// otherNameSQL finds messages that wait for a consumer of the group with another name.
const otherNameSQL = `-- consumer.other_name
SELECT c.name, pg_catalog.count(*) FROM effectonce.consumers c JOIN effectonce.parked_messages m ON m.consumer = c.id
WHERE c.consumer_group = $1 AND m.topic = ANY ($2::text[]) AND c.id <> ALL ($3::int[]) AND m.state IN ('retry', 'behind')
GROUP BY c.name ORDER BY c.name LIMIT 1`

// uncountSQL takes back attempts that a stop prevented.
const uncountSQL = `-- consumer.uncount
UPDATE effectonce.parked_messages SET attempts = attempts - 1 WHERE seq = ANY ($1::bigint[]) AND attempts > 0`

// newQueries returns the statements for one schema, by their text here.
func newQueries(schema string) map[string]string {
	queries := map[string]string{}
	for _, sql := range []string{
		settingsSQL, primarySQL, handlertx.GuardSQL, rowsSQL, lockSQL, holdSQL, givenUpSQL, pollSQL, troubleSQL, caughtUpSQL,
		touchHeadsSQL, heldNowSQL, advanceSQL, advanceApartSQL, checkSQL, parkSQL, headsSQL, dueSQL, releaseSQL,
		lockParkedSQL, unparkSQL, setBackSQL, uncountSQL, otherNameSQL,
	} {
		queries[sql] = migrations.InSchema(sql, schema)
	}
	return queries
}
