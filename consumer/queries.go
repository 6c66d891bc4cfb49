package consumer

import "github.com/effectonce/effectonce/migrations"

// settingsSQL makes a transaction safe whatever the defaults of the role are: a holder that froze loses
// its claims in bounded time, and what is committed is durable. set_config with true is SET LOCAL.
const settingsSQL = `-- consumer.settings
SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true),
  set_config('idle_in_transaction_session_timeout', $3, true),
  set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

// advanceSQL raises EO001 where the position is not the caller's any more.
const advanceSQL = `-- consumer.advance
SELECT effectonce.advance_position($1, $2, $3, $4, $5, $6, $7)`

// holdSQL takes partitions over: it begins a new epoch for each, so that whoever held them before
// cannot advance them. A topic that was made anew (another topic_id) starts without a position.
// $6 is where a partition starts that has none, where that was resolved; null: not known.
const holdSQL = `-- consumer.hold
INSERT INTO effectonce.consumer_positions AS p (consumer_group, topic, topic_id, partition, next_offset, owner, released, held_offset)
SELECT $1, t.topic, t.topic_id, t.partition, t.start, $2, false, t.start
FROM unnest($3::text[], $4::uuid[], $5::int[], $6::bigint[]) AS t (topic, topic_id, partition, start)
ORDER BY t.topic, t.partition
ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET
  epoch = p.epoch + 1, owner = excluded.owner, updated_at = clock_timestamp(), released = false, held_offset = p.next_offset, trouble = NULL, trouble_since = NULL,
  stuck = CASE WHEN NOT p.released AND p.next_offset IS NOT DISTINCT FROM p.held_offset THEN p.stuck + 1 ELSE 0 END,
  topic_id = coalesce(excluded.topic_id, p.topic_id),
  next_offset = CASE WHEN p.topic_id <> excluded.topic_id THEN excluded.next_offset ELSE coalesce(p.next_offset, excluded.next_offset) END,
  record_time = CASE WHEN p.topic_id <> excluded.topic_id THEN NULL ELSE p.record_time END
RETURNING topic, partition, epoch, next_offset, stuck`

// recreatedSQL lists the partitions whose position belongs to an earlier topic of the same name.
const recreatedSQL = `-- consumer.recreated
SELECT p.topic, p.partition
FROM unnest($2::text[], $3::uuid[], $4::int[]) AS t (topic, topic_id, partition)
JOIN effectonce.consumer_positions p ON p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition
WHERE p.topic_id <> t.topic_id`

const primarySQL = `-- consumer.primary
SELECT NOT pg_is_in_recovery()`

// checkSQL raises EO001 where the partition is not the caller's any more, and changes nothing.
const checkSQL = `-- consumer.check
SELECT effectonce.check_position($1, $2, $3, $4)`

// guardSQL opens the cursor that makes a COMMIT fail which is not the engine's; closeGuardSQL takes it away,
// and fails where the transaction is not the one that opened it.
const guardSQL = `-- consumer.guard
DECLARE ` + guardCursor + ` NO SCROLL CURSOR WITH HOLD FOR SELECT effectonce.refuse_commit()`

const (
	guardCursor   = "effectonce_guard"
	closeGuardSQL = "CLOSE " + guardCursor
)

// troubleSQL says why a partition stands still. The next advance takes it back.
const troubleSQL = `-- consumer.trouble
UPDATE effectonce.consumer_positions SET trouble = $5, trouble_since = coalesce(trouble_since, clock_timestamp()), updated_at = clock_timestamp()
WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND epoch = $4`

// resetSQL moves a position to where the topic begins, which advance never does.
const resetSQL = `-- consumer.reset
WITH moved AS (UPDATE effectonce.consumer_positions SET next_offset = $5, record_time = NULL, updated_at = clock_timestamp()
  WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND epoch = $4 RETURNING 1)
INSERT INTO effectonce.operator_actions (who, what, why, subject)
SELECT $6, 'position.reset', $7, jsonb_build_object('group', $1::text, 'topic', $2::text, 'partition', $3::int, 'next_offset', $5::bigint) FROM moved`

// behindSQL tells whether a position is before where its holder, or a later one, has been.
const behindSQL = `-- consumer.behind
SELECT NOT EXISTS (SELECT FROM effectonce.consumer_positions WHERE consumer_group = $1 AND topic = $2 AND partition = $3 AND next_offset >= $4)`

// caughtUpSQL notes that partitions were handled up to their end at a time of the database's clock.
const caughtUpSQL = `-- consumer.caught_up
UPDATE effectonce.consumer_positions p SET caught_up_at = $5
FROM unnest($2::text[], $3::int[], $4::bigint[], $6::bigint[]) AS t (topic, partition, epoch, delivered)
WHERE p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition AND p.epoch = t.epoch
  AND (p.next_offset >= t.delivered OR p.next_offset IS NULL AND t.delivered = 0)`

// ageSQL follows the claim, whose partition cannot be dropped any more then, and says how far back claims reach:
// another replica may have been deployed with a shorter window.
const ageSQL = `-- consumer.age
SELECT clock_timestamp() - dedup_window FROM effectonce.consumers WHERE id = $1`

const clockSQL = `-- consumer.clock
SELECT clock_timestamp()`

// givenUpSQL notes that a holder ended in good order.
const givenUpSQL = `-- consumer.given_up
UPDATE effectonce.consumer_positions p SET released = true
FROM unnest($2::text[], $3::int[], $4::bigint[]) AS t (topic, partition, epoch)
WHERE p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition AND p.epoch = t.epoch`

// attemptSQL counts an attempt. It commits by itself, before the attempt begins.
const attemptSQL = `-- consumer.attempt
INSERT INTO effectonce.message_attempts AS a (consumer, message_id, attempts, error) VALUES ($1, $2, 1, $3)
ON CONFLICT (consumer, message_id) DO UPDATE SET
  attempts = a.attempts + 1, error = coalesce(excluded.error, a.error), updated_at = clock_timestamp()
RETURNING attempts`

const attemptsSQL = `-- consumer.attempts
SELECT message_id, attempts FROM effectonce.message_attempts WHERE consumer = $1 ORDER BY updated_at DESC LIMIT $2`

const forgetAttemptsSQL = `-- consumer.forget_attempts
DELETE FROM effectonce.message_attempts WHERE consumer = $1 AND message_id = ANY ($2::uuid[])`

// parkSQL inserts in the order of the messages, which is the order of seq. A message that is there already
// (a conflict that was delivered again has no claim of its own) stays as it is.
const parkSQL = `-- consumer.park
INSERT INTO effectonce.parked_messages
  (consumer, message_id, topic, topic_id, partition, "offset", key, payload, headers, record_time, reason, error, attempts, state)
SELECT $1, m.id, m.topic, m.topic_id, m.partition, m.at, m.key, m.payload, m.headers, m.record_time, m.reason, m.error, m.attempts, m.state
FROM unnest($2::uuid[], $3::text[], $4::uuid[], $5::int[], $6::bigint[], $7::bytea[], $8::bytea[], $9::jsonb[], $10::timestamptz[],
  $11::text[], $12::text[], $13::int[], $14::text[])
  WITH ORDINALITY AS m (id, topic, topic_id, partition, at, key, payload, headers, record_time, reason, error, attempts, state, n)
ORDER BY m.n
ON CONFLICT (consumer, topic, partition, "offset", message_id) DO NOTHING`

// headsSQL lists the first parked message of each key, by the index of heads alone.
const headsSQL = `-- consumer.heads
SELECT sha256(key), state = 'retry' AND retry_at <= clock_timestamp()
FROM effectonce.parked_messages
WHERE consumer = $1 AND topic = $2 AND partition = $3 AND state <> 'behind'`

// mendAllSQL finds keys whose first message waits for one that is not there any more (somebody deleted it by
// hand), and hands them back; one with a reason of its own waits for an operator.
const mendAllSQL = `-- consumer.mend_all
UPDATE effectonce.parked_messages p SET
  state = CASE WHEN p.reason = 'behind' THEN 'retry' ELSE 'parked' END, retry_at = clock_timestamp(), released_at = NULL
FROM (SELECT DISTINCT ON (sha256(key)) seq, state FROM effectonce.parked_messages
  WHERE consumer = $1 AND topic = $2 AND partition = $3 AND key IS NOT NULL ORDER BY sha256(key), seq) AS first
WHERE p.seq = first.seq AND first.state = 'behind' AND p.state = 'behind'`

// promoteSQL does the same for some keys, given by their hashes.
const promoteSQL = `-- consumer.promote
UPDATE effectonce.parked_messages p SET
  state = CASE WHEN p.reason = 'behind' THEN 'retry' ELSE 'parked' END, retry_at = clock_timestamp(), released_at = NULL
FROM (SELECT DISTINCT hash FROM pg_catalog.unnest($4::bytea[]) AS hash) AS k
CROSS JOIN LATERAL (SELECT n.seq FROM effectonce.parked_messages n
  WHERE n.consumer = $1 AND n.topic = $2 AND n.partition = $3 AND sha256(n.key) = k.hash ORDER BY n.seq LIMIT 1) AS first
WHERE p.seq = first.seq AND p.state = 'behind'
RETURNING sha256(p.key)`

// releaseSQL chooses what is tried again: what is due, and what waits behind it, in order, up to $4 messages
// and $5 bytes, but at least one. The time of the release is stored before anything is done with it.
const releaseSQL = `-- consumer.release
WITH due AS MATERIALIZED (
  SELECT seq, key FROM effectonce.parked_messages
  WHERE consumer = $1 AND topic = $2 AND partition = $3 AND state = 'retry' AND retry_at <= clock_timestamp()
  ORDER BY seq LIMIT $4
), candidates AS (
  SELECT seq FROM due
  UNION
  SELECT f.seq FROM due CROSS JOIN LATERAL (
    SELECT n.seq FROM effectonce.parked_messages n
    WHERE n.consumer = $1 AND n.topic = $2 AND n.partition = $3 AND sha256(n.key) = sha256(due.key) AND n.seq > due.seq
      AND n.state = 'behind'
    ORDER BY n.seq LIMIT $4) AS f
), chosen AS (
  SELECT c.seq, row_number() OVER w AS n, sum(octet_length(coalesce(p.payload, ''))) OVER w AS bytes
  FROM candidates c JOIN effectonce.parked_messages p USING (seq) WINDOW w AS (ORDER BY c.seq)
)
UPDATE effectonce.parked_messages p SET released_at = coalesce(p.released_at, clock_timestamp())
FROM chosen c WHERE p.seq = c.seq AND (c.n = 1 OR c.n <= $4 AND c.bytes <= $5)
RETURNING p.seq, p.message_id, p.topic_id, p."offset", p.key, p.payload, p.headers::text, p.record_time, p.reason, p.state, p.released_at`

// refuseLargeSQL takes back what cannot be handled again, because it is not stored as a whole.
const refuseLargeSQL = `-- consumer.refuse_large
UPDATE effectonce.parked_messages SET state = 'parked'
WHERE consumer = $1 AND topic = $2 AND partition = $3 AND state = 'retry' AND reason = 'too_large'`

// lockParkedSQL decides who handles parked messages: whoever deletes them. In the order of seq, or two
// transactions could deadlock.
const lockParkedSQL = `-- consumer.lock_parked
SELECT seq FROM effectonce.parked_messages WHERE seq = ANY ($1::bigint[]) ORDER BY seq FOR UPDATE`

const unparkSQL = `-- consumer.unpark
DELETE FROM effectonce.parked_messages WHERE seq = ANY ($1::bigint[])`

// setBackSQL ends a retry. The attempts move from where they are counted to the message.
const setBackSQL = `-- consumer.set_back
WITH counted AS (DELETE FROM effectonce.message_attempts WHERE $2 = 'parked' AND consumer = $7 AND message_id = $8)
UPDATE effectonce.parked_messages SET state = $2, reason = $3, error = $4, attempts = attempts + $5,
  retry_at = clock_timestamp() + $6::interval, released_at = CASE WHEN $2 = 'retry' THEN released_at END
WHERE seq = $1`

type queries struct {
	settings, advance, check, hold, recreated, guard, trouble, givenUp          string
	reset, caughtUp, attempts, age                                              string
	attempt, forgetAttempts, park, heads, mendAll, promote, release, lockParked string
	unpark, setBack, refuseLarge, behind                                        string
}

func newQueries(schema string) queries {
	in := func(sql string) string { return migrations.InSchema(sql, schema) }
	return queries{
		settings: settingsSQL, advance: in(advanceSQL), check: in(checkSQL), hold: in(holdSQL), recreated: in(recreatedSQL),
		guard: in(guardSQL), trouble: in(troubleSQL), givenUp: in(givenUpSQL), reset: in(resetSQL), caughtUp: in(caughtUpSQL),
		attempt: in(attemptSQL), attempts: in(attemptsSQL), age: in(ageSQL), forgetAttempts: in(forgetAttemptsSQL), park: in(parkSQL), heads: in(headsSQL), mendAll: in(mendAllSQL),
		promote: in(promoteSQL), release: in(releaseSQL), lockParked: in(lockParkedSQL), unpark: in(unparkSQL), setBack: in(setBackSQL), refuseLarge: in(refuseLargeSQL),
		behind: in(behindSQL),
	}
}
