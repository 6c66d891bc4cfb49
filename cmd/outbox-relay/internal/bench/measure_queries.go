package bench

// accounts is how many accounts the handlers of keys change.
const accounts = 10_000

const accountsSQL = `-- bench.accounts
CREATE TABLE effectonce.bench_accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
INSERT INTO effectonce.bench_accounts SELECT i, 0 FROM generate_series(0, 9999) AS i`

const bookSQL = `-- bench.book
UPDATE effectonce.bench_accounts SET balance = balance + 1 WHERE id = $1`

const emptyKeysSQL = `-- bench.empty_keys
TRUNCATE effectonce.idempotency_keys, effectonce.bench_effects`

const emptyEffectsSQL = `-- bench.empty_effects
TRUNCATE effectonce.bench_effects`

// copyTextbookSQL gives the textbook the claims that the engine has.
const copyTextbookSQL = `-- bench.copy_textbook
INSERT INTO effectonce.bench_processed (message_id, consumer) SELECT message_id::text, consumer::text FROM effectonce.processed_messages ORDER BY message_id;
ANALYZE effectonce.bench_processed; ANALYZE effectonce.processed_messages`

const textbookBytesSQL = `-- bench.textbook_bytes
SELECT pg_total_relation_size('effectonce.bench_processed')`

// someClaimSQL finds a claim in the middle.
const someClaimSQL = `-- bench.some_claim
SELECT message_id, consumer FROM effectonce.processed_messages ORDER BY message_id OFFSET $1 LIMIT 1`

// The look-ups have the ID as a constant, so that they touch one partition only.
const claimLookUpSQL = `EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) -- bench.claim_look_up
SELECT FROM effectonce.processed_messages WHERE message_id = '%s' AND consumer = %d`

const textbookLookUpSQL = `EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) -- bench.textbook_look_up
SELECT FROM effectonce.bench_processed WHERE message_id = '%s' AND consumer = '%d'`
