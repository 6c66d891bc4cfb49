package bench

import "github.com/effectonce/effectonce/migrations"

// tablesSQL creates the tables that the work writes, the textbook's table of processed messages (an
// ID and a consumer, both text, as in articles), and its table of idempotency keys. The effect has a
// primary key, as any real table has.
const tablesSQL = `-- bench.tables
CREATE TABLE effectonce.bench_effects (
  id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  account text   NOT NULL,
  body    bytea  NOT NULL
);
CREATE TABLE effectonce.bench_accounts (id int PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO effectonce.bench_accounts SELECT n, 0 FROM generate_series(0, 9999) AS n;
CREATE TABLE effectonce.bench_processed (
  message_id   text        NOT NULL,
  consumer     text        NOT NULL,
  processed_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (message_id, consumer)
);
CREATE TABLE effectonce.bench_keys (
  tenant     text        NOT NULL,
  key        text        NOT NULL,
  request    bytea       NOT NULL,
  response   bytea,
  created_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant, key)
)`

// forgetSQL gives every run empty tables.
const forgetSQL = `-- bench.forget
TRUNCATE effectonce.processed_messages, effectonce.idempotency_keys, effectonce.bench_processed, effectonce.bench_keys, effectonce.bench_effects`

const effectSQL = `-- bench.effect
INSERT INTO effectonce.bench_effects (account, body) VALUES ($1, $2)`

const textbookClaimSQL = `-- bench.textbook_claim
INSERT INTO effectonce.bench_processed (message_id, consumer) VALUES ($1, $2) ON CONFLICT DO NOTHING`

// effectsSQL counts the effects of a run. Bodies are different, so the two numbers distinguish lost
// from doubled effects.
const effectsSQL = `-- bench.effects
SELECT count(*), count(DISTINCT body) FROM effectonce.bench_effects`

const footprintSQL = `-- bench.footprint
SELECT (SELECT sum(pg_total_relation_size(relid))::bigint FROM pg_partition_tree('effectonce.processed_messages') WHERE isleaf)
    + pg_total_relation_size('effectonce.idempotency_keys'),
  (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint, pg_snapshot_xmax(pg_current_snapshot())::text::bigint`

const bookSQL = `-- bench.book
UPDATE effectonce.bench_accounts SET balance = balance + 1 WHERE id = $1`

const textbookKeySQL = `-- bench.textbook_key
INSERT INTO effectonce.bench_keys (tenant, key, request) VALUES ('tenant', $1, $2) ON CONFLICT DO NOTHING`

const textbookResponseSQL = `-- bench.textbook_response
UPDATE effectonce.bench_keys SET response = $2 WHERE tenant = 'tenant' AND key = $1`

// expireSQL ends the window of all keys.
const expireSQL = `-- bench.expire
UPDATE effectonce.idempotency_keys SET expires_at = clock_timestamp()`

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

// sql puts a statement into the benchmark's schema.
func (s *site) sql(statement string) string { return migrations.InSchema(statement, s.Schema) }
