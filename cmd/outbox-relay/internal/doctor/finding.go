package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

// Severity of a finding.
type Severity string

// The severities. Fail means that the relay cannot work, that rows will not reach Kafka, or that
// the status is not well.
const (
	OK   Severity = "ok"
	Warn Severity = "warn"
	Fail Severity = "fail"
)

// Finding is what one check found.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	Message  string   `json:"message"`
	// always set for warn and fail; never a command that destroys stored data
	Remedy string `json:"remedy,omitempty"`

	late bool // the check ran out of time
}

func ok(check, format string, args ...any) Finding {
	return Finding{Check: check, Severity: OK, Message: message(format, args)}
}

func warn(check, remedy, format string, args ...any) Finding {
	return Finding{Check: check, Severity: Warn, Remedy: remedy, Message: message(format, args)}
}

func fail(check, remedy, format string, args ...any) Finding {
	return Finding{Check: check, Severity: Fail, Remedy: remedy, Message: message(format, args)}
}

// orElse returns the findings, or the one that there is nothing to report.
func orElse(found []Finding, well Finding) []Finding {
	if len(found) == 0 {
		return []Finding{well}
	}
	return found
}

// message formats durations for people.
func message(format string, args []any) string {
	args = slices.Clone(args)
	for i, arg := range args {
		if d, ok := arg.(time.Duration); ok {
			args[i] = human.Duration(d)
		}
	}
	return fmt.Sprintf(format, args...)
}

// broken is the finding of a check that could not run.
func broken(check string, err error) []Finding {
	f := fail(check, "fix the cause and run the check again", "the check itself failed: %v", err)
	f.late = errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err)
	return []Finding{f}
}

// Late replaces the findings of the checks that ran out of time by one.
func Late(findings []Finding, limit time.Duration) []Finding {
	var made []Finding
	var late []string
	for _, f := range findings {
		if f.late {
			late = append(late, f.Check)
		} else {
			made = append(made, f)
		}
	}
	if len(late) == 0 {
		return findings
	}
	return append(made, fail("timeout", "raise --timeout; if that does not help, find out why the database is slow",
		"the database did not answer all checks within %v (--timeout); not checked: %s, and what depends on them", limit, strings.Join(late, ", ")))
}

// Well reports whether no finding is a failure.
func Well(findings []Finding) bool {
	for _, f := range findings {
		if f.Severity == Fail {
			return false
		}
	}
	return true
}
