package relay

// pauseSQL and what follows are what operators run, not relays: see pause.go.
const pauseSQL = `-- relay.pause
WITH paused AS (
  INSERT INTO effectonce.outbox_paused (relay, topic, who, why) SELECT $1, t.topic, $3, $4 FROM pg_catalog.unnest($2::text[]) AS t (topic)
  ON CONFLICT (relay, topic) DO NOTHING RETURNING topic
), noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'topic.pause', $4, jsonb_build_object('relay', $1::text, 'topic', topic) FROM paused
)
SELECT topic FROM paused ORDER BY topic`

const resumeSQL = `-- relay.resume
WITH resumed AS (
  DELETE FROM effectonce.outbox_paused WHERE relay = $1 AND topic = ANY ($2::text[]) RETURNING topic
), noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'topic.resume', $4, jsonb_build_object('relay', $1::text, 'topic', topic) FROM resumed
)
SELECT topic FROM resumed ORDER BY topic`

const pausedSQL = `-- relay.paused
SELECT topic, who, why, paused_at FROM effectonce.outbox_paused WHERE relay = $1 ORDER BY topic`

// wantShardsSQL: see SetShards.
const wantShardsSQL = `-- relay.want_shards
WITH wanted AS (
  UPDATE effectonce.outbox_relays SET shards_wanted = nullif($2, shards) WHERE relay = $1 RETURNING shards
), noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'relay.shards', $4, jsonb_build_object('relay', $1::text, 'shards', shards, 'wanted', $2::smallint) FROM wanted
)
SELECT shards FROM wanted`
