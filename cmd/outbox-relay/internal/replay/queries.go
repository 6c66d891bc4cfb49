package replay

import "github.com/effectonce/effectonce/cmd/outbox-relay/internal/inspect"

// chosen are the rows that the relay has published and Kafka has accepted. Dead rows and discarded
// rows are not among them. $1 to $6 are the cut, $7 and $8 the times, $9 the topic, $10 the relay,
// $11 the last seq, $12 and $13 the snapshots of the ticks.
const chosen = `FROM effectonce.outbox o ` + inspect.CutJoin + `
WHERE ($7::timestamptz IS NULL OR o.created_at >= $7) AND ($8::timestamptz IS NULL OR o.created_at < $8)
  AND ($12::text IS NULL OR NOT pg_visible_in_snapshot(o.txid, (SELECT $12::text::pg_snapshot)))
  AND ($13::text IS NULL OR pg_visible_in_snapshot(o.txid, (SELECT $13::text::pg_snapshot)))
  AND ($9::text IS NULL OR o.topic = $9) AND o.seq <= $11 AND ` + inspect.CutPublished + `
  AND NOT EXISTS (SELECT FROM effectonce.outbox_dead d WHERE d.relay = $10 AND d.seq = o.seq)`

const countSQL = `-- replay.count
WITH ` + inspect.CutCTE + `
SELECT count(*) ` + chosen

const lastSQL = `-- replay.last
SELECT coalesce(pg_catalog.max(seq), 0) FROM effectonce.outbox`

const tickSQL = `-- replay.tick
SELECT snapshot::text FROM effectonce.outbox_ticks WHERE tick = $1`

const pageSQL = `-- replay.page
WITH ` + inspect.CutCTE + `
SELECT o.seq, o.id, o.topic, o.key, o.payload, o.headers::text AS headers_text, o.created_at ` + chosen + `
  AND o.seq > $14 ORDER BY o.seq LIMIT $15`

const noteSQL = `-- replay.note
INSERT INTO effectonce.operator_actions (who, what, why, subject) VALUES ($1, 'replay', $2, $3)`
