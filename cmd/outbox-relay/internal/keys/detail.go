package keys

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
)

// actionsMax bounds how many actions Show reads.
const actionsMax = 20

// Detail is everything about a key.
type Detail struct {
	Row
	Fingerprint string          `json:"fingerprint"` // SHA-256; all zeros: not compared
	Headers     json.RawMessage `json:"headers"`
	// The request, what phases pass on, and the answer: at most as many bytes as were requested,
	// and nothing that is encrypted.
	Request []byte            `json:"-"`
	Data    []byte            `json:"-"`
	Body    []byte            `json:"-"`
	Actions []operator.Action `json:"actions"` // of operators on this key, the newest first, at most 20
}

// Show reads a key with up to payloadMax bytes of each of its texts, or ErrNotFound.
func Show(ctx context.Context, db operator.Querier, schema string, row Row, payloadMax int64) (*Detail, error) {
	d := &Detail{Row: row}
	var headers string
	err := db.QueryRow(ctx, inSchema(detailSQL, schema), row.Scope, row.Operation, row.Key, min(payloadMax, 1<<30)).
		Scan(&d.Fingerprint, &headers, &d.Request, &d.Data, &d.Body)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read idempotency key: %w", err)
	}
	d.Headers = json.RawMessage(headers)
	d.Actions, err = Actions(ctx, db, schema, row.Place, actionsMax)
	return d, err
}

// Actions returns what operators did to a key, the newest first, even if the key is deleted.
func Actions(ctx context.Context, db operator.Querier, schema string, place Place, limit int) ([]operator.Action, error) {
	return operator.ReadActions(ctx, db, schema, actionsSQL, place.Scope, place.Operation, place.Key, limit)
}
