package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/internal/consumers"
)

// Consuming names what keeps consumers from their work, as the database knows it: partitions that do not move, topics that an
// operator paused, orders that are not carried out; and the rule for IDs that reads too many headers.
func Consuming(ctx context.Context, db Querier, schema string) []Finding {
	const check = "consuming"
	s := &Status{}
	if err := s.readConsumers(ctx, db, schema, nil); err != nil {
		return broken(check, err)
	}
	var found []Finding
	for _, c := range s.Consuming {
		for _, t := range c.Trouble {
			found = append(found, fail(check,
				fmt.Sprintf(`outbox-relay positions --group %s --topic %s   # docs/operations.md, "A partition does not move", says what each cause asks for`, shellWord(c.Group), shellWord(t.Topic)),
				"%s/%d of consumer %s does not move, for %v: %s", t.Topic, t.Partition, c.Name,
				time.Duration(t.SaidSeconds*float64(time.Second)).Round(time.Second), oneLine(t.Text)))
		}
	}
	for _, p := range s.Paused {
		found = append(found, warn(check, fmt.Sprintf("outbox-relay consumer resume --group %s --topic %s   # when the reason is gone", shellWord(p.Group), shellWord(p.Topic)),
			"%s", pausedText(p)))
	}
	for _, o := range s.Orders {
		found = append(found, warn(check, fmt.Sprintf("start a consumer of group %s, or see the log of the holder; resume-at --cancel takes the order back", o.Group), "%s", orderText(o)))
	}
	for _, c := range s.Consuming {
		if consumers.IsLegacy(c.IDRule) {
			found = append(found, warn(check,
				fmt.Sprintf(`outbox-relay consumer id-rule %s   # docs/operations.md, "Another rule for IDs", before --set standard`, shellWord(c.Name)),
				"consumer %s has the rule legacy for IDs: of messages that share a header such as id or idempotency-key all but the first are parked as conflicts, or dropped where their payloads are equal", c.Name))
		}
	}
	if len(found) == 0 {
		found = append(found, ok(check, "%d consumers; every partition moves, no topic is paused", len(s.Consuming)))
	}
	return found
}
