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
