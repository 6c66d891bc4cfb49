-- Functions of a sequence that is behind.

SET search_path = pg_catalog, pg_temp;

DROP FUNCTION effectonce.repair_outbox_sequences(bigint, bigint), effectonce.renumber_outbox(bigint, bigint, timestamptz),
  effectonce.outbox_sequence_state(bigint, bigint), effectonce.this_cluster();

-- The previous release reads the whole of outbox_dead, and finds what is free by itself.
DROP TRIGGER outbox_dead_free ON effectonce.outbox_dead;
DROP FUNCTION effectonce.outbox_dead_free();
DROP TABLE effectonce.outbox_dead_freed;
DROP INDEX effectonce.outbox_dead_waiting;
DROP INDEX effectonce.outbox_dead_retry;

-- A row that only this release knows the reason of is of the closest one that the previous release knows.
UPDATE effectonce.outbox_dead SET reason = 'refused' WHERE reason IN ('not_authorized', 'bad_partition');
ALTER TABLE effectonce.outbox_dead
  DROP CONSTRAINT outbox_dead_reason_check,
  ADD CONSTRAINT outbox_dead_reason_check CHECK (reason IN ('unknown_topic', 'too_large', 'refused', 'bad_headers', 'paused', 'behind')),
  RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold, autovacuum_analyze_scale_factor, autovacuum_analyze_threshold);
ALTER TABLE effectonce.outbox_ticks RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold);

DROP VIEW effectonce.outbox_backlog;

-- What was published since the last copy is not published again.
UPDATE effectonce.outbox_progress p SET tick = w.tick, next_tick = w.next_tick, seq = w.seq, floor = w.floor,
  published = w.published, advanced_epoch = w.advanced_epoch
FROM effectonce.outbox_progress_now w WHERE w.relay = p.relay AND w.shard = p.shard;
DROP TRIGGER outbox_progress_removed ON effectonce.outbox_progress;
DROP TRIGGER outbox_progress_truncated ON effectonce.outbox_progress;
DROP TRIGGER outbox_progress_begins ON effectonce.outbox_progress;
DROP FUNCTION effectonce.outbox_progress_removed();
DROP FUNCTION effectonce.outbox_progress_begins();
DROP FUNCTION effectonce.end_progress(text, smallint);
DROP VIEW effectonce.outbox_progress_now;
DROP TABLE effectonce.outbox_advances;
ALTER TABLE effectonce.outbox_progress DROP COLUMN advance;

ALTER TABLE effectonce.outbox_paused DROP COLUMN id;
ALTER TABLE effectonce.outbox_replicas DROP COLUMN obeys;

DROP INDEX effectonce.outbox_scheduled_due;
ALTER TABLE effectonce.outbox_scheduled DROP COLUMN place;
CREATE INDEX outbox_scheduled_due ON effectonce.outbox_scheduled (due_at);
ALTER TABLE effectonce.outbox_replicas DROP COLUMN reached_at, DROP COLUMN state, DROP COLUMN problem;

ALTER TABLE effectonce.outbox DROP CONSTRAINT outbox_topic_is_no_kafka_topic_name,
  ADD CONSTRAINT outbox_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]{1,249}$' AND topic NOT IN ('.', '..'));
ALTER TABLE effectonce.outbox_scheduled DROP CONSTRAINT outbox_scheduled_topic_is_no_kafka_topic_name,
  ADD CONSTRAINT outbox_scheduled_topic_is_no_kafka_topic_name CHECK (topic ~ '^[A-Za-z0-9._-]{1,249}$' AND topic NOT IN ('.', '..'));
