// Package operator has what every command of an operator uses: who acts ([By]), the connection, the
// transaction of a change ([Change]), and the record of what was done ([Actions]).
package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// By is who acts, and why. Both are stored forever, unchanged: Who has 1 to 255 bytes, Why 1 to
// 2048.
type By struct{ Who, Why string }

// Beginner is a connection or a pool.
type Beginner interface {
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}

// Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// DB is a connection or a pool, not in a transaction.
type DB interface {
	Querier
	Beginner
}

// Rows returns what a statement for a schema reads: an empty slice, and not nil, for nothing and after an error. Errors
// begin with what.
func Rows[T any](ctx context.Context, db Querier, what, schema, sql string, scan pgx.RowToFunc[T], args ...any) (all []T, err error) {
	rows, err := db.Query(ctx, migrations.InSchema(sql, schema), args...)
	if err == nil {
		all, err = pgx.CollectRows(rows, scan)
	}
	if err != nil {
		return []T{}, fmt.Errorf("%s: %w", what, err)
	}
	return all, nil
}

// Each is Rows for a function that is called after each row was scanned into the destinations.
func Each(ctx context.Context, db Querier, what, schema, sql string, args, into []any, do func() error) error {
	rows, err := db.Query(ctx, migrations.InSchema(sql, schema), args...)
	if err == nil {
		_, err = pgx.ForEachRow(rows, into, do)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// ErrBusy means that a program, or another operator, has worked on one of the rows for longer than
// 30 s. The call that returns it changed nothing and can be repeated.
var ErrBusy = errors.New("another program or operator works on them: try again")

// deadlocksMax bounds how often a transaction is repeated after a deadlock.
const deadlocksMax = 5

// Change runs work in a transaction that does not block others for long, and repeats it after a
// deadlock. work gets the time at which the transaction began, by the database's clock. An error
// means that nothing was changed, unless the connection broke during COMMIT; it is safe to repeat.
func Change(ctx context.Context, db Beginner, work func(tx pgx.Tx, began time.Time) error) error {
	for deadlocks := 0; ; deadlocks++ {
		// Read committed, whatever the role's default: each statement has to see what the locks
		// waited for.
		err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			var began time.Time
			if err := tx.QueryRow(ctx, settingsSQL).Scan(&began, nil, nil, nil, nil); err != nil {
				return err
			}
			return work(tx, began)
		})
		switch {
		case pgerr.Is(err, pgerr.Deadlock) && deadlocks < deadlocksMax:
		case pgerr.LockConflict(err):
			return fmt.Errorf("%w (%s)", ErrBusy, pgerr.State(err))
		default:
			return err
		}
	}
}

// Note records who did what, and why. subject says what it was about, and holds no secrets.
func Note(ctx context.Context, tx pgx.Tx, schema string, by By, what string, subject map[string]any) error {
	text, err := json.Marshal(subject)
	if err == nil {
		_, err = tx.Exec(ctx, migrations.InSchema(noteSQL, schema), by.Who, what, by.Why, string(text))
	}
	return err
}

// settingsSQL bounds how long an operator's transaction may block others, whatever the role's
// defaults, and makes its changes durable.
const settingsSQL = `-- operator.settings
SELECT clock_timestamp(), set_config('lock_timeout', '30s', true), set_config('statement_timeout', '2min', true),
  set_config('idle_in_transaction_session_timeout', '30s', true),
  set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)`

const actionsSQL = `-- operator.actions
SELECT id, who, stated, what, why, "when", db_role, subject::text FROM effectonce.operator_actions
WHERE ($1::uuid IS NULL OR subject->>'message_id' = $1::text) AND ($2::interval IS NULL OR "when" > clock_timestamp() - $2)
ORDER BY id DESC LIMIT $3`

const noteSQL = `-- operator.note
INSERT INTO effectonce.operator_actions (who, what, why, subject) VALUES ($1, $2, $3, $4)`

// Action is a row of operator_actions.
type Action struct {
	ID      int64           `json:"id"`
	Who     string          `json:"who"`    // the login, recorded by the database
	Stated  *string         `json:"stated"` // what the person or program stated
	What    string          `json:"what"`
	Why     string          `json:"why"`
	When    time.Time       `json:"when"`
	Role    string          `json:"db_role"`
	Subject json.RawMessage `json:"subject"`
}

// By names who did it: the login that the database recorded, and then what the person or program
// stated.
func (a *Action) By() string {
	if a.Stated == nil || *a.Stated == a.Who {
		return a.Who
	}
	return a.Who + " (" + *a.Stated + ")"
}

// subject is what a line about an action needs of its Subject, of which each action has a part.
type subject struct {
	Happened     bool    `json:"call_happened"`
	DidNotHappen bool    `json:"call_did_not_happen"`
	Status       *int    `json:"status"`
	ResumeAt     *string `json:"resume_at"`
	IDRule       string  `json:"id_rule"`
	Shards       int     `json:"shards"`
	Rows         int64   `json:"rows"`
	ID           string  `json:"message_id"`
	Topic        string  `json:"topic"`
	Partition    *int32  `json:"partition"`
	Group        string  `json:"group"`
	Consumer     string  `json:"consumer"`
	Operation    string  `json:"operation"`
	Scope        string  `json:"scope"`
	Mark         string  `json:"mark"`
	Relay        string  `json:"relay"`
	Role         string  `json:"role"`
}

func (a *Action) subject() (s subject) {
	_ = json.Unmarshal(a.Subject, &s) // what has another form, as of a later release, is left out
	return s
}

// Choice describes in one line what was decided, where What leaves that open.
func (a *Action) Choice() string {
	switch subject := a.subject(); {
	case a.What == "key.retry" && subject.Happened:
		return "the call happened"
	case a.What == "key.retry" && subject.DidNotHappen:
		return "the call did not happen"
	case a.What == "key.finish" && subject.Status != nil:
		return fmt.Sprintf("status %d", *subject.Status)
	case a.What == "consumer.resume_at" && subject.ResumeAt != nil:
		return "at " + *subject.ResumeAt
	case a.What == "consumer.resume_at":
		return "canceled"
	case a.What == "consumer.id_rule":
		return subject.IDRule
	case a.What == "relay.shards":
		return human.Count(subject.Shards, "shard")
	case a.What == "replay":
		return human.Count(subject.Rows, "row")
	}
	return ""
}

// Object describes in one line what an action was done to: the message, the idempotency key as logs
// show it, or else the place in Kafka. Empty: the action has none of these.
func (a *Action) Object() string {
	switch subject := a.subject(); {
	case subject.ID != "":
		if id, err := uuid.Parse(subject.ID); err == nil {
			return id.String()
		}
	case subject.Operation != "" && human.Printable(subject.Operation+subject.Scope+subject.Mark):
		return fmt.Sprintf("%s of scope %s (%s)", subject.Operation, subject.Scope, subject.Mark)
	case subject.Topic != "" && human.Printable(subject.Topic+subject.Group):
		text := subject.Topic
		if subject.Partition != nil {
			text += "/" + strconv.Itoa(int(*subject.Partition))
		}
		if subject.Group != "" {
			text += " of group " + subject.Group
		}
		return text
	case subject.Consumer != "" && human.Printable(subject.Consumer):
		return subject.Consumer
	case subject.Relay != "" && human.Printable(subject.Relay):
		return "relay " + subject.Relay
	case subject.Role != "" && human.Printable(subject.Role):
		return "role " + subject.Role
	}
	return ""
}

// ActionFilter selects actions; a nil field does not filter.
type ActionFilter struct {
	Message     *uuid.UUID
	YoungerThan *time.Duration
}

// Actions returns what operators did, the newest first.
func Actions(ctx context.Context, db Querier, schema string, filter ActionFilter, limit int) ([]Action, error) {
	return ReadActions(ctx, db, schema, actionsSQL, filter.Message, filter.YoungerThan, limit)
}

// ReadActions runs a statement that returns the columns of an Action.
func ReadActions(ctx context.Context, db Querier, schema, sql string, args ...any) ([]Action, error) {
	return Rows(ctx, db, "read operators' actions", schema, sql, pgx.RowToStructByPos[Action], args...)
}
