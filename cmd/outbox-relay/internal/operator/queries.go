package operator

// settingsSQL bounds how long an operator's transaction may block others, whatever the role's
// defaults, and makes its changes durable.
const settingsSQL = `-- operator.settings
SELECT clock_timestamp(), set_config('lock_timeout', '30s', true), set_config('statement_timeout', '2min', true),
  set_config('idle_in_transaction_session_timeout', '30s', true),
  set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

const actionsSQL = `-- operator.actions
SELECT id, who, stated, what, why, "when", db_role, subject::text FROM effectonce.operator_actions
WHERE ($1::text IS NULL OR subject->>'message_id' = $1) AND ($2::interval IS NULL OR "when" > clock_timestamp() - $2)
ORDER BY id DESC LIMIT $3`

const noteSQL = `-- operator.note
INSERT INTO effectonce.operator_actions (who, what, why, subject) VALUES ($1, $2, $3, $4)`
