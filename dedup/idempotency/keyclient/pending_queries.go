package keyclient

// pendingSettingsSQL: a key must be on disk before it is sent, whatever the role's defaults are.
const pendingSettingsSQL = `-- keyclient.pending_settings
SELECT set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

// beginPendingSQL makes a key pending, or returns the pending one: the insert decides. The update changes nothing,
// and lets RETURNING see a row of another transaction.
const beginPendingSQL = `-- keyclient.begin_pending
INSERT INTO effectonce.pending_requests AS p (client, request, key) VALUES ($1, $2, $3)
ON CONFLICT (client, request) DO UPDATE SET key = p.key RETURNING p.key, p.created_at < clock_timestamp() - $4::interval`

// forgetPendingSQL keeps a row that became pending under the same name with another key.
const forgetPendingSQL = `-- keyclient.forget_pending
DELETE FROM effectonce.pending_requests WHERE client = $1 AND request = $2 AND key = $3`

// listPendingSQL reads the names of one client, in a range scan of the primary key.
const listPendingSQL = `-- keyclient.list_pending
SELECT request, key, created_at, created_at < clock_timestamp() - $2::interval FROM effectonce.pending_requests
WHERE client = $1 AND request > $3 ORDER BY request LIMIT $4`
