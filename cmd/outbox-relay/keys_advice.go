package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
	"github.com/effectonce/effectonce/internal/keys"
)

// keyAdvice says what is the matter with a key, and what to do about it. It is read by somebody who was woken up, and whose
// next command may move money: what has to be found out comes first, and what a command leaves undone is said. A step of several
// has a line.
func keyAdvice(r keys.Row) (what, do string) {
	const finish = "\"keys finish\" with what the client is to get"
	switch {
	case r.State == keys.Finished:
		return "its outcome is stored", "nothing: every request with it gets the outcome"
	case r.Locked && r.Calling != nil:
		return "somebody works on it, and asks a foreign system", "wait; if the holder hangs, \"keys unlock\" ends its lock, and with the next request it becomes indeterminate"
	case r.Locked:
		return "somebody works on it", "wait; if the holder hangs, \"keys unlock\" ends its lock"
	case r.Unanswered:
		return "its work committed by a statement of its own, and left no outcome",
			"see what its work left in the database, and write by hand what is missing; then " + finish + ";\nonly if nothing of it is there, \"keys retry\", which executes it from the start; and mend the program"
	case r.Calling != nil:
		return adviceOnCall(r)
	case r.State == keys.Indeterminate:
		return "it may have happened or not",
			soon(r) + "see in the error what is in doubt, and find out from the foreign system, or in the database: --child with the phase that the error names, or the step of the work, " +
				"shows the ID that its call was given;\nif it happened, write by hand what is missing, then " + finish + ";\nonly if nothing happened, \"keys retry\", which executes it again"
	case r.State == keys.Abandoned:
		return "it was given up: its attempts are used up, or it is older than its flow's AgeMax", "remove the cause, then \"keys retry\", which makes a call again that may be repeated; or " + finish + stays(r)
	case r.Error != nil && strings.HasPrefix(*r.Error, idempotency.ErrUnknownRecoveryPoint.Error()):
		return "it waits for a program that knows the phases that are done", "see in the error which ones the program knows that looks after it; deploy one whose list begins with those that are done; or, when you know what they did, \"keys finish\""
	case r.Counts:
		return "its work failed, and was rolled back: only the attempts are counted", "nothing: a request with it executes it; when none comes, the reaper forgets it"
	case r.Stuck && r.RequestBytes == nil:
		return "nobody works on it", "its client asks again; no completer can go on with it, since what was asked for is not stored; or " + finish + stays(r)
	case r.Stuck:
		return "nobody works on it", "the client asks again, or the completer (Flow.Run) goes on with it: see that one runs, and its log; or " + finish + stays(r)
	case r.RequestBytes == nil:
		return "it failed, and is put off", "nothing: it goes on when its client asks again; no completer can, since what was asked for is not stored"
	}
	return "it failed, and is put off", "nothing: the client asks again, or the completer goes on with it"
}

// adviceOnCall is for a key that nobody works on, whose foreign call may have been made, and must not be made twice. What
// was found out comes before anything else: also where the attempts are used up, trying again would ask again.
func adviceOnCall(r keys.Row) (what, do string) {
	phase := fmt.Sprintf("%q", *r.Calling)
	ask := soon(r) + "first find out from the foreign system whether it acted, by the child ID where the program gives it along, else by amount and time;\n"
	finish := "if it did, write by hand what phase " + phase + " and those behind it would have, then \"keys finish\" with what the client is to get"
	what = "a foreign system may have acted or not, and must not be asked twice"
	switch r.State {
	case keys.Abandoned:
		what = "it was given up, and " + what
	case keys.Running:
		return what, ask + finish + ";\nif it did not, let the next request, or the completer, make it indeterminate, then \"keys retry --call-did-not-happen\""
	}
	return what, ask + finish + ";\nonly if it did not, \"keys retry --call-did-not-happen\", which makes the call again"
}

// soon warns of an answer that comes too early: the foreign system does not know yet what is still on its way to it.
func soon(r keys.Row) string {
	now := r.CreatedAt.Add(time.Duration(r.AgeSeconds * float64(time.Second)))
	if r.State != keys.Indeterminate || r.RetryAt == nil || !r.RetryAt.After(now) {
		return ""
	}
	return "not before " + utc(r.RetryAt, "") + ", since the call may still be on its way:\n"
}

// stays reminds of effects that an outcome does not take back.
func stays(r keys.Row) string {
	if len(r.Phases) == 0 {
		return ""
	}
	return fmt.Sprintf("; what %s did stays: where that outcome is a failure, take it back by hand first", printable(strings.Join(r.Phases, ", ")))
}

// unlocked, retried and finished say what happens next.
func unlocked(changed *keys.Changed) string {
	was, text := changed.Was, "the lock is ended, the next request goes on with it"
	if was.Calling != nil {
		text = fmt.Sprintf("the lock is ended; the call of phase %q was under way, so that it becomes indeterminate with the next request: \"keys show\" says then what to find out", *was.Calling)
	}
	if was.LockedBy != nil {
		text += "; it was held by " + printable(*was.LockedBy)
	}
	return text
}

func retried(changed *keys.Changed) string {
	was := changed.Was
	text := "it was " + was.State + ", and goes on with the next request, or by the completer"
	if was.RequestBytes == nil {
		text = "it was " + was.State + ", and goes on when its client asks again: what was asked for is not stored, so that no completer can"
	}
	if was.Calling != nil {
		text += fmt.Sprintf("; the call of phase %q is made again", *was.Calling)
	}
	return text
}

func finished(changed *keys.Changed, status int) string {
	was := changed.Was
	text := fmt.Sprintf("it was %s, and is finished: every request with it gets status %d; ", was.State, status)
	if at := changed.Now.ExpiresAt; at == nil {
		text += "the key is never forgotten"
	} else {
		text += "the key is forgotten at " + utc(at, "") + ", and a request that comes later is executed again"
	}
	if len(was.Phases) > 0 {
		text += fmt.Sprintf("; what %s did stays, and what was to be done behind that is not executed", printable(strings.Join(was.Phases, ", ")))
	} else if was.Calling != nil {
		text += fmt.Sprintf("; what phase %q and those behind it would have written is not executed", *was.Calling)
	}
	return text
}
