// Package consumers has what an operator decides about consumers: pauses of topics, where a partition
// resumes, and the rule that gives messages their IDs. A decision is a row that the running consumers
// read. The same transaction records it in operator_actions.
package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/migrations"
)

// ErrUnknown means that there is no such group, topic, partition or consumer.
// Nothing was changed. The error lists those that exist.
var ErrUnknown = errors.New("unknown")

// Consumer is one consumer, with the name under which it claims.
type Consumer struct {
	Name   string   `json:"consumer"`
	Group  string   `json:"group"`
	Topics []string `json:"topics"`
	IDRule string   `json:"id_rule"`
	// Window is how many seconds it recognises redelivered messages; nil: forever.
	Window *float64 `json:"-"`
}

// Registered returns every consumer, by name.
func Registered(ctx context.Context, db operator.Querier, schema string) ([]Consumer, error) {
	return operator.Rows(ctx, db, "read consumers", schema, registeredSQL, pgx.RowToStructByPos[Consumer])
}

// change runs work in a transaction: see operator.Change.
func change(ctx context.Context, db operator.Beginner, what string, work func(tx pgx.Tx) error) error {
	err := operator.Change(ctx, db, func(tx pgx.Tx, _ time.Time) error { return work(tx) })
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// knows refuses a topic that no consumer of the group has: a decision on it would have no effect.
func knows(ctx context.Context, tx pgx.Tx, schema, group, topic string) error {
	type pair struct{ Group, Topic string }
	all, err := operator.Rows(ctx, tx, "read known groups", schema, knownSQL, pgx.RowToStructByPos[pair])
	if err != nil {
		return err
	}
	var groups, topics []string
	for _, p := range all {
		groups = append(groups, p.Group)
		if p.Group == group {
			topics = append(topics, p.Topic)
		}
	}
	switch {
	case len(topics) == 0:
		return fmt.Errorf("group %q is %w: %s", group, ErrUnknown, thereIs(slices.Compact(groups)))
	case !slices.Contains(topics, topic):
		return fmt.Errorf("topic %q of group %s is %w: %s", topic, group, ErrUnknown, thereIs(topics))
	}
	return nil
}

// namesMax bounds how many names an error lists.
const namesMax = 20

func thereIs(names []string) string {
	if len(names) == 0 {
		return "there is none"
	}
	shown := make([]string, min(len(names), namesMax))
	for i := range shown {
		shown[i] = strconv.Quote(names[i])
	}
	text := "there is " + strings.Join(shown, ", ")
	if more := len(names) - len(shown); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// Pause is a topic whose messages the consumers of a group do not handle.
type Pause struct {
	Group    string    `json:"group"`
	Topic    string    `json:"topic"`
	Who      string    `json:"who"`
	Why      string    `json:"why"`
	PausedAt time.Time `json:"paused_at"`
}

// Pauses returns the pauses of a group and a topic; nil is any.
func Pauses(ctx context.Context, db operator.Querier, schema string, group, topic *string) ([]Pause, error) {
	return operator.Rows(ctx, db, "read paused topics", schema, pausesSQL, pgx.RowToStructByPos[Pause], group, topic)
}

// PauseTopic makes the messages of a topic wait for a group, in Kafka. If the topic is already
// paused, that pause stays: PauseTopic returns it, and paused is false.
func PauseTopic(ctx context.Context, db operator.Beginner, schema string, by operator.By, group, topic string) (pause Pause, paused bool, err error) {
	err = change(ctx, db, "pause", func(tx pgx.Tx) error {
		if err := knows(ctx, tx, schema, group, topic); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, migrations.InSchema(pauseSQL, schema), group, topic, by.Who, by.Why)
		if err != nil {
			return err
		}
		found, err := Pauses(ctx, tx, schema, &group, &topic)
		if err != nil {
			return err
		}
		if len(found) > 0 { // empty: the pause was ended since then
			pause = found[0]
		}
		if paused = tag.RowsAffected() > 0; !paused {
			return nil
		}
		return operator.Note(ctx, tx, schema, by, "consumer.pause", map[string]any{"group": group, "topic": topic})
	})
	return pause, paused, err
}

// ResumeTopic ends a pause. resumed is false if there was none.
func ResumeTopic(ctx context.Context, db operator.Beginner, schema string, by operator.By, group, topic string) (resumed bool, err error) {
	err = change(ctx, db, "resume", func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, migrations.InSchema(resumeSQL, schema), group, topic)
		if err != nil {
			return err
		}
		// A pause may outlive the group's last consumer, so the pause is looked up first.
		if resumed = tag.RowsAffected() > 0; !resumed {
			return knows(ctx, tx, schema, group, topic)
		}
		return operator.Note(ctx, tx, schema, by, "consumer.resume", map[string]any{"group": group, "topic": topic})
	})
	return resumed, err
}

// CheckRule refuses a text that is no rule for IDs, and a rule that reads no header.
func CheckRule(rule string) error {
	parsed, err := dedup.ParseIDRule(rule)
	if err == nil && parsed.None() {
		err = errors.New("want the name of a header: headers:NAME,NAME")
	}
	return err
}

// Rule returns a consumer.
func Rule(ctx context.Context, db operator.Querier, schema, name string) (*Consumer, error) {
	return one(ctx, db, schema, ruleSQL, name)
}

func one(ctx context.Context, db operator.Querier, schema, sql, name string) (*Consumer, error) {
	found, err := operator.Rows(ctx, db, "read the consumer", schema, sql, pgx.RowToStructByPos[Consumer], name)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, unknownConsumer(ctx, db, schema, name)
	}
	return &found[0], nil
}

// SetRule changes how the messages of a consumer get their IDs, from its next start on. It returns
// the consumer as it was before. While a partition is held, it refuses, unless force says that its holder
// is dead: a running replica keeps the old rule.
func SetRule(ctx context.Context, db operator.Beginner, schema string, by operator.By, name, rule string, force bool) (before *Consumer, err error) {
	if err := CheckRule(rule); err != nil {
		return nil, fmt.Errorf("rule %.100q: %w", rule, err)
	}
	err = change(ctx, db, "change the rule for IDs", func(tx pgx.Tx) error {
		var err error
		if before, err = one(ctx, tx, schema, lockRuleSQL, name); err != nil || before.IDRule == rule {
			return err
		}
		held, err := operator.Rows(ctx, tx, "read positions", schema, holdersSQL, pgx.RowTo[string], before.Group, before.Topics)
		if err != nil {
			return err
		}
		if len(held) > 0 && !force {
			return fmt.Errorf("a replica runs, and would keep the old rule: %s; stop all replicas first, or give --force if their processes are dead", held[0])
		}
		if _, err := tx.Exec(ctx, migrations.InSchema(setRuleSQL, schema), name, rule); err != nil {
			return err
		}
		return operator.Note(ctx, tx, schema, by, "consumer.id_rule", map[string]any{"consumer": name, "id_rule": rule, "before": before.IDRule})
	})
	if err != nil {
		return nil, err
	}
	return before, nil
}

func unknownConsumer(ctx context.Context, db operator.Querier, schema, name string) error {
	all, err := Registered(ctx, db, schema)
	if err != nil {
		return err
	}
	names := make([]string, len(all))
	for i, c := range all {
		names[i] = c.Name
	}
	return fmt.Errorf("consumer %q is %w: %s", name, ErrUnknown, thereIs(names))
}
