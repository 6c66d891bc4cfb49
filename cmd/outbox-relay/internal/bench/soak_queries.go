package bench

// soakTableSQL creates a row for each group and partition: what is handled leaves no other trace.
const soakTableSQL = `-- bench.soak_table
CREATE TABLE effectonce.bench_soak (
  consumer_group text    NOT NULL,
  partition      int     NOT NULL,
  handled        bigint  NOT NULL,
  total          bigint  NOT NULL,
  PRIMARY KEY (consumer_group, partition)
)`

const soakHandledSQL = `-- bench.soak_handled
INSERT INTO effectonce.bench_soak AS s (consumer_group, partition, handled, total) VALUES ($1, $2, $3, $4)
ON CONFLICT (consumer_group, partition) DO UPDATE SET handled = s.handled + excluded.handled, total = s.total + excluded.total`

const soakGroupsSQL = `-- bench.soak_groups
SELECT count(DISTINCT consumer_group) FROM effectonce.bench_soak`

const soakCountsSQL = `-- bench.soak_counts
SELECT sum(handled)::bigint, sum(total)::bigint FROM effectonce.bench_soak GROUP BY consumer_group ORDER BY consumer_group`

const soakPositionsSQL = `-- bench.soak_positions
SELECT partition, min(next_offset) FROM effectonce.consumer_positions WHERE topic = $1
GROUP BY partition HAVING count(next_offset) = $2`

const soakEndSQL = `-- bench.soak_end
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database()`

// soakSampleSQL leaves out the rows of bench_soak, which are the benchmark's.
const soakSampleSQL = `-- bench.soak_sample
SELECT (SELECT count(*)::float8 FROM pg_stat_activity WHERE starts_with(application_name, $1) AND datname = current_database()),
  (SELECT coalesce(sum(n_dead_tup), 0)::float8 FROM pg_stat_user_tables WHERE schemaname = $1 AND relname <> 'bench_soak'),
  (SELECT sum(pg_total_relation_size(relid)) / 1e6 FROM pg_partition_tree('effectonce.outbox') WHERE isleaf)::float8,
  (pg_total_relation_size('effectonce.idempotency_keys') / 1e6)::float8,
  (SELECT sum(pg_total_relation_size(relid)) / 1e6 FROM pg_partition_tree('effectonce.processed_messages') WHERE isleaf)::float8`
