package consumers

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/migrations"
)

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
	found, err := operator.Rows(ctx, db, "read the consumer", schema, ruleSQL, pgx.RowToStructByPos[Consumer], name)
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
		found, err := operator.Rows(ctx, tx, "read the consumer", schema, lockRuleSQL, pgx.RowToStructByPos[Consumer], name)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return unknownConsumer(ctx, tx, schema, name)
		}
		if before = &found[0]; before.IDRule == rule {
			return nil
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
