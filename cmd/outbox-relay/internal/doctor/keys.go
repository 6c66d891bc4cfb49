package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
)

// expiredMax is how long a key may remain after its window is over. A reaper runs twice a minute.
const expiredMax = time.Hour

// IdempotencyKeys checks that requests finish, and that keys are deleted when their window is over.
func IdempotencyKeys(ctx context.Context, db operator.Querier, schema string) []Finding {
	const check = "keys"
	k, err := pipeline.ReadKeys(ctx, db, schema)
	if err != nil {
		return broken(check, err)
	}
	var found []Finding
	if k.Indeterminate > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state indeterminate   # then \"outbox-relay keys show\" of each: it has the steps and the commands",
			"%s requests are indeterminate: it is unknown whether their call happened, and an operator has to decide", bounded(k.Indeterminate)))
	}
	if k.Abandoned > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state abandoned   # then \"outbox-relay keys show\" of each: it says whether a call may have been made, and has the commands",
			"%s requests are abandoned: no phase of theirs was done for too long, and an operator has to decide", bounded(k.Abandoned)))
	}
	if k.Stuck > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state stuck --older-than 1h   # check that a program with Flow.Run runs for these operations, and read its log",
			"%s requests are unfinished, and no process has worked on them for %v: their clients did not return, and no completer runs, or it fails", bounded(k.Stuck), pipeline.KeyStuckAfter))
	}
	if k.Failing > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state running --older-than 1h   # then \"outbox-relay keys show\" of each: it has the error and what to do",
			"%s requests have been unfinished for more than %v, and are postponed repeatedly: they fail, or no running program knows the phases that they completed", bounded(k.Failing), pipeline.KeyStuckAfter))
	}
	if over := age(k.OldestExpiredSeconds); over > expiredMax {
		found = append(found, warn(check, "outbox-relay keys reap   # and keep a program with Flow.Run or Operation.Run running",
			"finished keys still exist whose window ended %v ago: no reaper runs, and the table grows", over))
	}
	return orElse(found, ok(check, "%d requests are running, none needs a decision", k.Running))
}

func bounded(n int64) string {
	if n >= pipeline.KeysMax {
		return fmt.Sprintf("%d or more", n)
	}
	return fmt.Sprint(n)
}

// age converts seconds to a duration, rounded for people.
func age(seconds float64) time.Duration {
	d := time.Duration(seconds * float64(time.Second))
	if d < 10*time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Second)
}
