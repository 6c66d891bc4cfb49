package keyclient

// pendingSettingsSQL: a key must be on disk before it is sent, whatever the role's defaults are.
const pendingSettingsSQL = `-- keyclient.pending_settings
SELECT set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

// beginPendingSQL makes a key pending, or finds the pending one: the insert decides. No row:
// another transaction committed the name while the insert waited; the next statement sees it.
const beginPendingSQL = `-- keyclient.begin_pending
WITH made AS (
  INSERT INTO effectonce.pending_requests (client, request, key) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING RETURNING key)
SELECT key, false FROM made
UNION ALL
SELECT key, created_at < clock_timestamp() - $4::interval FROM effectonce.pending_requests WHERE client = $1 AND request = $2`

// forgetPendingSQL keeps a row that became pending under the same name with another key.
const forgetPendingSQL = `-- keyclient.forget_pending
DELETE FROM effectonce.pending_requests WHERE client = $1 AND request = $2 AND key = $3`

// listPendingSQL reads the names of one client, in a range scan of the primary key.
const listPendingSQL = `-- keyclient.list_pending
SELECT request, key, created_at, created_at < clock_timestamp() - $2::interval FROM effectonce.pending_requests
WHERE client = $1 AND request > $3 ORDER BY request LIMIT $4`
