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
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/effectonce/effectonce/migrations"
)

// FenceConfig of a Fences. The zero value works: what is older is dropped, and gaps are stepped over.
type FenceConfig struct {
	// Schema that holds the table. Default "effectonce"; bounds as in migrations.Options.
	Schema string
	// RefuseGaps makes a version that does not follow the stored one an ErrGap: for effects that need
	// every version. The error may pass, once the missing version was applied. Default: newer is enough.
	RefuseGaps bool
	// InitialVersion is what a resource counts as having that was never fenced, where RefuseGaps is set: its
	// first version is at most one more. From -1; default 0, for versions that begin at 1. Use -1 where they
	// begin at 0.
	InitialVersion int64
	// RefuseStale makes an older version than the stored one an ErrStale. Default: it is a result.
	RefuseStale bool
	// Stale, if set, is told how many versions of a call were older than the stored one, for metrics. It
	// is called before the caller's transaction ends: an execution that is rolled back counts, too.
	Stale func(scope string, versions int)
}

// Fences lets only newer versions of a resource have an effect. It holds no connection and is safe for
// concurrent use.
type Fences struct {
	sql   fenceQueries
	cfg   FenceConfig
	first int64
}

// Version is a version of a resource, and what it says.
type Version struct {
	// Resource is 1 to 1,024 bytes of UTF-8 without NUL.
	Resource string
	// Version grows with every change of the resource. 0 or more.
	Version int64
	// Content tells two states apart that claim the same version; its hash is stored. Nil: not compared.
	Content []byte
}

// FenceVerdict is what became of a version.
type FenceVerdict uint8

// The verdicts. Only Applied asks for the effect.
const (
	// Applied: it is newer and is stored now.
	Applied FenceVerdict = iota + 1
	// Stale: a newer one was applied before.
	Stale
	// Equal: this very version was applied before.
	Equal
)

// Fenced is the result of one version.
type Fenced struct {
	Verdict FenceVerdict
	// Stored is the version that counts now: where Verdict is Applied, the given one.
	Stored int64
}

// Reasons of a VersionError, and what is wrong with arguments.
var (
	// ErrStale: a newer version was applied before. Trying again cannot mend it.
	ErrStale = errors.New("version is stale")
	// ErrGap: versions between the stored and the given one are missing. Trying again can mend it.
	ErrGap = errors.New("version does not follow the stored one")
	// ErrFenceConflict: this very version was applied before, with other content. One of the two is wrong,
	// and trying again does not tell which.
	ErrFenceConflict = errors.New("version was applied with other content")
	// ErrFenceInvalid: scope, resource or version is out of bounds. Nothing was sent to the database.
	ErrFenceInvalid = errors.New("invalid version")
)

// VersionError says which version was refused; it wraps ErrStale, ErrGap or ErrFenceConflict. That version is
// not stored and the transaction goes on; others of the same batch may be stored, so roll it back.
type VersionError struct {
	Scope, Resource string
	Given           int64
	Stored          int64 // meaningless unless Known
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

// Fence asks the default schema with the default policy; see Fences.Fence.
func Fence(ctx context.Context, tx pgx.Tx, scope, resource string, version int64, content []byte) (Fenced, error) {
	return standardFences.Fence(ctx, tx, scope, resource, version, content)
}

// FenceBatch asks the default schema with the default policy; see Fences.FenceBatch.
func FenceBatch(ctx context.Context, tx pgx.Tx, scope string, versions []Version) ([]Fenced, error) {
	return standardFences.FenceBatch(ctx, tx, scope, versions)
}

// Fence stores a version in the caller's transaction if it is newer than the stored one, and reports whether
// it is: the caller has its effect in the same transaction if the verdict is Applied, else none. It waits
// while another open transaction holds the resource, and holds it itself until tx ends, so that effects of
// one resource come in the order of their versions. scope is 1 to 255 bytes of UTF-8 without NUL: name the
// consumer and the kind of resource. content is optional, see Version.
//
// A refusal is a *VersionError, bad arguments are ErrFenceInvalid; after both nothing was stored and tx goes
// on. After any other error tx is aborted; if it is ErrRetry, run the transaction again.
func (f *Fences) Fence(ctx context.Context, tx pgx.Tx, scope, resource string, version int64, content []byte) (Fenced, error) {
	results, err := f.FenceBatch(ctx, tx, scope, []Version{{resource, version, content}})
	if err != nil {
		return Fenced{}, err
	}
	return results[0], nil
}

// FenceBatch does Fence for many versions in one round trip, or two where a resource occurs several times;
// the results are those that one call after the other would give. Fence all resources of a transaction in
// one call: two calls can deadlock with another transaction's.
//
// If versions are refused, the error joins the *VersionError of each. Others are stored then: roll back.
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

// stored is what a resource has, as this call goes through its versions.
type stored struct {
	version int64
	content *[16]byte
	known   bool
	applied bool // the first version of this call was
}

// judge decides about a version as the statement does, which has decided about the first of each resource.
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

// store asks the database for one version of each resource. It tells for each what was stored before, or,
// if it was applied, itself.
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

// restore stores what later versions of the same resources came to. This transaction holds their rows.
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

// firstVersions returns the first occurrence of each resource, sorted, and the place of each.
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

// contentHash is what the column content keeps; nil: nothing to compare.
func contentHash(content []byte) *[16]byte {
	if content == nil {
		return nil
	}
	sum := sha256.Sum256(content)
	return (*[16]byte)(sum[:16])
}

// checkVersions refuses what the server would, and with it the whole transaction.
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

// wrapFenceError makes errors.Is(err, ErrRetry) true for those that a new transaction resolves.
func wrapFenceError(scope string, err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		switch pgErr.Code {
		case "40001", "40P01", "55P03":
			return fmt.Errorf("fence %s: %w: %w", scope, ErrRetry, err)
		}
	}
	return fmt.Errorf("fence %s: %w", scope, err)
}
