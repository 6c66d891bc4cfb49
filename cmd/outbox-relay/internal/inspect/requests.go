package inspect

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Limits on the search for the request behind a message.
const (
	requestsMax = 100_000 // keys whose child IDs are tried
	keyBytesMax = 255
	plainMax    = 10
)

// plainSteps are the usual names for what work in one transaction publishes. Flows use the names of
// their phases.
func plainSteps(operation string) []string {
	steps := []string{"", "publish", operation}
	for n := range plainMax {
		steps = append(steps, fmt.Sprint("publish:", n))
	}
	return steps
}

// readRequests finds the requests whose idempotency key was asked for, or from which the requested
// ID is derived. It continues with the IDs that they give to what they publish.
func (e *explainer) readRequests(ctx context.Context) error {
	if len(e.Text) > keyBytesMax {
		return nil
	}
	found, err := keys.Find(ctx, e.db, e.Schema, keys.Name{Key: e.Text})
	if err != nil {
		return err
	}
	// Derived IDs carry no time
	if id, no := uuid.Parse(e.Text); no == nil && id.Version() == 8 && len(found) == 0 {
		if found, err = e.parents(ctx, id); err != nil {
			return err
		}
	}
	e.out.Requests = found
	for _, r := range found {
		if err := e.readPublished(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

func requestKey(p keys.Place) idempotency.Key {
	return idempotency.Key{Scope: p.Scope, Operation: p.Operation, Value: p.Key}
}

// readPublished takes the IDs of phases, which topics may still have when the outbox does not, and
// those IDs of plain steps that the outbox has.
func (e *explainer) readPublished(ctx context.Context, r keys.Row) error {
	for _, step := range stepsOf(r.Phases, r.Calling) {
		e.names.addText(requestKey(r.Place).ChildID(step).String())
	}
	var maybe []uuid.UUID
	for _, step := range plainSteps(r.Operation) {
		maybe = append(maybe, requestKey(r.Place).ChildID(step))
	}
	rows, err := e.rows(ctx, maybe, 0)
	if err != nil {
		return err
	}
	for _, row := range rows {
		e.names.addText(row.ID.String())
	}
	return nil
}

func stepsOf(phases []string, calling *string) []string {
	if calling != nil {
		return append(slices.Clone(phases), *calling)
	}
	return phases
}

// parents tries the stored keys, each with the phases that any key of the operation has.
func (e *explainer) parents(ctx context.Context, child uuid.UUID) ([]keys.Row, error) {
	rows, err := e.db.Query(ctx, inSchema(requestsSQL, e.Schema), requestsMax)
	if err != nil {
		return nil, wrap("read idempotency keys", err)
	}
	var places []keys.Place
	steps := map[string]map[string]bool{}
	var p keys.Place
	var phases []string
	var calling *string
	_, err = pgx.ForEachRow(rows, []any{&p.Scope, &p.Operation, &p.Key, &phases, &calling}, func() error {
		places = append(places, p)
		if steps[p.Operation] == nil {
			steps[p.Operation] = map[string]bool{}
			for _, step := range plainSteps(p.Operation) {
				steps[p.Operation][step] = true
			}
		}
		for _, step := range stepsOf(phases, calling) {
			steps[p.Operation][step] = true
		}
		return nil
	})
	if err != nil {
		return nil, wrap("read idempotency keys", err)
	}
	for _, p := range places {
		for step := range maps.Keys(steps[p.Operation]) {
			if requestKey(p).ChildID(step) == child {
				return keys.Find(ctx, e.db, e.Schema, keys.Name{Scope: &p.Scope, Operation: &p.Operation, Key: p.Key})
			}
		}
	}
	return nil, nil
}

// readRequestActions adds what operators did to requests.
func (e *explainer) readRequestActions(ctx context.Context) error {
	for _, r := range e.out.Requests {
		actions, err := keys.Actions(ctx, e.db, e.Schema, r.Place, keyActionsMax)
		if err != nil {
			return err
		}
		e.out.Actions = append(e.out.Actions, actions...)
	}
	return nil
}

const keyActionsMax = 100
