-- Removes what 0002_consumer.up.sql made. Parked messages, fences, the claims of consumers that never
-- forget and the operator's log are lost with it.

SET search_path = pg_catalog, pg_temp;

DROP TABLE effectonce.fences;
DROP TABLE effectonce.operator_actions;
DROP TABLE effectonce.parked_messages;
DROP TABLE effectonce.message_attempts;
DROP FUNCTION effectonce.refuse_commit();
DROP FUNCTION effectonce.check_position(text, text, integer, bigint);
CREATE OR REPLACE FUNCTION effectonce.advance_position(
  p_group text, p_topic text, p_partition integer, p_epoch bigint, p_known bigint, p_next_offset bigint, p_record_time timestamptz)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  stored bigint;
BEGIN
  UPDATE effectonce.consumer_positions SET
    next_offset = greatest(next_offset, p_next_offset),
    record_time = CASE WHEN next_offset > p_next_offset THEN record_time ELSE p_record_time END,
    updated_at = clock_timestamp()
  WHERE consumer_group = p_group AND topic = p_topic AND partition = p_partition AND epoch = p_epoch
    AND (p_known IS NULL OR next_offset >= p_known)
  RETURNING next_offset INTO stored;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'position of group %, topic %, partition % is held by another consumer, or went back', p_group, p_topic, p_partition
      USING ERRCODE = 'EO001', HINT = format('epoch %s, offset %s', p_epoch, p_known);
  END IF;
  RETURN stored;
END
$$;
ALTER TABLE effectonce.consumer_positions
  DROP COLUMN released, DROP COLUMN held_offset, DROP COLUMN stuck, DROP COLUMN caught_up_at, DROP COLUMN trouble, DROP COLUMN trouble_since;
DROP TABLE effectonce.maintenance;
DROP TABLE effectonce.processed_forever;
ALTER TABLE effectonce.processed_messages DROP COLUMN fingerprint;
ALTER TABLE effectonce.consumers DROP COLUMN dedup_window;
