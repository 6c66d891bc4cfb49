package consumers

// knownSQL lists the topics of groups: of registered consumers, and of positions that were stored
// before.
const knownSQL = `-- consumers.known
SELECT consumer_group, topic FROM (
  SELECT consumer_group, pg_catalog.unnest(topics) AS topic FROM effectonce.consumers
  UNION SELECT consumer_group, topic FROM effectonce.consumer_positions
) known ORDER BY consumer_group, topic LIMIT 10000`

const registeredSQL = `-- consumers.registered
SELECT name, consumer_group, topics, id_rule, extract(epoch FROM dedup_window)::float8 FROM effectonce.consumers ORDER BY name`

const pausesSQL = `-- consumers.pauses
SELECT consumer_group, topic, who, why, paused_at FROM effectonce.consumer_pauses
WHERE ($1::text IS NULL OR consumer_group = $1) AND ($2::text IS NULL OR topic = $2) ORDER BY consumer_group, topic`

// pauseSQL leaves an existing pause unchanged, with its reason.
const pauseSQL = `-- consumers.pause
INSERT INTO effectonce.consumer_pauses (consumer_group, topic, who, why) VALUES ($1, $2, $3, $4)
ON CONFLICT (consumer_group, topic) DO NOTHING`

const resumeSQL = `-- consumers.resume
DELETE FROM effectonce.consumer_pauses WHERE consumer_group = $1 AND topic = $2`

// requestsSQL lists where holders of partitions are asked to resume, and did not yet.
const requestsSQL = `-- consumers.requests
SELECT consumer_group, topic, partition, next_offset, resume_at, CASE WHEN released THEN '' ELSE coalesce(owner, '') END
FROM effectonce.consumer_positions WHERE resume_at IS NOT NULL ORDER BY consumer_group, topic, partition LIMIT 1000`

// positionSQL locks the row. Its holder stores the next position after the request commits, and sees
// the request then.
const positionSQL = `-- consumers.position
SELECT next_offset, resume_at, CASE WHEN released THEN '' ELSE coalesce(owner, '') END, coalesce(trouble, '') FROM effectonce.consumer_positions
WHERE consumer_group = $1 AND topic = $2 AND partition = $3 FOR UPDATE`

const partitionsSQL = `-- consumers.partitions
SELECT partition FROM effectonce.consumer_positions WHERE consumer_group = $1 AND topic = $2 ORDER BY partition LIMIT 10000`

const resumeAtSQL = `-- consumers.resume_at
UPDATE effectonce.consumer_positions SET resume_at = $4 WHERE consumer_group = $1 AND topic = $2 AND partition = $3`

const ruleSQL = `-- consumers.rule
SELECT name, consumer_group, topics, id_rule, extract(epoch FROM dedup_window)::float8 FROM effectonce.consumers WHERE name = $1`

const lockRuleSQL = ruleSQL + ` FOR UPDATE`

const holdersSQL = `-- consumers.holders
SELECT pg_catalog.concat(topic, '/', partition, ' is held by ', owner) FROM effectonce.consumer_positions
WHERE consumer_group = $1 AND topic = ANY ($2) AND NOT released AND owner IS NOT NULL ORDER BY topic, partition LIMIT 1`

const setRuleSQL = `-- consumers.set_rule
UPDATE effectonce.consumers SET id_rule = $2 WHERE name = $1`
