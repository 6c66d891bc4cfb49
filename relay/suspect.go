package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kerr"
)

// suspects are rows whose record failed with an error that trying again does not mend. The client fails
// everything that is buffered for a partition together, so most of them are innocent: each is produced
// again alone, and only one that fails alone is dead.
type suspects struct {
	mu   sync.Mutex
	seqs map[int64]bool
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

// refused tells errors of a record from troubles of the brokers or the connection: those pass.
func refused(err error) bool {
	var kafka *kerr.Error
	if !errors.As(err, &kafka) {
		return false
	}
	switch kafka.Code {
	case kerr.OutOfOrderSequenceNumber.Code, kerr.UnknownProducerID.Code, kerr.InvalidProducerEpoch.Code,
		kerr.InvalidProducerIDMapping.Code, kerr.UnknownTopicOrPartition.Code, kerr.UnknownTopicID.Code:
		return false // a new client, or a new look at the topic, decides
	}
	return !kafka.Retriable
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
		err := p.client.ProduceSync(ctx, s.records[i]).FirstErr()
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
