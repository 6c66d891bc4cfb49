package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// suspects are rows whose record failed with an error that trying again does not mend. The client fails
// everything that is buffered for a partition together, so most of them are innocent: each is produced
// again alone, and only one that fails alone is dead.
type suspects struct {
	mu   sync.Mutex
	seqs map[int64]bool
	// refusals are what Kafka said about rows that were alone in a transaction, which it made void: the row is
	// buried when it is read again, and it is kept until then. There may be several: the work starts over for each.
	refusals map[int64]error
}

func (r *Relay) suspect(seq int64) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	if r.suspects.seqs == nil {
		r.suspects.seqs = map[int64]bool{}
	}
	r.suspects.seqs[seq] = true
}

func (r *Relay) anySuspect(rows []*row) bool {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	if len(r.suspects.seqs) == 0 {
		return false
	}
	for _, row := range rows {
		if r.suspects.seqs[row.seq] {
			return true
		}
	}
	return false
}

func (r *Relay) acquit(rows []*row) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	for _, row := range rows {
		delete(r.suspects.seqs, row.seq)
	}
}

func (r *Relay) refuse(seq int64, err error) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	if r.suspects.refusals == nil {
		r.suspects.refusals = map[int64]error{}
	}
	r.suspects.refusals[seq] = err
	delete(r.suspects.seqs, seq)
}

// refusal returns what was said about a row.
func (r *Relay) refusal(seq int64) error {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	return r.suspects.refusals[seq]
}

// forgetRefusals is for rows of which it is stored.
func (r *Relay) forgetRefusals(dead []deadRow) {
	r.suspects.mu.Lock()
	defer r.suspects.mu.Unlock()
	for _, d := range dead {
		delete(r.suspects.refusals, d.row.seq)
	}
}

// refusedAlone is a refusal of which the work starts over at once: it is known now which row it is.
type refusedAlone struct{ cause error }

func (r *refusedAlone) Error() string { return r.cause.Error() }
func (r *refusedAlone) Unwrap() error { return r.cause }

// refused tells what Kafka says about a record or its topic from all else: troubles of the brokers, the connection or the
// transaction, also those that the client would not try again, pass, or are mended where they are, and would make every
// row dead that is read meanwhile. An error that is not known here is one of them: the relay names it, and waits.
func refused(err error) bool {
	var kafka *kerr.Error
	if !errors.As(err, &kafka) {
		return false
	}
	switch kafka.Code {
	case kerr.MessageTooLarge.Code, kerr.RecordListTooLarge.Code, kerr.InvalidRecord.Code, kerr.InvalidTimestamp.Code,
		kerr.UnsupportedForMessageFormat.Code, kerr.PolicyViolation.Code, kerr.InvalidTopicException.Code, kerr.TopicAuthorizationFailed.Code:
		return true
	}
	return false // also for a topic that is not there: a new look at it decides
}

// produceOne produces a record and waits until it is acknowledged. The client's own way of waiting does not end with ctx
// once a broker has got the record and does not answer.
func (p *publisher) produceOne(ctx context.Context, record *kgo.Record) error {
	done := make(chan error, 1)
	p.client.Produce(ctx, record, func(_ *kgo.Record, err error) { done <- err })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// sendSuspects produces the rows of a page one by one, each acknowledged before the next, and moves those
// that Kafka refuses, and what is behind them, to the dead of the page.
func (p *publisher) sendSuspects(ctx context.Context, s *sorted) error {
	if err := p.settled(ctx); err != nil {
		return err
	}
	tried := s.rows
	rows, records := s.rows[:0:0], s.records[:0:0]
	for i, r := range s.rows {
		if r.key != nil && s.behind[keyOf(r)] {
			s.bury(r, ReasonBehind, errBehind)
			continue
		}
		err := p.produceOne(ctx, s.records[i])
		if err != nil && !refused(err) {
			return fmt.Errorf("produce to topic %q: %w", r.topic, err)
		}
		if err != nil {
			s.bury(r, ReasonRefused, fmt.Errorf("%w: mend the cause and retry the row, or discard it", err))
			continue
		}
		rows, records = append(rows, r), append(records, s.records[i])
	}
	s.rows, s.records = rows, records
	p.enqueue(&batch{rows: rows})
	p.acquit(tried)
	return nil
}

// sendAlone produces rows one by one, each in a transaction of its own, after which progress is at the cursor that
// behind returns, or where it was if that is the zero value: the row was dead. A refusal makes the transaction void: the work starts over, and the row is known then.
func (p *publisher) sendAlone(ctx context.Context, s *sorted, behind func(*row) cursor) error {
	for i, r := range s.rows {
		if err := p.commit(ctx); err != nil {
			return err
		}
		if err := p.open(); err != nil {
			return err
		}
		if err := p.produceOne(ctx, s.records[i]); err != nil {
			// It may be in the transaction, and is in no progress: a stop must not commit it.
			cause := p.void(fmt.Errorf("produce to topic %q: %w", r.topic, err))
			if !refused(err) {
				return cause
			}
			p.refuse(r.seq, fmt.Errorf("%w: mend the cause and retry the row, or discard it", err))
			return &refusedAlone{cause}
		}
		end := behind(r)
		if end.from == nil {
			p.exact.revived = []int64{r.seq}
		}
		p.enqueue(&batch{rows: s.rows[i : i+1], end: end})
		p.acquit(s.rows[i : i+1])
	}
	return p.commit(ctx)
}
