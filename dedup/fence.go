package dedup

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
)

// FenceConfig of a Fences. The zero value works: older versions have no effect, and gaps are
// allowed.
type FenceConfig struct {
	// Schema that holds the table. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// RefuseGaps makes a version that does not follow the stored one an ErrGap: for effects that
	// need every version. A retry may succeed once the missing version has been applied. Default:
	// any newer version is applied.
	RefuseGaps bool
	// InitialVersion is the assumed version of a resource that was never fenced, if RefuseGaps is
	// set: its first version may be at most one more. From -1; default 0, for versions that begin
	// at 1. Use -1 if they begin at 0.
	InitialVersion int64
	// RefuseStale makes a version that is older than the stored one an ErrStale. Default: it is a
	// result.
	RefuseStale bool
	// Stale, if set, is called with the number of versions of a call that were older than the
	// stored one, for metrics. It is called before the caller's transaction ends, so it also counts
	// executions that are rolled back.
	Stale func(scope string, versions int)
}

// Fences lets only newer versions of a resource have an effect. It holds no connection and is safe
// for concurrent use.
type Fences struct {
	sql   fenceQueries
	cfg   FenceConfig
	first int64
}

// Version is a version of a resource, with its content.
type Version struct {
	// Resource is 1 to 1,024 bytes of UTF-8 without NUL.
	Resource string
	// Version grows with every change of the resource. 0 or more.
	Version int64
	// Content distinguishes two states with the same version; its hash is stored. Nil: not
	// compared.
	Content []byte
}

// FenceVerdict is the decision about a version.
type FenceVerdict uint8

// The verdicts. Run the effect only on Applied.
const (
	// Applied: the version is newer and is now stored.
	Applied FenceVerdict = iota + 1
	// Stale: a newer version was applied before.
	Stale
	// Equal: the same version was applied before.
	Equal
)

// Fenced is the result of one version.
type Fenced struct {
	Verdict FenceVerdict
	// Stored is the version that is stored now. If Verdict is Applied, it is the given one.
	Stored int64
}

// Reasons of a VersionError, and the error for invalid arguments.
var (
	// ErrStale: a newer version was applied before. A retry does not help.
	ErrStale = errors.New("version is stale")
	// ErrGap: versions between the stored and the given one are missing. A retry may help.
	ErrGap = errors.New("version does not follow the stored one")
	// ErrFenceConflict: the same version was applied before, with different content. One of the two
	// is wrong, and a retry does not show which.
	ErrFenceConflict = errors.New("version was applied with other content")
	// ErrFenceInvalid: scope, resource or version is out of bounds. Nothing was sent to the
	// database.
	ErrFenceInvalid = errors.New("invalid version")
)

// VersionError reports a refused version. It wraps ErrStale, ErrGap or ErrFenceConflict. The
// refused version is not stored and the transaction stays usable. Other versions of the same batch
// may be stored, so roll it back.
type VersionError struct {
	Scope, Resource string
	Given           int64
	Stored          int64 // valid only if Known
	Known           bool  // whether the resource has a stored version
	Reason          error
}

func (e *VersionError) Error() string {
	stored := "none"
	if e.Known {
		stored = fmt.Sprintf("version %d", e.Stored)
	}
	return fmt.Sprintf("fence %s, resource %q: %v: given version %d, stored %s", e.Scope, e.Resource, e.Reason, e.Given, stored)
}

// Unwrap returns the reason.
func (e *VersionError) Unwrap() error { return e.Reason }

// NewFences returns the fences of a schema, or all problems of the configuration at once.
func NewFences(cfg FenceConfig) (*Fences, error) {
	schema, err := migrations.Options{Schema: cfg.Schema}.Resolve()
	if cfg.InitialVersion < -1 || cfg.InitialVersion == math.MaxInt64 {
		err = errors.Join(err, fmt.Errorf("InitialVersion %d: want -1 to %d", cfg.InitialVersion, int64(math.MaxInt64)-1))
	}
	if cfg.InitialVersion != 0 && !cfg.RefuseGaps {
		err = errors.Join(err, fmt.Errorf("InitialVersion %d: want none unless RefuseGaps is set", cfg.InitialVersion))
	}
	if err != nil {
		return nil, err
	}
	return &Fences{sql: newFenceQueries(schema), cfg: cfg, first: cfg.InitialVersion + 1}, nil
}

//nolint:gochecknoglobals // immutable: what the package-level functions use
var standardFences = &Fences{sql: newFenceQueries(migrations.DefaultSchema)}

// Fence uses the default schema with the default policy; see Fences.Fence.
func Fence(ctx context.Context, tx pgx.Tx, scope, resource string, version int64, content []byte) (Fenced, error) {
	return standardFences.Fence(ctx, tx, scope, resource, version, content)
}

// FenceBatch uses the default schema with the default policy; see Fences.FenceBatch.
func FenceBatch(ctx context.Context, tx pgx.Tx, scope string, versions []Version) ([]Fenced, error) {
	return standardFences.FenceBatch(ctx, tx, scope, versions)
}

// Fence stores a version in the caller's transaction if it is newer than the stored one, and
// reports whether it is. If the verdict is Applied, the caller writes its effect in the same
// transaction; otherwise it writes none. Fence waits while another open transaction holds the
// resource, and then holds it until tx ends, so that effects of one resource are applied in the
// order of their versions. scope is 1 to 255 bytes of UTF-8 without NUL: name the consumer and the
// kind of resource. content is optional, see Version.
//
// A refusal is a *VersionError, invalid arguments are ErrFenceInvalid. After both, nothing was
// stored and tx stays usable. After any other error tx is aborted; if it is ErrRetry, run the
// transaction again.
func (f *Fences) Fence(ctx context.Context, tx pgx.Tx, scope, resource string, version int64, content []byte) (Fenced, error) {
	results, err := f.FenceBatch(ctx, tx, scope, []Version{{resource, version, content}})
	if err != nil {
		return Fenced{}, err
	}
	return results[0], nil
}

// FenceBatch does Fence for many versions in one round trip, or two if a resource occurs several
// times. The results are the same as those of consecutive calls. Fence all resources of a
// transaction in one call: two calls can deadlock with another transaction.
//
// If versions are refused, the error joins the *VersionError of each. Other versions may be stored
// then: roll back.
func (f *Fences) FenceBatch(ctx context.Context, tx pgx.Tx, scope string, versions []Version) ([]Fenced, error) {
	if err := checkVersions(scope, versions); err != nil || len(versions) == 0 {
		return nil, err
	}
	firsts, places := firstVersions(versions)
	state, err := f.store(ctx, tx, scope, firsts)
	if err != nil {
		return nil, err
	}
	results := make([]Fenced, len(versions))
	changed := map[string]Version{} // by later occurrences
	var problems []error
	stale := 0
	for i, v := range versions {
		s := state[v.Resource]
		result, reason := f.judge(s, v, places[v.Resource] == i)
		if reason != nil {
			problems = append(problems, &VersionError{scope, v.Resource, v.Version, s.version, s.known, reason})
		}
		if result.Verdict == Stale {
			stale++
		}
		if result.Verdict == Applied {
			if places[v.Resource] != i {
				changed[v.Resource] = v
			}
			s.known, s.version, s.content = true, v.Version, contentHash(v.Content)
		}
		results[i] = result
	}
	if f.cfg.Stale != nil && stale > 0 {
		f.cfg.Stale(scope, stale)
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	if err := f.restore(ctx, tx, scope, changed); err != nil {
		return nil, err
	}
	return results, nil
}

// stored is the state of a resource while this call processes its versions.
type stored struct {
	version int64
	content *[16]byte
	known   bool
	applied bool // the statement applied the first version of this call
}

// judge decides about a version by the same rules as the statement. The statement has already
// decided about the first version of each resource.
func (f *Fences) judge(s *stored, v Version, first bool) (Fenced, error) {
	switch {
	case first && s.applied:
		return Fenced{Applied, v.Version}, nil
	case s.known && v.Version < s.version:
		if f.cfg.RefuseStale {
			return Fenced{Stale, s.version}, ErrStale
		}
		return Fenced{Stale, s.version}, nil
	case s.known && v.Version == s.version:
		if hash := contentHash(v.Content); hash != nil && s.content != nil && *hash != *s.content {
			return Fenced{Equal, s.version}, ErrFenceConflict
		}
		return Fenced{Equal, s.version}, nil
	case first, f.cfg.RefuseGaps && s.known && v.Version-1 != s.version, f.cfg.RefuseGaps && !s.known && v.Version > f.first:
		return Fenced{}, ErrGap // newer, and not stored
	default:
		return Fenced{Applied, v.Version}, nil
	}
}

// store runs the statements for one version of each resource. For each resource it returns the
// stored version: the given one if it was applied, otherwise the earlier one.
func (f *Fences) store(ctx context.Context, tx pgx.Tx, scope string, versions []Version) (map[string]*stored, error) {
	state := make(map[string]*stored, len(versions))
	names := make([]string, len(versions))
	for i, v := range versions {
		names[i], state[v.Resource] = v.Resource, &stored{}
	}
	batch := &pgx.Batch{}
	f.queue(batch, scope, names, versions).Query(func(rows pgx.Rows) error {
		var resource string
		_, err := pgx.ForEachRow(rows, []any{&resource}, func() error {
			state[resource].applied = true
			return nil
		})
		return err
	})
	batch.Queue(f.sql.read, scope, names).Query(func(rows pgx.Rows) error {
		var resource string
		var version int64
		var content *[16]byte
		_, err := pgx.ForEachRow(rows, []any{&resource, &version, &content}, func() error {
			s := state[resource]
			s.known, s.version, s.content = true, version, content
			return nil
		})
		return err
	})
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return nil, wrapFenceError(scope, err)
	}
	return state, nil
}

// restore stores the final version of resources that occur several times. This transaction holds
// their row locks.
func (f *Fences) restore(ctx context.Context, tx pgx.Tx, scope string, changed map[string]Version) error {
	if len(changed) == 0 {
		return nil
	}
	versions := make([]Version, 0, len(changed))
	for _, v := range changed {
		versions = append(versions, v)
	}
	names := make([]string, len(versions))
	for i, v := range versions {
		names[i] = v.Resource
	}
	hashes, numbers := columns(versions)
	tag, err := tx.Exec(ctx, f.sql.newer, scope, names, numbers, hashes)
	if err != nil {
		return wrapFenceError(scope, err)
	}
	if n := tag.RowsAffected(); n != int64(len(versions)) {
		return fmt.Errorf("fence %s: %d of %d versions were stored although their rows are locked: roll back", scope, n, len(versions))
	}
	return nil
}

func (f *Fences) queue(batch *pgx.Batch, scope string, names []string, versions []Version) *pgx.QueuedQuery {
	hashes, numbers := columns(versions)
	if f.cfg.RefuseGaps {
		return batch.Queue(f.sql.next, scope, names, numbers, hashes, f.first)
	}
	return batch.Queue(f.sql.newer, scope, names, numbers, hashes)
}

func columns(versions []Version) (hashes []*[16]byte, numbers []int64) {
	hashes, numbers = make([]*[16]byte, len(versions)), make([]int64, len(versions))
	for i, v := range versions {
		hashes[i], numbers[i] = contentHash(v.Content), v.Version
	}
	return hashes, numbers
}

// firstVersions returns the first occurrence of each resource, sorted, and its index in versions.
func firstVersions(versions []Version) (firsts []Version, places map[string]int) {
	places = make(map[string]int, len(versions))
	for i, v := range versions {
		if _, seen := places[v.Resource]; !seen {
			places[v.Resource] = i
			firsts = append(firsts, v)
		}
	}
	slices.SortFunc(firsts, func(a, b Version) int { return strings.Compare(a.Resource, b.Resource) })
	return firsts, places
}

// contentHash returns the value of the column content. Nil: nothing to compare.
func contentHash(content []byte) *[16]byte {
	if content == nil {
		return nil
	}
	sum := sha256.Sum256(content)
	return (*[16]byte)(sum[:16])
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
