package relay

// pauseSQL and the statements after it are run by operators, not by relays: see pause.go.
const pauseSQL = `-- relay.pause
WITH paused AS (
  INSERT INTO effectonce.outbox_paused (relay, topic, who, why) SELECT $1, t.topic, $3, $4 FROM pg_catalog.unnest($2::text[]) AS t (topic)
  ON CONFLICT (relay, topic) DO NOTHING RETURNING topic
), noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'topic.pause', $4, pg_catalog.jsonb_build_object('relay', $1::text, 'topic', topic) FROM paused
)
SELECT topic FROM paused ORDER BY topic`

const resumeSQL = `-- relay.resume
WITH resumed AS (
  DELETE FROM effectonce.outbox_paused WHERE relay = $1 AND topic = ANY ($2::text[]) RETURNING topic
), noted AS (
  INSERT INTO effectonce.operator_actions (who, what, why, subject)
  SELECT $3, 'topic.resume', $4, pg_catalog.jsonb_build_object('relay', $1::text, 'topic', topic) FROM resumed
)
SELECT topic FROM resumed ORDER BY topic`

const pausedSQL = `-- relay.paused
SELECT topic, who, why, paused_at FROM effectonce.outbox_paused WHERE relay = $1 ORDER BY topic`

// unconfirmedSQL returns the owners that do not obey the pauses of topics $2 yet: replicas that are
// alive, and holders of a lease that are no longer on the list. Its first column reports whether
// any replica runs.
const unconfirmedSQL = `-- relay.unconfirmed
WITH wanted AS (
  SELECT coalesce(pg_catalog.array_agg(id), '{}') AS ids FROM effectonce.outbox_paused WHERE relay = $1 AND topic = ANY ($2::text[])
), working AS (
  SELECT owner, obeys, true AS listed FROM effectonce.outbox_replicas WHERE relay = $1 AND alive_until > clock_timestamp()
  UNION ALL
  SELECT DISTINCT p.owner, NULL::uuid[], false FROM effectonce.outbox_progress p
  WHERE p.relay = $1 AND p.lease_until > clock_timestamp() AND p.owner IS NOT NULL AND NOT EXISTS (
    SELECT FROM effectonce.outbox_replicas r WHERE r.relay = $1 AND r.owner = p.owner AND r.alive_until > clock_timestamp())
)
SELECT EXISTS (SELECT FROM working), coalesce((SELECT pg_catalog.array_agg(owner || CASE
    WHEN NOT listed THEN ' (holds a lease, and is not alive)' ELSE '' END ORDER BY owner)
  FROM working WHERE (obeys OPERATOR(pg_catalog.@>) wanted.ids) IS NOT TRUE), '{}')
FROM wanted`

// withoutRowsSQL returns the topics that have no row in any table.
const withoutRowsSQL = `-- relay.without_rows
SELECT t.topic FROM pg_catalog.unnest($2::text[]) WITH ORDINALITY AS t (topic, place)
WHERE NOT EXISTS (SELECT FROM effectonce.outbox_paused p WHERE p.relay = $1 AND p.topic = t.topic)
  AND NOT EXISTS (SELECT FROM effectonce.outbox_dead d WHERE d.relay = $1 AND d.topic = t.topic AND d.state IN ('held', 'behind', 'retry'))
  AND NOT EXISTS (SELECT FROM effectonce.outbox_scheduled s WHERE s.topic = t.topic)
  AND NOT EXISTS (SELECT FROM effectonce.outbox o WHERE o.topic = t.topic)
ORDER BY t.place`
