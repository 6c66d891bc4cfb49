package command

import (
	"fmt"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/dedup/idempotency"
)

// keyAdvice returns the situation of a key, and what to do. Its reader was woken up, and the next
// command may move money: so it first says what to find out, and it says what a command leaves
// undone. Each of several steps has its own line.
func keyAdvice(r keys.Row) (what, do string) {
	finish := "store what the client is to get" + stays(r) + ":\n" + keyCommand(r, "finish", " --status … --window …")
	switch {
	case r.State == keys.Finished:
		return "its outcome is stored", "nothing: every request with it gets the outcome"
	case r.Locked && r.InDoubt():
		return "a request or completer works on it, and calls a foreign system", "wait; if the holder hangs, end its lock; with the next request it then becomes indeterminate:\n" + keyCommand(r, "unlock", "")
	case r.Locked:
		return "a request or completer works on it", "wait; if the holder hangs, end its lock:\n" + keyCommand(r, "unlock", "")
	case r.InDoubt():
		return adviceOnCall(r)
	case r.State == keys.Indeterminate:
		return "it may or may not have happened",
			soon(r) + "the error says what is in doubt; find out from the foreign system, or in the database: --child with the phase that the error names, or the step of the work, " +
				"shows the ID that its call was given;\nif it happened, write by hand what is missing, then " + finish + "\nonly if nothing happened, let it be executed again:\n" + keyCommand(r, "retry", " --call-did-not-happen")
	case r.State == keys.Abandoned:
		return "it was given up: no phase was done for too long", "remove the cause, then let it continue, which repeats a repeatable call:\n" + keyCommand(r, "retry", "") + "\nor " + finish
	case r.Error != nil && strings.HasPrefix(*r.Error, idempotency.ErrUnknownRecoveryPoint.Error()):
		return "it waits for a program that knows the phases that are done", "the error says which phases the current program knows; deploy one whose list begins with those that are done;\nor, when you know what they did, " + finish
	case r.Stuck && r.RequestBytes == nil:
		return "no request and no completer works on it", "let its client retry; no completer can continue it, since the request is not stored;\nor " + finish
	case r.Stuck:
		return "no request and no completer works on it", "let its client retry, or the completer (Flow.Run) continue it: check that one runs, and its log;\nor " + finish
	case r.RequestBytes == nil:
		return "it failed, and is put off", "nothing: it continues when its client retries; no completer can continue it, since the request is not stored"
	}
	return "it failed, and is put off", "nothing: its client retries, or the completer continues it"
}

// keyCommand is a command line on the key; "…" stands for what only a person knows.
func keyCommand(r keys.Row, verb, flags string) string {
	return fmt.Sprintf("  outbox-relay keys %s %s --scope %s --operation %s%s --why …", verb, human.Word(r.Key), human.Word(r.Scope), human.Word(r.Operation), flags)
}

// adviceOnCall is for an unlocked key whose foreign call may have been made and must not be made
// twice. Finding out comes first, also for an abandoned key: a retry would make the call
// again.
func adviceOnCall(r keys.Row) (what, do string) {
	what = "a foreign system may or may not have acted, and must not be asked twice"
	do = soon(r) + "first find out from the foreign system whether it acted, by the child ID if the program sends it, else by amount and time;\n"
	switch r.State {
	case keys.Abandoned:
		what = "it was given up, and " + what
	case keys.Running:
		do += "let the next request, or the completer, make it indeterminate;\n"
	}
	return what, do + fmt.Sprintf("if it acted, continue with what phase %q writes, and those behind it:\n", *r.Calling) + keyCommand(r, "retry", " --call-happened") +
		"\nif they need the call's answer, write by hand what they would have written, then store what the client is to get:\n" + keyCommand(r, "finish", " --status … --window …") +
		"\nonly if it did not act, let the call be made again:\n" + keyCommand(r, "retry", " --call-did-not-happen")
}

// soon warns of asking too early: the foreign system does not know a call that is still on its way
// to it.
func soon(r keys.Row) string {
	if !r.OnItsWay() {
		return ""
	}
	return "not before " + utc(r.RetryAt, "") + ", since the call may still be on its way:\n"
}

// stays reminds of effects that an outcome does not undo.
func stays(r keys.Row) string {
	if len(r.Phases) == 0 {
		return ""
	}
	return fmt.Sprintf(" (what %s did stays: if that is a failure, undo it by hand first)", terminal.Printable(strings.Join(r.Phases, ", ")))
}

// unlocked, retried and finished say what happens next.
func unlocked(changed *keys.Changed) string {
	was, text := changed.Was, "the lock is ended, the next request continues it"
	if was.InDoubt() {
		text = fmt.Sprintf("the lock is ended; the call of phase %q was under way, so it becomes indeterminate with the next request: then \"outbox-relay keys show\" says what to find out", *was.Calling)
	}
	if was.LockedBy != nil {
		text += "; it was held by " + terminal.Printable(*was.LockedBy)
	}
	return text
}

func retried(changed *keys.Changed) string {
	was := changed.Was
	text := "it was " + was.State + ", and continues with the next request, or by the completer"
	switch {
	case changed.Now == nil:
		return "it was " + was.State + ", and is forgotten: the next request executes it from the start"
	case was.RequestBytes == nil:
		text = "it was " + was.State + ", and continues when its client retries: the request is not stored, so no completer can continue it"
	}
	switch {
	case changed.Now.Call == "happened":
		text += fmt.Sprintf("; behind the call of phase %q, which is not made again", *was.Calling)
	case was.Calling != nil:
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
		text += fmt.Sprintf("; what %s did stays, and the phases after that are not executed", terminal.Printable(strings.Join(was.Phases, ", ")))
	} else if was.Calling != nil {
		text += fmt.Sprintf("; what phase %q and those behind it would have written is not written", *was.Calling)
	}
	return text
}
