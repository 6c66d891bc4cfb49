package bench

import "github.com/effectonce/effectonce/migrations"

// consumeTablesSQL creates the tables that the handlers write, and the textbook's table of
// processed messages: an ID and a consumer, both text, as in articles. The effect has a primary
// key, as any real table has.
const consumeTablesSQL = `-- bench.consume_tables
CREATE TABLE effectonce.bench_effects (
  id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  account text   NOT NULL,
  body    bytea  NOT NULL
);
CREATE TABLE effectonce.bench_processed (
  message_id   text        NOT NULL,
  consumer     text        NOT NULL,
  processed_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (message_id, consumer)
)`

// forgetSQL gives every run empty tables.
const forgetSQL = `-- bench.forget
TRUNCATE effectonce.processed_messages, effectonce.bench_processed, effectonce.bench_effects`

const effectSQL = `-- bench.effect
INSERT INTO effectonce.bench_effects (account, body) VALUES ($1, $2)`

// The statements of the engine, as the loop by hand sends them. handConsumer was never registered.
const (
	handConsumer = 2_000_000_000

	handPositionsSQL = `-- bench.hand_positions
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, released)
SELECT $1, $2, n, false FROM generate_series(0, $3::int - 1) n`
	handGuardSQL = `-- bench.hand_guard
DECLARE bench_guard NO SCROLL CURSOR WITH HOLD FOR SELECT effectonce.refuse_commit()`
	handSettingsSQL = `-- bench.hand_settings
SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', $2, true),
  set_config('idle_in_transaction_session_timeout', $3, true),
  set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`
	handClaimSQL = `-- bench.hand_claim
INSERT INTO effectonce.processed_messages (message_id, consumer, fingerprint)
SELECT id, $2, 0 FROM pg_catalog.unnest($1::uuid[]) AS id
ON CONFLICT DO NOTHING
RETURNING message_id`
	handAgeSQL = `-- bench.hand_age
SELECT clock_timestamp() - coalesce((SELECT dedup_window FROM effectonce.consumers WHERE id = 1), interval '7 days')`
	handAdvanceSQL = `-- bench.hand_advance
SELECT effectonce.advance_position($1, $2, $3, $4, $5, $6, $7)`
)

// holdKeySQL parks a message of one key in each partition, so that later messages of the key are
// parked behind it.
const holdKeySQL = `-- bench.hold_key
INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", key, reason, error, state)
SELECT $1, gen_random_uuid(), $2, n, -1, convert_to('account-0', 'UTF8'), 'permanent', 'benchmark', 'parked' FROM generate_series(0, $3::int - 1) n`

const emptyParkedSQL = `-- bench.empty_parked
TRUNCATE effectonce.parked_messages`

const roundTripSQL = `-- bench.round_trip
SELECT 1`

const textbookClaimSQL = `-- bench.textbook_claim
INSERT INTO effectonce.bench_processed (message_id, consumer) VALUES ($1, $2) ON CONFLICT DO NOTHING`

// effectsSQL counts the effects of a run. Bodies are different, so the two numbers distinguish lost
// from doubled effects.
const effectsSQL = `-- bench.effects
SELECT count(*), count(DISTINCT body) FROM effectonce.bench_effects`

// rewindSQL makes a group start over, as an operator would; the claims remain.
const rewindSQL = `-- bench.rewind
DELETE FROM effectonce.consumer_positions WHERE consumer_group = $1`

const claimBytesSQL = `-- bench.claim_bytes
SELECT sum(pg_total_relation_size(relid))::bigint FROM pg_partition_tree('effectonce.processed_messages') WHERE isleaf`

const walSQL = `-- bench.wal
SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn`

// pollerTableSQL is the outbox of the textbook, in the variant that deletes published rows:
// updating a published_at in them was measured to be slower by a third.
const pollerTableSQL = `-- bench.poller_table
CREATE TABLE effectonce.bench_poller (
  id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  message_id uuid        NOT NULL,
  topic      text        NOT NULL,
  key        bytea,
  payload    bytea,
  headers    jsonb       NOT NULL DEFAULT '{}',
  created_at timestamptz NOT NULL DEFAULT clock_timestamp()
)`

// fillSQL publishes by plain SQL. The payload is text without repetitions that compresses by half,
// as JSON does.
const fillSQL = `-- bench.fill
INSERT INTO effectonce.outbox (topic, key, payload)
SELECT $1, convert_to('account-' || (hashint8(n) & 2147483647) % $2, 'UTF8'),
  convert_to((SELECT string_agg(md5(n::text || part::text), '') FROM generate_series(1, $3 / 32) AS part), 'UTF8')
FROM generate_series($4::bigint, $5::bigint) AS n`

const emptyOutboxSQL = `-- bench.empty_outbox
TRUNCATE effectonce.outbox`

// refillSQL gives the poller the same rows.
const refillSQL = `-- bench.refill
INSERT INTO effectonce.bench_poller (message_id, topic, key, payload, headers, created_at)
SELECT id, topic, key, payload, headers, created_at FROM effectonce.outbox ORDER BY seq`

const emptyPollerSQL = `-- bench.empty_poller
TRUNCATE effectonce.bench_poller`

const pollSQL = `-- bench.poll
SELECT id, message_id, topic, key, payload, headers::text, created_at
FROM effectonce.bench_poller ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED`

const publishedSQL = `-- bench.published
DELETE FROM effectonce.bench_poller WHERE id = ANY ($1)`

// cursorSQL reads in the order of seq. It loses rows that commit late: that is why it should not be
// used, and why it is the fastest.
const cursorSQL = `-- bench.cursor
SELECT seq, id, topic, key, payload, headers::text, created_at
FROM effectonce.outbox WHERE seq > $1 ORDER BY seq LIMIT $2`

// gapSafeSQL reads only rows below every open transaction. It loses nothing, but one long
// transaction anywhere in the cluster blocks it.
const gapSafeSQL = `-- bench.gap_safe_cursor
SELECT seq, id, topic, key, payload, headers::text, created_at
FROM effectonce.outbox WHERE seq > $1 AND txid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY seq LIMIT $2`

// enqueueSQL publishes a message for the poller.
const enqueueSQL = `-- bench.enqueue
INSERT INTO effectonce.bench_poller (message_id, topic, key, payload) VALUES ($1, $2, $3, $4)`

const backendSQL = `-- bench.backend
SELECT pg_backend_pid(), inet_client_port()`

// sql puts a statement into the benchmark's schema.
func (s *site) sql(statement string) string { return migrations.InSchema(statement, s.schema) }
