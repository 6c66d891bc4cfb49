package dedup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// FenceConfig of a Fences. The zero value works.
type FenceConfig struct {
	// Schema that holds the table. Default "effectonce"; bounds as in migrations.Options.
	Schema string
}

// Fences lets only newer versions of a resource have an effect. It holds no connection and is safe
// for concurrent use.
type Fences struct{ sql string }

// Version is a version of a resource.
type Version struct {
	// Resource is 1 to 1,024 bytes of UTF-8 without NUL.
	Resource string
	// Version grows with every change of the resource. 0 or more.
	Version int64
}

// ErrFenceInvalid means that scope, resource or version is out of bounds. Nothing was sent to the
// database.
var ErrFenceInvalid = errors.New("invalid version")

// NewFences returns the fences of a schema.
func NewFences(cfg FenceConfig) (*Fences, error) {
	schema, err := migrations.Options{Schema: cfg.Schema}.Resolve()
	if err != nil {
		return nil, err
	}
	return &Fences{migrations.InSchema(fenceSQL, schema)}, nil
}

// Fence stores a version in the caller's transaction if it is newer than the stored one, and
// reports whether it is. If applied, the caller writes its effect in the same transaction;
// otherwise the same or a newer version was applied before, and the caller writes none. Fence waits
// while another open transaction holds the resource, and then holds it until tx ends, so that
// effects of one resource are applied in the order of their versions. scope is 1 to 255 bytes of
// UTF-8 without NUL: name the consumer and the kind of resource.
//
// After ErrFenceInvalid tx stays usable. After any other error tx is aborted; if it is ErrRetry,
// run the transaction again.
func (f *Fences) Fence(ctx context.Context, tx pgx.Tx, scope, resource string, version int64) (applied bool, err error) {
	results, err := f.FenceBatch(ctx, tx, scope, []Version{{resource, version}})
	return err == nil && results[0], err
}

// FenceBatch does Fence for many versions in one round trip, with the results of consecutive calls.
// Fence all resources of a transaction in one call: two calls can deadlock with another transaction.
func (f *Fences) FenceBatch(ctx context.Context, tx pgx.Tx, scope string, versions []Version) (applied []bool, err error) {
	if err := checkVersions(scope, versions); err != nil || len(versions) == 0 {
		return nil, err
	}
	order := make([]int, len(versions))
	for i := range order {
		order[i] = i
	}
	// Two calls that lock the same rows in the same order cannot deadlock.
	slices.SortStableFunc(order, func(a, b int) int { return strings.Compare(versions[a].Resource, versions[b].Resource) })
	batch := &pgx.Batch{}
	for _, i := range order {
		batch.Queue(f.sql, scope, versions[i].Resource, versions[i].Version)
	}
	applied = make([]bool, len(versions))
	results := tx.SendBatch(ctx, batch)
	for _, i := range order {
		tag, execErr := results.Exec()
		applied[i], err = tag.RowsAffected() > 0, errors.Join(err, execErr)
	}
	if err = errors.Join(err, results.Close()); err != nil {
		return nil, wrapFenceError(scope, err)
	}
	return applied, nil
}

// checkVersions refuses what the server would refuse. A refusal by the server would abort the whole
// transaction.
func checkVersions(scope string, versions []Version) error {
	var problems []error
	check := func(what, value string, bytesMax int) {
		if len(value) < 1 || len(value) > bytesMax || !utf8.ValidString(value) || strings.ContainsRune(value, 0) {
			problems = append(problems, fmt.Errorf("%w: %s %.100q: want 1 to %d bytes of UTF-8 without NUL", ErrFenceInvalid, what, value, bytesMax))
		}
	}
	check("scope", scope, 255)
	for i, v := range versions {
		check(fmt.Sprintf("resource of version %d", i), v.Resource, 1024)
		if v.Version < 0 {
			problems = append(problems, fmt.Errorf("%w: version %d of resource %.100q: want 0 or more", ErrFenceInvalid, v.Version, v.Resource))
		}
	}
	return errors.Join(problems...)
}

// wrapFenceError makes errors.Is(err, ErrRetry) true for errors that a new transaction resolves.
func wrapFenceError(scope string, err error) error {
	if pgerr.Transient(err) {
		return fmt.Errorf("fence %s: %w: %w", scope, ErrRetry, err)
	}
	return fmt.Errorf("fence %s: %w", scope, err)
}
