package metrics

import (
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/migrations"
)

// group is what is read in one transaction.
type group struct {
	name     string
	optional bool // relaying needs no right to read it
	read     func(ctx context.Context, tx pgx.Tx) ([]prometheus.Metric, error)
}

func (m *Metrics) groups() []group {
	d, name := m.database, m.cfg.Relay
	return []group{
		{name: "pending", read: m.pending},
		{name: "shards", read: m.query(d.shards, shardsSQL, []string{name}, name)},
		{name: "paused", read: m.query(d.paused, pausedSQL, []string{name}, name)},
		{name: "dead", read: m.query(d.dead, deadSQL, []string{name}, name, rowsMax)},
		{name: "size", read: m.query(d.size, sizeSQL, nil)},
		{name: "transactions", read: m.query(d.transactions, transactionsSQL, nil)},
		{name: "scheduled", optional: true, read: m.scheduled},
		{name: "keys", optional: true, read: m.keys},
		{name: "parked", optional: true, read: m.query(d.parked, parkedSQL, nil, rowsMax)},
		{name: "pauses", optional: true, read: m.query(d.pauses, pausesSQL, nil)},
		{name: "positions", optional: true, read: m.query(d.positions, positionsSQL, nil, positionsMax)},
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
	return []prometheus.Metric{gauge(m.database.pending, float64(waiting), m.cfg.Relay), gauge(m.database.oldest, oldest, m.cfg.Relay)}, nil
}

func (m *Metrics) scheduled(ctx context.Context, tx pgx.Tx) ([]prometheus.Metric, error) {
	s, err := doctor.ReadScheduled(ctx, tx, m.cfg.Schema)
	if err != nil {
		return nil, err
	}
	return []prometheus.Metric{gauge(m.database.scheduled, float64(s.Count)), gauge(m.database.overdue, s.OldestOverdueSeconds)}, nil
}

func (m *Metrics) keys(ctx context.Context, tx pgx.Tx) ([]prometheus.Metric, error) {
	k, err := doctor.ReadKeys(ctx, tx, m.cfg.Schema)
	if err != nil {
		return nil, err
	}
	values := []prometheus.Metric{gauge(m.database.unfinished, k.OldestUnfinishedSeconds)}
	for state, n := range map[string]int64{"running": k.Running, "indeterminate": k.Indeterminate, "abandoned": k.Abandoned} {
		values = append(values, gauge(m.database.keys, float64(n), state))
	}
	return values, nil
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
