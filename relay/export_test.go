package relay

import (
	"context"
	"time"
)

// FetchSQL, FetchNewSQL and FetchSizedSQL are the statements of the plan's test.
const (
	FetchSQL      = fetchSQL
	FetchNewSQL   = fetchNewSQL
	FetchSizedSQL = fetchSizedSQL
)

// UnpublishedSQL is for the test of locks.
const UnpublishedSQL = unpublishedSQL

// LastSeq is the number that the outbox's sequence gave last.
const LastSeq = lastSeq

// AdvanceSQL and AcquireSQL are statements whose cost a test compares.
const (
	AdvanceSQL = advanceSQL
	AcquireSQL = acquireSQL
	RunSQL     = runSQL
)

// FetchSettingsSQL goes before it.
const FetchSettingsSQL = fetchSettingsSQL

// PollEvery sets both pauses, to more than a Config may: who does not wait for a pause proves that
// something else ended it.
func PollEvery(r *Relay, pause time.Duration) { r.cfg.PollMin, r.cfg.PollMax = pause, pause }

// TidyUp is a run of the upkeep of slots.
func (r *Relay) TidyUp(ctx context.Context) error {
	here, _, err := r.askCluster(ctx)
	if err != nil {
		return err
	}
	return r.tidyUp(ctx, here)
}

// PromoteDue is a look at the messages for later.
func (r *Relay) PromoteDue(ctx context.Context) error {
	_, err := r.promoteDue(ctx)
	return err
}

// PromotePage is one move of at most rows messages.
func (r *Relay) PromotePage(ctx context.Context, rows int) (moved int, err error) {
	return r.promotePage(ctx, rows)
}

// PromoteRowsMax is how many messages one move takes.
const PromoteRowsMax = promoteRowsMax

// NextDueSQL and PromoteSQL are what the plan's test looks at.
const (
	NextDueSQL = nextDueSQL
	PromoteSQL = promoteSQL
)

// SetPatience limits statements to less than Run would.
func (r *Relay) SetPatience(d time.Duration) { r.patience = d }

// RenewsWhatItGaveBack reports whether a beat that was running while a lease was released renews
// it.
func (r *Relay) RenewsWhatItGaveBack(ctx context.Context) (bool, error) {
	if _, err := r.pool.Exec(ctx, r.sql.of(enrollSQL), r.cfg.Name, r.cfg.Shards); err != nil {
		return false, err
	}
	l, err := r.acquire(ctx, 0)
	if err != nil {
		return false, err
	}
	r.giveBack(ctx, l)
	s, err := r.beat(ctx, []*lease{l}, r.publishing(l))
	if err != nil {
		return false, err
	}
	return len(s.renewed) > 0, nil
}

// Acquires reports whether a shard can be taken.
func (r *Relay) Acquires(ctx context.Context, shard int16) (bool, error) {
	l, err := r.acquire(ctx, shard)
	return l != nil, err
}

// holding does something with the lease of a shard.
func (r *Relay) holding(ctx context.Context, shard int16, do func(l *lease) error) error {
	l, err := r.acquire(ctx, shard)
	if err != nil {
		return err
	}
	defer r.giveBack(ctx, l)
	return do(l)
}

// FetchesElsewhere is what a look at the outbox says that reaches another server than the one of
// the lease.
func (r *Relay) FetchesElsewhere(ctx context.Context) error {
	return r.holding(ctx, 0, func(l *lease) error {
		l.cluster.run = "another run"
		return newPublisher(r, l).reader.fetch(ctx, l.cursor, 10).err
	})
}

// StoresElsewhere is what a write of progress says where the server has another tick under the number.
func (r *Relay) StoresElsewhere(ctx context.Context) error {
	return r.holding(ctx, 0, func(l *lease) error {
		l.cursor.from.token = "00000000-0000-0000-0000-000000000000"
		return newProgress(r, l).store(ctx, l.cursor, 1, nil)
	})
}

// HasSeen lets this process have published on another timeline of this cluster.
func (r *Relay) HasSeen(ctx context.Context, later int32) error {
	c, _, err := r.askCluster(ctx)
	if err != nil {
		return err
	}
	*c.timeline += later
	r.newest.Store(&c)
	return nil
}

// ErrAnotherRun is what FetchesElsewhere returns.
var ErrAnotherRun = errAnotherRun

// JournalKey is the key of a shard's entries in the progress topic.
func (r *Relay) JournalKey(ctx context.Context, shard int16) (key string, err error) {
	err = r.holding(ctx, shard, func(l *lease) error {
		key = r.transactionalID(l)
		return nil
	})
	return key, err
}

// ReadJournal is what a takeover of a shard finds in the progress topic, where the database's copy
// names an offset: the rows that the entry covers, or -1.
func (r *Relay) ReadJournal(ctx context.Context, shard int16, from *int64) (rows int64, err error) {
	rows = -1
	err = r.holding(ctx, shard, func(l *lease) error {
		client, err := r.newClient(l)
		if err != nil {
			return err
		}
		defer client.Close()
		found, err := (&journal{publisher: newPublisher(r, l)}).read(ctx, client, from)
		if found != nil {
			rows = found.Published
		}
		return err
	})
	return rows, err
}

// The statements on dead rows, for tests of their plans.
const (
	DeadSettingsSQL  = deadSettingsSQL
	DeadTopicsSQL    = deadTopicsSQL
	WaitingTopicsSQL = waitingTopicsSQL
	RetryTopicSQL    = retryTopicSQL
	ReleasedSQL      = releasedSQL
	ReleasableSQL    = releasableSQL
	HoldingSQL       = holdingSQL
	MoveToDeadSQL    = moveToDeadSQL
)

// LooksAtDeadRows polls dead rows some times, lets rows become dead, and polls as often again.
func (r *Relay) LooksAtDeadRows(ctx context.Context, rounds int, between func()) error {
	return r.holding(ctx, 0, func(l *lease) error {
		look := newPublisher(r, l).dead.look
		for range 2 {
			for range rounds {
				if _, err := look.round(ctx); err != nil {
					return err
				}
			}
			between()
			look.moved(nil)
		}
		return nil
	})
}
