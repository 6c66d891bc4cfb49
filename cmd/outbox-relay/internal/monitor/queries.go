package monitor

const limitsSQL = `-- monitor.limits
SELECT pg_catalog.set_config('statement_timeout', $1, true), pg_catalog.set_config('lock_timeout', $1, true), pg_is_in_recovery()`

const heldSQL = `-- monitor.held
SELECT EXISTS (SELECT FROM effectonce.outbox_progress WHERE relay = $1 AND lease_until > clock_timestamp())`
