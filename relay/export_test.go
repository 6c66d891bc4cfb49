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

// FetchesElsewhere is what a look at the outbox says that reaches another server than the one of
// the lease.
func (r *Relay) FetchesElsewhere(ctx context.Context) error {
	l, err := r.acquire(ctx, 0)
	if err != nil {
		return err
	}
	l.cluster.run = "another run"
	err = newPublisher(r, l).reader.fetch(ctx, l.cursor, 10).err
	r.giveBack(ctx, l)
	return err
}

// StoresElsewhere is what a write of progress says where the server has another tick under the number.
func (r *Relay) StoresElsewhere(ctx context.Context) error {
	l, err := r.acquire(ctx, 0)
	if err != nil {
		return err
	}
	l.cursor.from.token = "00000000-0000-0000-0000-000000000000"
	err = newProgress(r, l).store(ctx, l.cursor, 1, nil)
	r.giveBack(ctx, l)
	return err
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
func (r *Relay) JournalKey(ctx context.Context, shard int16) (string, error) {
	l, err := r.acquire(ctx, shard)
	if err != nil {
		return "", err
	}
	defer r.giveBack(ctx, l)
	return r.transactionalID(l), nil
}

// ReadJournal is what a takeover of a shard finds in the progress topic, where the database's copy
// names an offset: the rows that the entry covers, or -1.
func (r *Relay) ReadJournal(ctx context.Context, shard int16, from *int64) (int64, error) {
	l, err := r.acquire(ctx, shard)
	if err != nil {
		return 0, err
	}
	defer r.giveBack(ctx, l)
	p := newPublisher(r, l)
	client, err := r.newClient(l)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	found, err := (&journal{publisher: p}).read(ctx, client, from)
	if err != nil || found == nil {
		return -1, err
	}
	return found.Published, nil
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
	l, err := r.acquire(ctx, 0)
	if err != nil {
		return err
	}
	defer r.giveBack(ctx, l)
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
}
