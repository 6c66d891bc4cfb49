package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	remedy := "fix the cause and run the check again"
	if errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err) {
		remedy = "raise --timeout; if that does not help, find out why the database is slow"
	}
	return []Finding{fail(check, remedy, "the check itself failed: %v", err)}
}

// Well reports whether no finding is a failure.
func Well(findings []Finding) bool {
	return !slices.ContainsFunc(findings, func(f Finding) bool { return f.Severity == Fail })
}
