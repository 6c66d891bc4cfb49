package relay

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/internal/crashpoint"
)

// storeProgress writes the cursor behind the acknowledged prefix, at most every ProgressEvery, until ctx
// ends, and then once more for what was acknowledged last.
func (p *publisher) storeProgress(ctx context.Context) error {
	for {
		if err := p.storeAcked(ctx); err != nil {
			return err
		}
		if !pause(ctx, p.cfg.ProgressEvery) {
			return p.storeAcked(ctx)
		}
		if f := p.inFlight(); !f.acked {
			select {
			case <-f.changed:
			case <-ctx.Done():
			}
		}
	}
}

func (p *publisher) takeAcked() (*cursor, int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	end, rows := p.acked, p.ackedRows
	p.acked, p.ackedRows = nil, 0
	return end, rows
}

// storeAcked also works when ctx has ended: that is the last write of a clean stop.
func (p *publisher) storeAcked(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.cfg.Lease)
	defer cancel()
	p.storing.Lock()
	defer p.storing.Unlock()
	if !p.inFlight().acked {
		return nil // rows may be acknowledged beside a dead one: they are counted with it
	}
	end, rows := p.takeAcked()
	crashpoint.Here(crashpoint.RelayAcknowledged)
	if err := p.storeCursor(ctx, p.pool, *end, rows); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.RelayProgressed)
	p.count(rows)
	return nil
}

func (p *publisher) count(rows int64) {
	p.published += rows
	if p.cfg.Hooks.Published != nil && rows > 0 {
		p.cfg.Hooks.Published(rows)
	}
}

// storeCursor writes progress under the lease's epoch.
func (p *publisher) storeCursor(ctx context.Context, db execer, end cursor, rows int64) error {
	seq := p.seqRead.Load()
	if err := p.store(ctx, db, end.from); err != nil {
		return err
	}
	var to *int64
	if end.to != nil {
		if err := p.store(ctx, db, end.to); err != nil {
			return err
		}
		to = &end.to.id
	}
	tag, err := db.Exec(ctx, p.sql.advance, p.cfg.Name, p.lease.shard, p.lease.epoch, end.from.id, to, end.seq, end.floor, rows, p.lease.cluster.run)
	if err != nil {
		return fmt.Errorf("store progress: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return errLeaseLost
	}
	if _, inside := db.(pgx.Tx); !inside { // there it is not committed yet
		p.seqSafe.Store(seq)
	}
	return nil
}
