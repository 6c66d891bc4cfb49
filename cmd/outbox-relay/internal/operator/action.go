package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

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

// Choice describes in one line what was decided, where What leaves that open.
func (a *Action) Choice() string {
	var subject struct {
		Happened     bool    `json:"call_happened"`
		DidNotHappen bool    `json:"call_did_not_happen"`
		Status       *int    `json:"status"`
		ResumeAt     *string `json:"resume_at"`
		IDRule       string  `json:"id_rule"`
		Shards       int     `json:"shards"`
		Rows         int64   `json:"rows"`
	}
	if json.Unmarshal(a.Subject, &subject) != nil {
		return ""
	}
	switch {
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
	var subject struct {
		ID        string `json:"message_id"`
		Topic     string `json:"topic"`
		Partition *int32 `json:"partition"`
		Group     string `json:"group"`
		Consumer  string `json:"consumer"`
		Operation string `json:"operation"`
		Scope     string `json:"scope"`
		Mark      string `json:"mark"`
		Relay     string `json:"relay"`
		Role      string `json:"role"`
	}
	if json.Unmarshal(a.Subject, &subject) != nil {
		return ""
	}
	switch {
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
	var id *string
	if filter.Message != nil {
		text := filter.Message.String()
		id = &text
	}
	return ReadActions(ctx, db, schema, actionsSQL, id, filter.YoungerThan, limit)
}

// ReadActions runs a statement that returns the columns of an Action.
func ReadActions(ctx context.Context, db Querier, schema, sql string, args ...any) ([]Action, error) {
	return Rows(ctx, db, "read operators' actions", schema, sql, pgx.RowToStructByPos[Action], args...)
}
