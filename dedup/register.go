package dedup

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/bounds"
)

// Registration of a consumer.
type Registration struct {
	// Name is the scope of the claims. 1 to 600 bytes of UTF-8 without NUL.
	Name string
	// Group owns the name permanently. 1 to 255 bytes of UTF-8 without NUL.
	Group string
	// Topics, and what each of them is called in IDs (none: its name), for operators' tools.
	Topics, Aliases []string
	// Window is the dedup window: the minimum time for which a claim is kept, or its ID refused
	// (ErrForgotten). 1 minute to 10 years; default 7 days. It may change from one registration to the next (see Consumer.Replaced); the
	// last one is used. It only limits what Maintain may forget from then on: marks of forgotten
	// claims stay, see QueueForgotten.
	Window time.Duration
	// Forever keeps claims indefinitely, in processed_forever. It cannot be changed later. Not
	// together with Window.
	Forever bool
	// IDRule is the rule of a new name. A name that is already registered keeps its own: see
	// Consumer.IDRule. Default: the standard rule.
	IDRule IDRule
}

// Bounds of Registration.Window.
const (
	WindowStandard = 7 * 24 * time.Hour
	WindowMin      = time.Minute
	WindowMax      = 10 * 365 * 24 * time.Hour
)

// ErrNameTaken is returned by Register: the name belongs to another consumer group. Two
// applications under one name would drop each other's messages. Nothing was changed. Remedy: use
// another name.
var ErrNameTaken = errors.New("consumer name is taken by another consumer group")

// ErrForeverDecided is returned by Register: the name was registered with the other value of
// Forever. Its claims are in the other table, so messages would be handled again. Nothing was
// changed. Remedy: use another name, or stop all consumers of the name and move its claims, see
// docs/runbook.md.
var ErrForeverDecided = errors.New("consumer was registered with another value of Forever")

// Querier is a pool, a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Register returns a consumer, and creates it on the first call. It returns ErrNameTaken if another
// group registered the name, and ErrIDRule if the name has an ID rule of a later release. It
// reports all invalid settings at once.
func (c *Claims) Register(ctx context.Context, db Querier, r Registration) (Consumer, error) {
	if err := r.check(); err != nil {
		return Consumer{}, fmt.Errorf("register consumer %.80q: %w", r.Name, err)
	}
	var window *time.Duration
	if !r.Forever {
		if r.Window == 0 {
			r.Window = WindowStandard
		}
		window = &r.Window
	}
	var registered Consumer
	var owner string
	var replaced float64
	err := db.QueryRow(ctx, c.sql[r.Forever].register, r.Name, r.Group, r.Topics, window, r.IDRule.String(), r.Aliases).
		Scan(&registered.id, &owner, &registered.forever, &registered.idRule, &replaced)
	switch {
	case err != nil:
		return Consumer{}, fmt.Errorf("register consumer %q: %w", r.Name, err)
	case owner != r.Group:
		return Consumer{}, fmt.Errorf("%w: %q belongs to group %q, not to %q: choose another consumer name", ErrNameTaken, r.Name, owner, r.Group)
	case registered.forever != r.Forever:
		return Consumer{}, fmt.Errorf("%w: %q was registered with forever=%v, and is now %v: choose another consumer name, or move its claims as docs/runbook.md says",
			ErrForeverDecided, r.Name, registered.forever, r.Forever)
	}
	if _, err := ParseIDRule(registered.idRule); err != nil {
		return Consumer{}, fmt.Errorf("register consumer %q: %w", r.Name, err)
	}
	registered.replaced = time.Duration(replaced * float64(time.Second)).Round(time.Microsecond)
	return registered, nil
}

func (r Registration) check() error {
	var problems []error
	for _, field := range []struct {
		name, value string
		max         int
	}{{"Name", r.Name, 600}, {"Group", r.Group, 255}} {
		if !storable(field.value, field.max) {
			problems = append(problems, fmt.Errorf("%s of %d bytes: want 1 to %d bytes of UTF-8 without NUL", field.name, len(field.value), field.max))
		}
	}
	switch {
	case r.Forever && r.Window != 0:
		problems = append(problems, bounds.Problem("Window", r.Window, "none together with Forever"))
	case r.Window != 0 && (r.Window < WindowMin || r.Window > WindowMax):
		problems = append(problems, bounds.Problem("Window", r.Window, fmt.Sprintf("%v to %v", WindowMin, WindowMax)))
	}
	return errors.Join(problems...)
}

// storable reports whether a text fits into a column.
func storable(text string, bytesMax int) bool {
	return text != "" && len(text) <= bytesMax && utf8.ValidString(text) && !strings.ContainsRune(text, 0)
}
