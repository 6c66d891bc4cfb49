package publishers

const settingsSQL = `-- publishers.settings
SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '10s', true), pg_catalog.set_config('statement_timeout', '10s', true)`

const listSQL = `-- publishers.list
SELECT p.role::text, p.topics FROM effectonce.outbox_publishers p ORDER BY p.role`

// limitSQL: a trigger of the table creates the triggers that check inserts.
const limitSQL = `-- publishers.limit
WITH listed AS (
  INSERT INTO effectonce.outbox_publishers (role, topics) VALUES ($1::text::name, $2::text[])
  ON CONFLICT (role) DO UPDATE SET topics = excluded.topics RETURNING 1
)
INSERT INTO effectonce.operator_actions (who, what, why, subject)
SELECT $3, 'publisher.limit', $4, pg_catalog.jsonb_build_object('role', $1::text, 'topics', $2::text[]) FROM listed`

const freeSQL = `-- publishers.free
WITH gone AS (
  DELETE FROM effectonce.outbox_publishers p WHERE p.role = $1::text::name RETURNING p.topics
)
INSERT INTO effectonce.operator_actions (who, what, why, subject)
SELECT $2, 'publisher.free', $3, pg_catalog.jsonb_build_object('role', $1::text, 'topics', gone.topics) FROM gone`
