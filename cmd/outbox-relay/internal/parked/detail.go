package parked

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// Limits on what Show reads of columns that may be long.
const (
	behindMax  = 20
	actionsMax = 20
)

// Detail is everything about a parked message.
type Detail struct {
	Message
	TopicID    *uuid.UUID      `json:"topic_id"`
	Headers    json.RawMessage `json:"headers"`
	Payload    []byte          `json:"-"` // at most as much as was requested
	ReleasedAt *time.Time      `json:"released_at"`
	RetryAt    time.Time       `json:"retry_at"`
	Next       []Message       `json:"next"`    // messages behind it, at most 20
	Actions    []Action        `json:"actions"` // of operators on this ID, the newest first, at most 20
}

// Show reads a message with up to payloadMax bytes of its payload, or ErrNotFound.
func Show(ctx context.Context, db operator.Querier, schema string, seq, payloadMax int64) (*Detail, error) {
	found, err := List(ctx, db, schema, Filter{Seqs: []int64{seq}, Behind: true}, 1)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, ErrNotFound
	}
	d := &Detail{Message: found[0]}
	var topicID *[16]byte
	var headers string
	err = db.QueryRow(ctx, inSchema(detailSQL, schema), seq, min(payloadMax, 1<<30)).Scan(&topicID, &headers, &d.Payload, &d.ReleasedAt, &d.RetryAt)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read parked message: %w", err)
	}
	d.TopicID, d.Headers = (*uuid.UUID)(topicID), json.RawMessage(headers)
	rows, err := db.Query(ctx, inSchema(behindSQL, schema), seq, behindMax)
	if err != nil {
		return nil, fmt.Errorf("read what is behind a parked message: %w", err)
	}
	if d.Next, err = pgx.CollectRows(rows, scanMessage); err != nil {
		return nil, fmt.Errorf("read what is behind a parked message: %w", err)
	}
	d.Actions, err = Actions(ctx, db, schema, ActionFilter{Message: &d.ID}, actionsMax)
	return d, err
}

// Action is a row of operator_actions.
type Action struct {
	ID int64 `json:"id"`
	// The login, recorded by the database; before schema version 8 what the program stated
	Who     string          `json:"who"`
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
	case subject.Operation != "" && Printable(subject.Operation+subject.Scope+subject.Mark):
		return fmt.Sprintf("%s of scope %s (%s)", subject.Operation, subject.Scope, subject.Mark)
	case subject.Topic != "" && Printable(subject.Topic+subject.Group):
		text := subject.Topic
		if subject.Partition != nil {
			text += "/" + strconv.Itoa(int(*subject.Partition))
		}
		if subject.Group != "" {
			text += " of group " + subject.Group
		}
		return text
	case subject.Consumer != "" && Printable(subject.Consumer):
		return subject.Consumer
	case subject.Relay != "" && Printable(subject.Relay):
		return "relay " + subject.Relay
	case subject.Role != "" && Printable(subject.Role):
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
func Actions(ctx context.Context, db operator.Querier, schema string, filter ActionFilter, limit int) ([]Action, error) {
	var id *string
	if filter.Message != nil {
		text := filter.Message.String()
		id = &text
	}
	rows, err := db.Query(ctx, inSchema(actionsSQL, schema), id, filter.YoungerThan, limit)
	if err != nil {
		return nil, fmt.Errorf("read operators' actions: %w", err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (a Action, err error) {
		var subject string
		err = row.Scan(&a.ID, &a.Who, &a.Stated, &a.What, &a.Why, &a.When, &a.Role, &subject)
		a.Subject = json.RawMessage(subject)
		return a, err
	})
	if err != nil {
		return nil, fmt.Errorf("read operators' actions: %w", err)
	}
	return all, nil
}
