package doctor

import (
	"context"
	"fmt"
	"time"
)

// Limits of idempotency keys: how long one may run with nobody at work on it, and how long one whose window is over may
// stay. A completer looks every ten seconds, and puts off for minutes what fails; a reaper comes twice a minute.
const (
	stuckMax   = time.Hour
	expiredMax = time.Hour
	// KeysMax bounds how many keys of a kind are counted.
	KeysMax = 10_000
)

// Keys are the idempotency keys that are not finished, each kind counted up to KeysMax, without those that only count
// failures of work in one transaction.
type Keys struct {
	Running       int64 `json:"running"`
	Indeterminate int64 `json:"indeterminate"`
	Abandoned     int64 `json:"abandoned"`
	// OldestUnfinishedSeconds is since the oldest of the running ones was first asked for; 0: none runs.
	OldestUnfinishedSeconds float64 `json:"oldest_unfinished_seconds"`
	// Stuck are running, nobody has worked on them for an hour, and nobody put them off.
	Stuck int64 `json:"stuck"`
	// Failing are running, were first asked for more than an hour ago, and are put off.
	Failing int64 `json:"failing"`
	// OldestExpiredSeconds is since the first window was over of a finished key that is still there; 0: none is.
	OldestExpiredSeconds float64 `json:"oldest_expired_seconds"`
}

// ReadKeys counts idempotency keys, through the partial indexes alone.
func ReadKeys(ctx context.Context, db Querier, schema string) (k Keys, err error) {
	err = db.QueryRow(ctx, inSchema(keysSQL, schema), KeysMax, stuckMax).
		Scan(&k.Running, &k.OldestUnfinishedSeconds, &k.Stuck, &k.Failing, &k.Indeterminate, &k.Abandoned, &k.OldestExpiredSeconds)
	if err != nil {
		return k, fmt.Errorf("count idempotency keys: %w", err)
	}
	return k, nil
}

// IdempotencyKeys checks that requests come to an end, and that what is over is forgotten.
func IdempotencyKeys(ctx context.Context, db Querier, schema string) []Finding {
	const check = "keys"
	k, err := ReadKeys(ctx, db, schema)
	if err != nil {
		return broken(check, err)
	}
	var found []Finding
	if k.Indeterminate > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state indeterminate   # then keys show KEY, ask the foreign system, and: keys retry KEY --call-did-not-happen --why …, or keys finish KEY --status … --window … (or --forever) --why …",
			"%s requests are indeterminate: whether they happened is unknown, and a person has to decide", bounded(k.Indeterminate)))
	}
	if k.Abandoned > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state abandoned   # keys show KEY says whether a call may have been made; mend the cause, then: keys retry KEY --why …, or keys finish KEY --status … --window … (or --forever) --why …",
			"%s requests are abandoned: their attempts are used up, or they are too old for their flow, and a person has to decide", bounded(k.Abandoned)))
	}
	if k.Stuck > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state stuck --older-than 1h   # see that a program with Flow.Run works for these operations, and its log",
			"%s requests are unfinished, and nobody has worked on them for %v: their clients do not come back, and no completer runs, or it fails", bounded(k.Stuck), stuckMax))
	}
	if k.Failing > 0 {
		found = append(found, warn(check, "outbox-relay keys list --state running --older-than 1h   # keys show KEY has the error, and what to do",
			"%s requests are unfinished for more than %v, and put off again and again: they fail, or no program that looks after them knows the phases that are done", bounded(k.Failing), stuckMax))
	}
	if over := age(k.OldestExpiredSeconds); over > expiredMax {
		found = append(found, warn(check, "outbox-relay keys reap   # and let a program with Flow.Run or Operation.Run work all the time",
			"finished keys are there whose window is over for %v: no reaper runs, and the table grows", over))
	}
	if len(found) == 0 {
		found = append(found, ok(check, "%d requests are under way, none waits for a decision", k.Running))
	}
	return found
}

func bounded(n int64) string {
	if n >= KeysMax {
		return fmt.Sprintf("%d or more", n)
	}
	return fmt.Sprint(n)
}
