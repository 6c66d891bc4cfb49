package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// RuleLegacy is that of consumers which the release before schema version 5 registered: it reads headers that producers use
// for other things, such as id and idempotency-key.
const RuleLegacy = "legacy"

// Bounds of the rule headers:NAME,NAME.
const (
	ruleBytesMax   = 2048
	headersMax     = 20
	headerBytesMax = 255
)

// CheckRule refuses what is no rule for IDs.
func CheckRule(rule string) error {
	list, isHeaders := strings.CutPrefix(rule, "headers:")
	switch names := strings.Split(list, ","); {
	case rule == RuleLegacy || isHeaders && list == "": // no header names a message then
		return nil
	case !isHeaders:
		return checkProfiles(rule)
	case len(names) > headersMax || len(rule) > ruleBytesMax:
		return fmt.Errorf("want at most %d headers, and %d bytes in all", headersMax, ruleBytesMax)
	case slices.ContainsFunc(names, badHeader):
		return fmt.Errorf("name of a header: want 1 to %d visible characters of ASCII", headerBytesMax)
	}
	return nil
}

func badHeader(name string) bool {
	return name == "" || len(name) > headerBytesMax || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' })
}

// checkProfiles refuses what is not standard with known profiles, each once.
func checkProfiles(rule string) error {
	parts := strings.Split(rule, "+")
	for i, part := range parts {
		known := i == 0 && part == "standard" || i > 0 && (part == "debezium" || part == "watermill")
		if !known || slices.Contains(parts[:i], part) {
			return errors.New("want legacy, standard, standard+debezium, standard+watermill or headers:NAME,NAME…")
		}
	}
	return nil
}

// Rule returns a consumer.
func Rule(ctx context.Context, db operator.Querier, schema, name string) (*Consumer, error) {
	found, err := collect[Consumer](ctx, db, "read the consumer", migrations.InSchema(ruleSQL, schema), name)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, unknownConsumer(ctx, db, schema, name)
	}
	return &found[0], nil
}

// SetRule changes how the messages of a consumer get their IDs, from its next start on. It returns the consumer as it was.
func SetRule(ctx context.Context, db operator.Beginner, schema string, by operator.By, name, rule string) (before *Consumer, err error) {
	if err := CheckRule(rule); err != nil {
		return nil, fmt.Errorf("rule %.100q: %w", rule, err)
	}
	err = order(ctx, db, "change the rule for IDs", func(tx pgx.Tx) error {
		found, err := collect[Consumer](ctx, tx, "read the consumer", migrations.InSchema(lockRuleSQL, schema), name)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return unknownConsumer(ctx, tx, schema, name)
		}
		if before = &found[0]; before.IDRule == rule {
			return nil
		}
		if _, err := tx.Exec(ctx, migrations.InSchema(setRuleSQL, schema), name, rule); err != nil {
			return err
		}
		return note(ctx, tx, schema, by, "consumer.id_rule", map[string]any{"consumer": name, "id_rule": rule, "before": before.IDRule})
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
