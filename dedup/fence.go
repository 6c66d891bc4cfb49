package dedup

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// ErrFenceInvalid means that scope, resource or version is out of bounds. Nothing was sent to the
// database.
var ErrFenceInvalid = errors.New("invalid version")

// Fence stores a version of a resource in the caller's transaction if it is newer than the stored one,
// and reports whether it is. If applied, the caller writes its effect in the same transaction;
// otherwise the same or a newer version was applied before, and the caller writes none. Fence waits
// while another open transaction holds the resource, and then holds it until tx ends, so that
// effects of one resource are applied in the order of their versions. Fence the resources of a
// transaction in their order, or it can deadlock with another one.
//
// scope is 1 to 255 bytes of UTF-8 without NUL: name the consumer and the kind of resource. resource is
// 1 to 1,024 such bytes. version grows with every change of the resource; 0 or more.
//
// After ErrFenceInvalid tx stays usable. After any other error tx is aborted; if it is ErrRetry,
// run the transaction again.
func (c *Claims) Fence(ctx context.Context, tx pgx.Tx, scope, resource string, version int64) (applied bool, err error) {
	// What the server would refuse is refused here: its refusal would abort the whole transaction.
	if !storable(scope, 255) || !storable(resource, 1024) || version < 0 {
		return false, fmt.Errorf("%w: %d of resource %.100q, scope %.100q: want 0 or more, 1 to 1024, and 1 to 255 bytes of UTF-8 without NUL", ErrFenceInvalid, version, resource, scope)
	}
	tag, err := tx.Exec(ctx, migrations.InSchema(fenceSQL, c.schema), scope, resource, version)
	switch {
	case pgerr.Transient(err):
		return false, fmt.Errorf("fence %s: %w: %w", scope, ErrRetry, err)
	case err != nil:
		return false, fmt.Errorf("fence %s: %w", scope, err)
	}
	return tag.RowsAffected() > 0, nil
}
