package relay

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/migrations"
)

// horizon is which standbys must have a commit before its rows are published: see
// Config.DurableHorizon.
type horizon struct {
	count int      // number of standbys
	names []string // application_name; nil: any standby
}

// parseHorizon reads "any", "a,b" and "2 of a,b"; empty: none.
func parseHorizon(text string) (*horizon, error) {
	if text == "" {
		return nil, nil //nolint:nilnil // publishing waits for no standby
	}
	h := &horizon{count: 1}
	list := text
	if count, rest, found := strings.Cut(text+" ", " of "); found {
		n, err := strconv.Atoi(strings.TrimSpace(count))
		if err != nil || n < 1 || n > horizonMax {
			return nil, fmt.Errorf("DurableHorizon %q: want a number from 1 to %d before \"of\"", text, horizonMax)
		}
		h.count, list = n, rest
	}
	if strings.TrimSpace(list) == "any" {
		return h, nil
	}
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if name == "" || name == "any" {
			return nil, fmt.Errorf("DurableHorizon %q: want \"any\", names of standbys with commas between, or \"2 of\" before either", text)
		}
		h.names = append(h.names, name)
	}
	return h, nil
}

func (h *horizon) String() string {
	what := "any standby"
	if h.names != nil {
		what = strings.Join(h.names, ", ")
	}
	return fmt.Sprintf("%d of %s", h.count, what)
}

const horizonMax = 100

const mayAskHorizonSQL = `-- relay.may_ask_horizon
SELECT pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), pg_catalog.quote_ident(current_user)`

// horizonSQL returns how many standbys have flushed up to $2, which ones are connected, and how
// many bytes the best $4 of them miss (null: fewer are connected). Without $2 it uses the place of
// the next WAL record. A commit is visible only after its record has its place, so that place is
// behind every commit that an earlier statement saw, including those of sessions with
// synchronous_commit off. (The flushed position is not behind those.)
//
// A standby replays what it receives, and reports how far. A backup (pg_basebackup, pg_receivewal)
// never does. A subscriber of logical replication does, and has a logical slot.
const horizonSQL = `-- relay.horizon
WITH wanted AS MATERIALIZED (
  SELECT coalesce($2::text::pg_lsn, CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_insert_lsn() END) AS lsn
)
SELECT coalesce(wanted.lsn::text, ''), %s, CASE WHEN pg_is_in_recovery() THEN true ELSE pg_current_wal_flush_lsn() >= wanted.lsn END,
  standbys.flushed, standbys.names, standbys.missing
FROM wanted CROSS JOIN LATERAL (
  SELECT count(*) FILTER (WHERE r.flush_lsn >= wanted.lsn) AS flushed, coalesce(pg_catalog.array_agg(r.application_name ORDER BY r.application_name), '{}') AS names,
    pg_wal_lsn_diff(wanted.lsn, (pg_catalog.array_agg(r.flush_lsn ORDER BY r.flush_lsn DESC))[$4::int])::bigint AS missing
  FROM pg_stat_replication r
  WHERE r.flush_lsn IS NOT NULL AND r.replay_lsn IS NOT NULL AND ($3::text[] IS NULL OR r.application_name = ANY ($3))
    AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')
) standbys`

// flushSQL makes the primary flush its write-ahead log up to this point: a commit does that if its
// transaction has written something, even only a lock on a row, which leaves no dead version.
// Without it, WAL that belongs to no recent commit (hint bits of rows that the relay itself read, a
// large open transaction) stays in memory, and away from standbys, until the WAL writer runs: for
// 200 ms, or 5 s on an idle server.
const flushSQL = `-- relay.flush
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'local', true) AS setting)
SELECT FROM effectonce.outbox_progress p, durable
WHERE p.relay = $1 AND p.shard = $2 AND durable.setting IS NOT NULL FOR KEY SHARE OF p SKIP LOCKED`

// checkHorizon rejects a role that cannot see how far standbys are: it would wait forever.
func (r *Relay) checkHorizon(ctx context.Context) error {
	if r.horizon == nil {
		return nil
	}
	var may bool
	var role string
	if err := r.pool.QueryRow(ctx, mayAskHorizonSQL).Scan(&may, &role); err != nil {
		return fmt.Errorf("check whether the role may see standbys: %w", err)
	}
	if !may {
		return fmt.Errorf("DurableHorizon needs a role that may see how far standbys are: GRANT pg_read_all_stats TO %s", role)
	}
	return nil
}

// looked is one result of horizonSQL.
type looked struct {
	lsn      string
	onDisk   bool // of the primary itself
	flushed  int
	standbys []string
	missing  *int64
}

func (r *Relay) lookAtHorizon(ctx context.Context, l *lease, lsn *string) (*looked, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patience, errNoAnswer)
	defer cancel()
	same := here
	if l.cluster.run == nil { // the database hides functions that serverRun needs: see adapt
		same = strings.ReplaceAll(here, serverRun, unknownRun)
	}
	found, isHere := &looked{}, false
	err := r.pool.QueryRow(ctx, fmt.Sprintf(horizonSQL, same), l.cluster.run, lsn, r.horizon.names, r.horizon.count).
		Scan(&found.lsn, &isHere, &found.onDisk, &found.flushed, &found.standbys, &found.missing)
	if err != nil {
		return nil, silence(ctx, fmt.Errorf("read how far standbys are: %w", err))
	}
	if !isHere {
		return nil, errAnotherRun
	}
	return found, nil
}

// How often standbys are polled: a flush takes about a millisecond, an absence may take days.
const (
	horizonLookMin  = 500 * time.Microsecond
	horizonLookSoon = 2 * time.Millisecond // up to horizonSilent
	horizonLookMax  = 250 * time.Millisecond
	// horizonBrief is how long an open transaction stays open during a wait.
	horizonBrief = 50 * time.Millisecond
	// horizonSilent is how long a wait is not logged.
	horizonSilent   = 2 * time.Second
	horizonSayEvery = 30 * time.Second
)

// awaitHorizon returns once every commit that earlier statements saw is flushed by as many standbys
// as Config.DurableHorizon requires. It gives up when ctx ends or the lease is lost, and never
// publishes instead. Before a longer wait it calls settle once: an open Kafka transaction would
// time out, although its rows could have been committed.
func (p *publisher) awaitHorizon(ctx context.Context, settle func(context.Context) error) error {
	r, l := p.Relay, p.lease
	if r.horizon == nil {
		return nil
	}
	var lsn *string // of the first poll: later commits are not waited for
	var said time.Time
	var saidAbsent, settled bool
	begun := time.Now()
	for wait := horizonLookMin; ; wait = min(2*wait, horizonLookMax) {
		if time.Since(begun) < horizonSilent {
			wait = min(wait, horizonLookSoon)
		}
		p.turn()
		found, err := r.lookAtHorizon(ctx, l, lsn)
		if err != nil {
			return err
		}
		if !l.held() {
			return errLeaseLost
		}
		if found.flushed >= r.horizon.count {
			if !said.IsZero() {
				r.cfg.Logger.InfoContext(ctx, "the standbys have flushed the commits: publishing continues", "relay", r.cfg.Name, "shard", l.shard, "waited", time.Since(begun).String())
			}
			return nil
		}
		if lsn == nil && !found.onDisk {
			r.flush(ctx, l)
		}
		lsn = &found.lsn
		if !settled && time.Since(begun) > horizonBrief {
			settled = true
			if err := settle(ctx); err != nil {
				return err
			}
		}
		absent := found.missing == nil
		if time.Since(begun) > horizonSilent && (said.IsZero() || absent != saidAbsent || time.Since(said) > horizonSayEvery) {
			said, saidAbsent = time.Now(), absent
			r.sayHorizon(ctx, l, found, begun)
		}
		if !pause.For(ctx, wait) {
			return ctx.Err()
		}
	}
}

// flush only shortens the wait. If it fails, the next poll shows whether the database is
// unavailable.
func (r *Relay) flush(ctx context.Context, l *lease) {
	ctx, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	_, _ = r.pool.Exec(ctx, migrations.InSchema(flushSQL, r.cfg.Schema), r.cfg.Name, l.shard)
}

func (r *Relay) sayHorizon(ctx context.Context, l *lease, found *looked, begun time.Time) {
	attrs := []any{
		"relay", r.cfg.Name, "shard", l.shard, "wanted", r.horizon.String(), "connected", strings.Join(found.standbys, ", "),
		"lsn", found.lsn, "waited", time.Since(begun).String(),
	}
	if found.missing == nil {
		r.cfg.Logger.WarnContext(ctx, "nothing is published: too few standbys are connected for --durable-horizon; connect them, or run without it", attrs...)
		return
	}
	r.cfg.Logger.WarnContext(ctx, "nothing is published: waiting for standbys to flush committed rows", append(attrs, "bytes_behind", *found.missing)...)
}
