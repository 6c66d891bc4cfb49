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
INSERT INTO effectonce.consumer_positions AS p (consumer_group, topic, topic_id, partition, next_offset, owner)
SELECT $1, t.topic, t.topic_id, t.partition, t.start, $2
FROM unnest($3::text[], $4::uuid[], $5::int[], $6::bigint[]) AS t (topic, topic_id, partition, start)
ORDER BY t.topic, t.partition
ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET
  epoch = p.epoch + 1, owner = excluded.owner, updated_at = clock_timestamp(),
  topic_id = coalesce(excluded.topic_id, p.topic_id),
  next_offset = CASE WHEN p.topic_id <> excluded.topic_id THEN excluded.next_offset ELSE coalesce(p.next_offset, excluded.next_offset) END,
  record_time = CASE WHEN p.topic_id <> excluded.topic_id THEN NULL ELSE p.record_time END
RETURNING topic, partition, epoch, next_offset`

// recreatedSQL lists the partitions whose position belongs to an earlier topic of the same name.
const recreatedSQL = `-- consumer.recreated
SELECT p.topic, p.partition
FROM unnest($2::text[], $3::uuid[], $4::int[]) AS t (topic, topic_id, partition)
JOIN effectonce.consumer_positions p ON p.consumer_group = $1 AND p.topic = t.topic AND p.partition = t.partition
WHERE p.topic_id <> t.topic_id`

const primarySQL = `-- consumer.primary
SELECT NOT pg_is_in_recovery()`

type queries struct{ settings, advance, hold, recreated string }

func newQueries(schema string) queries {
	return queries{
		settings:  settingsSQL,
		advance:   migrations.InSchema(advanceSQL, schema),
		hold:      migrations.InSchema(holdSQL, schema),
		recreated: migrations.InSchema(recreatedSQL, schema),
	}
}
