package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Consuming finds what keeps consumers from working, as far as the database knows it: partitions
// that do not move or are late, topics that an operator paused, and orders that are not carried
// out. It also warns of the rule for IDs that reads too many headers.
func Consuming(ctx context.Context, db operator.Querier, schema string, lagAgeMax time.Duration) []Finding {
	const check = "consuming"
	s := &Status{}
	if err := s.readConsumers(ctx, db, schema, nil); err != nil {
		return broken(check, err)
	}
	if err := s.readBehind(ctx, db, schema, lagAgeMax); err != nil {
		return broken(check, err)
	}
	var found []Finding
	for _, c := range s.Consuming {
		if c.Behind != nil {
			found = append(found, fail(check, c.Behind.remedy(c.Group), "consumer %s: %s", oneLine(c.Name), c.Behind.text()))
		}
		for _, t := range c.Trouble {
			found = append(found, fail(check,
				fmt.Sprintf(`outbox-relay positions --group %s --topic %s   # docs/runbook.md, "A partition does not move", lists the causes and what to do`, shellWord(c.Group), shellWord(t.Topic)),
				"%s/%d of consumer %s does not move, for %v: %s", t.Topic, t.Partition, c.Name,
				human.Seconds(t.SaidSeconds), oneLine(t.Text)))
		}
	}
	for _, p := range s.Paused {
		found = append(found, warn(check, fmt.Sprintf("outbox-relay consumer resume --group %s --topic %s   # once the reason no longer applies", shellWord(p.Group), shellWord(p.Topic)),
			"%s", pausedText(p)))
	}
	for _, o := range s.Orders {
		found = append(found, warn(check, fmt.Sprintf("start a consumer of group %s, or see the log of the holder; resume-at --cancel withdraws the order", o.Group), "%s", orderText(o)))
	}
	if len(found) == 0 {
		found = append(found, ok(check, "%s; every partition moves, no topic is paused", human.Count(len(s.Consuming), "consumer")))
	}
	return found
}
