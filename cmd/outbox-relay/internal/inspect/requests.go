package inspect

import (
	"context"
	"slices"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/dedup/idempotency"
)

const keyBytesMax = 255

// readRequests finds the requests whose idempotency key was asked for. It continues with the IDs
// that their phases give to what they publish, which topics may still have when the outbox does
// not.
func (e *explainer) readRequests(ctx context.Context) (err error) {
	if len(e.Text) > keyBytesMax {
		return nil
	}
	e.out.Requests, err = keys.Find(ctx, e.db, e.Schema, keys.Name{Key: e.Text})
	for _, r := range e.out.Requests {
		steps := slices.Clone(r.Phases)
		if r.Calling != nil {
			steps = append(steps, *r.Calling)
		}
		key := idempotency.Key{Scope: r.Scope, Operation: r.Operation, Value: r.Key}
		for _, step := range steps {
			e.names.addText(key.ChildID(step).String())
		}
	}
	return err
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
