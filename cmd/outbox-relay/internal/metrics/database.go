package metrics

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// Limits of a reading.
const (
	// For all groups together: with Config.Every the greatest age of a value.
	readMax      = 10 * time.Second
	statementMax = "3s"
	lockMax      = "500ms"
	waitingMax   = 10_000  // rows that are counted exactly; a larger backlog is estimated
	rowsMax      = 100_000 // dead rows and parked messages that are counted
	positionsMax = 1_000
)

// Describe implements prometheus.Collector: which values there are changes from reading to reading.
func (m *Metrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector with the values of the last reading.
func (m *Metrics) Collect(metrics chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, group := range m.last {
		for _, metric := range group {
			metrics <- metric
		}
	}
}

// Watch reads the database until ctx ends. It uses one connection of the pool at a time.
func (m *Metrics) Watch(ctx context.Context, pool *pgxpool.Pool) {
	var said []string // the groups whose failure was logged: an outage must not fill the log
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		failed, err := m.read(ctx, pool)
		if ctx.Err() != nil {
			return
		}
		if len(failed) > 0 && !slices.Equal(failed, said) {
			m.cfg.Logger.WarnContext(ctx, "metrics of the database could not be read; they are left out until they can be read again", "groups", failed, "error", err)
		}
		said = failed
		timer.Reset(m.cfg.Every)
	}
}

// read replaces the values of every group, and returns the groups that have none now.
func (m *Metrics) read(ctx context.Context, pool *pgxpool.Pool) (failed []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readMax)
	defer cancel()
	for _, g := range m.groups() {
		values, groupErr := m.readGroup(ctx, pool, g)
		if groupErr != nil {
			m.errors.Inc()
			failed = append(failed, g.name)
			err = errors.Join(err, fmt.Errorf("%s: %w", g.name, groupErr))
		}
		m.mu.Lock()
		m.last[g.name] = values
		m.mu.Unlock()
	}
	return failed, err
}

func (m *Metrics) readGroup(ctx context.Context, pool *pgxpool.Pool, g group) (values []prometheus.Metric, err error) {
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		asked := time.Now()
		var now time.Time
		if err := tx.QueryRow(ctx, limitsSQL, statementMax, lockMax).Scan(nil, nil, &now); err != nil {
			return err
		}
		m.clockAhead.Store(int64(now.Sub(asked.Add(time.Since(asked) / 2))))
		values, err = g.read(ctx, tx)
		return err
	})
	if pgerr.Is(err, pgerr.InsufficientPrivilege) && g.optional {
		return nil, nil // a role that may only relay
	}
	if err != nil {
		return nil, err
	}
	return values, nil
}

// group is what is read in one transaction.
type group struct {
	name     string
	optional bool // relaying needs no right to read it
	read     func(ctx context.Context, tx pgx.Tx) ([]prometheus.Metric, error)
}

func (m *Metrics) groups() []group {
	name := m.cfg.Relay
	return []group{
		{name: "pending", read: m.pending},
		{name: "shards", read: m.query(desc("effectonce_outbox_shards", "Shards of the relay, across all replicas.", "relay"), shardsSQL, []string{name}, name)},
		{name: "paused", read: m.query(desc("effectonce_outbox_paused_topics", "Paused topics of the relay.", "relay"), pausedSQL, []string{name}, name)},
		{name: "dead", read: m.query(desc("effectonce_outbox_dead_messages", "Rows in outbox_dead, counted up to 100000.", "relay", "reason", "state"), deadSQL, []string{name}, name, rowsMax)},
		{name: "size", read: m.query(desc("effectonce_outbox_table_bytes", "Size of the outbox in bytes, with indexes and TOAST."), sizeSQL, nil)},
		{name: "transactions", read: m.query(desc("effectonce_outbox_oldest_transaction_age_seconds", "Age of the oldest open transaction of the cluster that has written, in seconds; 0 if there is none."), transactionsSQL, nil)},
		{name: "scheduled", optional: true, read: m.scheduled},
		{name: "keys", optional: true, read: m.keys},
		{name: "parked", optional: true, read: m.query(desc("effectonce_parked_messages", "Messages that consumers parked, counted up to 100000 for each consumer.", "group", "topic", "reason"), parkedSQL, nil, rowsMax)},
		{name: "pauses", optional: true, read: m.query(desc("effectonce_consumer_paused_topics", "Topics that an operator paused for a group of consumers.", "group"), pausesSQL, nil)},
		{name: "positions", optional: true, read: m.query(desc("effectonce_consumer_position_age_seconds", "Age in seconds of the last record before a consumer's position, or since the consumer was last seen at the end of the partition.", "group", "topic", "partition"), positionsSQL, nil, positionsMax)},
	}
}

// pending counts as "outbox-relay status" does.
func (m *Metrics) pending(ctx context.Context, tx pgx.Tx) ([]prometheus.Metric, error) {
	shards, err := pipeline.ShardsOf(ctx, tx, m.cfg.Schema, m.cfg.Relay)
	if err == nil {
		err = pipeline.Count(ctx, tx, m.cfg.Schema, shards, waitingMax)
	}
	if err != nil {
		return nil, err
	}
	waiting, oldest := int64(0), 0.0
	for _, s := range shards {
		waiting, oldest = waiting+s.Waiting, max(oldest, s.OldestWaitingSeconds)
	}
	return []prometheus.Metric{
		gauge(desc("effectonce_outbox_pending_messages", "Committed rows that are not published, without dead rows: counted up to 10000, estimated from the sequence above that.", "relay"), float64(waiting), m.cfg.Relay),
		gauge(desc("effectonce_outbox_oldest_pending_age_seconds", "Age of the oldest unpublished row in seconds; 0 if there is none.", "relay"), oldest, m.cfg.Relay),
	}, nil
}

func (m *Metrics) scheduled(ctx context.Context, tx pgx.Tx) ([]prometheus.Metric, error) {
	s, err := pipeline.ReadScheduled(ctx, tx, m.cfg.Schema)
	if err != nil {
		return nil, err
	}
	return []prometheus.Metric{
		gauge(desc("effectonce_outbox_scheduled_messages", "Scheduled messages that are not in the outbox yet, counted up to 100000."), float64(s.Count)),
		gauge(desc("effectonce_outbox_oldest_overdue_age_seconds", "Seconds since the oldest scheduled message that is not in the outbox became due; 0 if none is due."), s.OldestOverdueSeconds),
	}, nil
}

func (m *Metrics) keys(ctx context.Context, tx pgx.Tx) ([]prometheus.Metric, error) {
	k, err := pipeline.ReadKeys(ctx, tx, m.cfg.Schema)
	if err != nil {
		return nil, err
	}
	values := []prometheus.Metric{gauge(desc("effectonce_oldest_unfinished_key_age_seconds", "Seconds since the oldest running idempotency key was first requested; 0 if none is running."), k.OldestUnfinishedSeconds)}
	for state, n := range map[string]int64{"running": k.Running, "indeterminate": k.Indeterminate, "abandoned": k.Abandoned} {
		values = append(values, gauge(desc("effectonce_idempotency_keys", "Idempotency keys that are not finished, by state, each state counted up to 10000.", "state"), float64(n), state))
	}
	return values, nil
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// gauge makes labels UTF-8, which a database with another encoding may not have.
func gauge(desc *prometheus.Desc, value float64, labels ...string) prometheus.Metric {
	for i, label := range labels {
		labels[i] = strings.ToValidUTF8(label, "\uFFFD")
	}
	return prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
}

// query reads rows of labels and, last, a value; it leaves out nulls. first are labels that all
// rows have.
func (m *Metrics) query(desc *prometheus.Desc, sql string, first []string, args ...any) func(context.Context, pgx.Tx) ([]prometheus.Metric, error) {
	return func(ctx context.Context, tx pgx.Tx) (values []prometheus.Metric, err error) {
		rows, err := tx.Query(ctx, migrations.InSchema(sql, m.cfg.Schema), args...)
		if err != nil {
			return nil, err
		}
		_, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (struct{}, error) {
			labels := make([]string, len(row.FieldDescriptions())-1)
			var value *float64
			into := make([]any, 0, len(labels)+1)
			for i := range labels {
				into = append(into, &labels[i])
			}
			if err := row.Scan(append(into, &value)...); err != nil || value == nil {
				return struct{}{}, err
			}
			values = append(values, gauge(desc, *value, slices.Concat(first, labels)...))
			return struct{}{}, nil
		})
		return values, err
	}
}
