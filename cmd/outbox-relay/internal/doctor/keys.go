package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/migrations"
)

// Limits of idempotency keys: how long one may be unfinished with no process working on it, and how
// long one may remain after its window is over. A completer looks for work every ten seconds, and
// postpones failing keys by minutes; a reaper runs twice a minute.
const (
	stuckMax   = time.Hour
	expiredMax = time.Hour
	// KeysMax bounds how many keys of a kind are counted.
	KeysMax = 10_000
)

// Keys counts the idempotency keys that are not finished, each kind up to KeysMax.
type Keys struct {
	Running       int64 `json:"running"`
	Indeterminate int64 `json:"indeterminate"`
	Abandoned     int64 `json:"abandoned"`
	// OldestUnfinishedSeconds is the time since the oldest running one was first requested; 0: none
	// is running.
	OldestUnfinishedSeconds float64 `json:"oldest_unfinished_seconds"`
	// Stuck are running, no process has worked on them for an hour, and they are not postponed.
	Stuck int64 `json:"stuck"`
	// Failing are running, were first requested more than an hour ago, and are postponed.
	Failing int64 `json:"failing"`
	// OldestExpiredSeconds is the time since the oldest window ended of a finished key that still
	// exists; 0: there is none.
	OldestExpiredSeconds float64 `json:"oldest_expired_seconds"`
}

// ReadKeys counts idempotency keys. It reads only the partial indexes.
func ReadKeys(ctx context.Context, db operator.Querier, schema string) (k Keys, err error) {
	err = db.QueryRow(ctx, migrations.InSchema(keysSQL, schema), KeysMax, stuckMax).
		Scan(&k.Running, &k.OldestUnfinishedSeconds, &k.Stuck, &k.Failing, &k.Indeterminate, &k.Abandoned, &k.OldestExpiredSeconds)
	if err != nil {
		return k, fmt.Errorf("count idempotency keys: %w", err)
	}
	return k, nil
}

// IdempotencyKeys checks that requests finish, and that keys are deleted when their window is over.
func IdempotencyKeys(ctx context.Context, db operator.Querier, schema string) []Finding {
	const check = "keys"
	k, err := ReadKeys(ctx, db, schema)
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
			"%s requests are unfinished, and no process has worked on them for %v: their clients did not return, and no completer runs, or it fails", bounded(k.Stuck), stuckMax))
	}
	if k.Failing > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state running --older-than 1h   # then \"outbox-relay keys show\" of each: it has the error and what to do",
			"%s requests have been unfinished for more than %v, and are postponed repeatedly: they fail, or no running program knows the phases that they completed", bounded(k.Failing), stuckMax))
	}
	if over := age(k.OldestExpiredSeconds); over > expiredMax {
		found = append(found, warn(check, "outbox-relay keys reap   # and keep a program with Flow.Run or Operation.Run running",
			"finished keys still exist whose window ended %v ago: no reaper runs, and the table grows", over))
	}
	return orElse(found, ok(check, "%d requests are running, none needs a decision", k.Running))
}

func bounded(n int64) string {
	if n >= KeysMax {
		return fmt.Sprintf("%d or more", n)
	}
	return fmt.Sprint(n)
}
