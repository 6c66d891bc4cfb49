package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Severity of a finding.
type Severity string

// The severities. Fail means that the relay cannot work, or that rows will not reach Kafka.
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
	Remedy   string   `json:"remedy,omitempty"` // always there for warn and fail; never a command that destroys what is stored
}

// Querier is what the checks of the database need: a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func ok(check, format string, args ...any) Finding {
	return Finding{Check: check, Severity: OK, Message: fmt.Sprintf(format, args...)}
}

func warn(check, remedy, format string, args ...any) Finding {
	return Finding{Check: check, Severity: Warn, Remedy: remedy, Message: fmt.Sprintf(format, args...)}
}

func fail(check, remedy, format string, args ...any) Finding {
	return Finding{Check: check, Severity: Fail, Remedy: remedy, Message: fmt.Sprintf(format, args...)}
}

// broken is the finding of a check that could not look.
func broken(check string, err error) []Finding {
	return []Finding{fail(check, "mend the cause and run the check again", "the check itself failed: %v", err)}
}

// Well tells whether no finding is a failure.
func Well(findings []Finding) bool {
	for _, f := range findings {
		if f.Severity == Fail {
			return false
		}
	}
	return true
}
