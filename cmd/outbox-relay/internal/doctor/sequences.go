package doctor

import (
	"context"
	"fmt"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

const repairCommand = "outbox-relay repair"

// readSequences describes how a sequence of the outbox is behind the numbers that rows or ticks
// have. Empty: none is.
func readSequences(ctx context.Context, db operator.Querier, schema string) (behind string, err error) {
	var is bool
	var last, known, tick, tickKnown int64
	var reused *int64
	if err := db.QueryRow(ctx, inSchema(sequencesSQL, schema)).Scan(&is, &last, &known, &tick, &tickKnown, &reused); err != nil {
		return "", fmt.Errorf("check the outbox's sequences: %w", err)
	}
	const cause = "caused by a copy by logical replication, TRUNCATE … RESTART IDENTITY, or setval"
	switch {
	case !is:
		return "", nil
	case last < known:
		return fmt.Sprintf("the sequence of outbox.seq is at %d, and %d was given before: rows would be taken for published (%s)", last, known, cause), nil
	case reused != nil:
		return fmt.Sprintf("the row with seq %d has a number that was given before: it would be taken for published (%s)", *reused, cause), nil
	}
	return fmt.Sprintf("the sequence of outbox_ticks.tick is at %d, and %d was given before (%s)", tick, tickKnown, cause), nil
}
