package verify

import (
	"fmt"
	"slices"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

// nothingChecked reports what the run looked for and found nothing of: that proves nothing.
func (r *run) nothingChecked() {
	rep := r.report
	unchecked := func(format string, args ...any) { rep.Unchecked = append(rep.Unchecked, fmt.Sprintf(format, args...)) }
	for _, topic := range r.Topics {
		if len(r.extents[r.TopicPrefix+topic]) == 0 {
			unchecked("topic %s does not exist: was it deleted, or is its name misspelt?", topic)
		}
	}
	if rep.Rows+rep.Records == 0 {
		unchecked("no rows and no records%s: there was nothing to compare", r.window())
	}
	if r.Since > 0 && r.Since < clockSlack {
		rep.Notes = append(rep.Notes, fmt.Sprintf("--since %s is shorter than the %s by which clocks may differ: records from up to that long before --since were read, but their rows were not", human.Duration(r.Since), human.Duration(clockSlack)))
	}
	if r.claims == nil || rep.Claimed > 0 {
		return
	}
	var consumed []string
	var before int64
	short := true
	for _, topic := range r.names {
		if len(r.claims.consumers[topic]) == 0 {
			continue
		}
		consumed, before = append(consumed, topic), before+r.before[r.numbers[topic]]
		short = short && r.claims.windows[topic] > 0 && r.claims.windows[topic] <= windowSlack
	}
	slices.Sort(consumed)
	switch {
	case len(r.names) == 0:
		unchecked("no claims looked for: no row%s names a topic to read: give --topic", r.window())
	case len(consumed) == 0:
		unchecked("no claims looked for: group %s consumes none of these topics", r.Group)
	case before == 0:
		unchecked("no claims looked for: group %s has passed no record of %s%s", r.Group, strings.Join(consumed, ", "), r.window())
	case short:
		unchecked("no claims looked for: the dedup window of group %s is at most %s, and its claims may already be forgotten", r.Group, human.Duration(windowSlack))
	default:
		unchecked("no claims looked for: no record before the position of group %s is within its dedup window and carries an ID", r.Group)
	}
}

func (r *run) window() string {
	if r.Since == 0 {
		return ""
	}
	return " of the last " + human.Duration(r.Since)
}
