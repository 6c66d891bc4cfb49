package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgerr"
)

// CountMax bounds what is counted exactly: rows that wait for a relay, dead rows, parked messages.
// A larger backlog is estimated from the sequence.
const CountMax = 100_000

// troubleMax bounds how many halted partitions are listed.
const troubleMax = 100

// Status is the state of the pipeline: the relays, the rows that wait for them, and the consumers.
type Status struct {
	Schema   string        `json:"schema"`
	Well     bool          `json:"well"`
	Problems []string      `json:"problems"`
	Notes    []string      `json:"notes"` // worth knowing, but no problems
	Relays   []RelayStatus `json:"relays"`
	// Replicas are the live processes.
	Replicas  []relays.Replica `json:"replicas"`
	Consumers int64            `json:"consumers"` // names that claim
	Positions int64            `json:"positions"` // partitions with a stored position
	// Consuming has every name that claims. Empty if only one relay was asked for.
	Consuming []ConsumerStatus `json:"consuming"`
	// Paused are the topics that an operator paused for a group. Orders are orders to resume at
	// another position that are not carried out yet.
	Paused []consumers.Pause `json:"paused"`
	Orders []consumers.Order `json:"orders"`
	// PausedTopics are the topics whose rows a relay does not publish. Paused is about consumers.
	PausedTopics []PausedTopic `json:"paused_topics"`
	// KafkaError is why it is unknown which topics of consumers exist. Empty: it is known, or no
	// brokers were given.
	KafkaError string `json:"kafka_error"`
	// Scheduled counts the scheduled messages.
	Scheduled Scheduled `json:"scheduled"`
	// Dedup is the space that the claims take. Null if only one relay was asked for.
	Dedup *dedup.Stats `json:"dedup"`
}

// RelayStatus is one reader of the outbox.
type RelayStatus struct {
	Relay string `json:"relay"`
	Shard int16  `json:"shard"`
	// Owner is the replica that publishes; empty if none does.
	Owner            string  `json:"owner"`
	Live             bool    `json:"live"` // the lease has not run out
	LeaseLeftSeconds float64 `json:"lease_left_seconds"`
	Epoch            int64   `json:"epoch"`
	// Waiting counts committed rows that are not published yet, without dead ones. It is exact up
	// to CountMax. Above that it is an estimate that tends to be too high.
	Waiting              int64    `json:"waiting"`
	WaitingExact         bool     `json:"waiting_exact"`
	OldestWaitingSeconds float64  `json:"oldest_waiting_seconds"`
	Published            int64    `json:"published"`
	RowsPerSecond        *float64 `json:"rows_per_second"` // null: not measured
	// Dead counts rows in outbox_dead by reason, at most CountMax of all.
	Dead  map[string]int64 `json:"dead"`
	Tick  int64            `json:"tick"`
	Floor int64            `json:"floor"`
}

// StatusOptions are the options of ReadStatus. The zero value works.
type StatusOptions struct {
	// Relay limits the status to one name, which is also reported if it never ran; consumers are
	// then left out. Default: all.
	Relay string
	// Before is an earlier reading, from which the rate is measured. Default: no rate.
	Before []Progress
	// ParkedMax is how many messages may be parked before the status is not well. Default: none.
	ParkedMax int64
	// AgeMax is how long a row may wait before the status is not well. Default: any time, as long
	// as a replica relays.
	AgeMax time.Duration
	// LagAgeMax is how late a consumer may be before the status is not well. Default: any time.
	LagAgeMax time.Duration
	// Missing returns those of the topics that do not exist. Default: it is not checked.
	Missing func(ctx context.Context, topics []string) ([]string, error)
}

// ReadStatus reads the state and judges it. db may be a standby: the result is then the state that
// the standby has received.
func ReadStatus(ctx context.Context, db operator.Querier, schema string, opts StatusOptions) (*Status, error) {
	all, err := ReadProgress(ctx, db, schema)
	if err != nil {
		return nil, err
	}
	s := &Status{
		Schema: schema, Problems: []string{}, Notes: []string{}, Replicas: []relays.Replica{}, Consuming: []ConsumerStatus{}, Paused: []consumers.Pause{}, Orders: []consumers.Order{},
	}
	for _, p := range named(all, opts.Relay) {
		relay, err := s.relay(ctx, db, schema, p)
		if err != nil {
			return nil, err
		}
		relay.RowsPerSecond = rate(opts.Before, p)
		s.Relays = append(s.Relays, relay)
	}
	if err := s.readDead(ctx, db, schema); err != nil {
		return nil, err
	}
	if err := s.readReplicas(ctx, db, schema, opts.Relay); err != nil {
		return nil, err
	}
	if err := db.QueryRow(ctx, inSchema(countConsumersSQL, schema)).Scan(&s.Consumers, &s.Positions); err != nil {
		return nil, fmt.Errorf("count consumers: %w", err)
	}
	if s.Scheduled, err = ReadScheduled(ctx, db, schema); err != nil {
		return nil, err
	}
	if err := s.readPausedTopics(ctx, db, schema, opts.Relay); err != nil {
		return nil, err
	}
	s.judge(opts.AgeMax)
	behind, err := readSequences(ctx, db, schema)
	switch {
	case pgerr.Is(err, pgerr.InsufficientPrivilege): // a role that only reads
		s.Notes = append(s.Notes, "unknown whether a sequence went back: this role may not execute outbox_sequence_state")
	case err != nil:
		return nil, err
	}
	if behind != "" {
		s.Problems = append(s.Problems, behind+": run \""+repairCommand+"\"")
	}
	s.judgeReplicas()
	if err := s.readConsumers(ctx, db, schema, opts.Missing); err != nil {
		return nil, err
	}
	if err := s.readBehind(ctx, db, schema, opts.LagAgeMax); err != nil {
		return nil, err
	}
	claims, err := dedup.New(dedup.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	if s.Dedup, err = claims.ReadStats(ctx, db); err != nil {
		return nil, err
	}
	s.judgeConsumers(opts.ParkedMax)
	s.Well = len(s.Problems) == 0
	return s, nil
}

// named picks a relay by its name. If it never ran, the result has one entry all the same, for
// which every row waits.
func named(all []Progress, name string) []Progress {
	if name != "" {
		all = slices.DeleteFunc(all, func(p Progress) bool { return p.relay != name })
	}
	if len(all) > 0 {
		return all
	}
	if name == "" {
		name = "default"
	}
	return []Progress{{relay: name, shards: 1, from: beginning(), next: beginning()}}
}

func (s *Status) relay(ctx context.Context, db operator.Querier, schema string, p Progress) (RelayStatus, error) {
	r := RelayStatus{
		Relay: p.relay, Shard: p.shard, Epoch: p.epoch, Published: p.published, Tick: p.tick, Floor: p.floor,
		Dead: map[string]int64{},
	}
	if r.Live = p.leaseLeft > 0; r.Live {
		r.Owner, r.LeaseLeftSeconds = p.owner, p.leaseLeft
	}
	if p.moved(systemIdentifier(ctx, db)) {
		p.aboveFloor()
		s.problem(r, "its progress belongs to another database cluster; when it runs, it publishes everything above the floor again")
	}
	b, err := p.backlog(ctx, db, schema, CountMax)
	if err != nil {
		return r, err
	}
	r.Waiting, r.WaitingExact, r.OldestWaitingSeconds = b.Waiting, b.Exact, b.OldestSeconds
	return r, nil
}

// rate is measured between two readings. A relay that is missing from the first one began at 0.
func rate(before []Progress, now Progress) *float64 {
	if len(before) == 0 {
		return nil
	}
	at, published := before[0].at, int64(0)
	for _, b := range before {
		if b.relay == now.relay && b.shard == now.shard {
			published = b.published
		}
	}
	if now.at <= at {
		return nil
	}
	perSecond := float64(now.published-published) / (now.at - at)
	return &perSecond
}

func (s *Status) readDead(ctx context.Context, db operator.Querier, schema string) error {
	rows, err := db.Query(ctx, inSchema(deadSQL, schema), CountMax)
	if err != nil {
		return fmt.Errorf("count dead rows: %w", err)
	}
	var relay, reason string
	var shard int16
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&relay, &shard, &reason, &n}, func() error {
		for i := range s.Relays {
			if s.Relays[i].Relay == relay && s.Relays[i].Shard == shard {
				s.Relays[i].Dead[reason] = n
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("count dead rows: %w", err)
	}
	return nil
}

// judge adds the problems. Each text names what to do.
func (s *Status) judge(ageMax time.Duration) {
	if overdue := s.Scheduled.Overdue; overdue > 0 && ageMax > 0 && s.Scheduled.OldestOverdueSeconds > ageMax.Seconds() {
		s.Problems = append(s.Problems, fmt.Sprintf("messages for later: %d due and not in the outbox, the oldest for longer than %v: start \"outbox-relay run\", or see its log", overdue, human.Duration(ageMax)))
	}
	if n := s.Scheduled.Refused; n > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("messages for later: %d refused by the outbox: read their column refused in outbox_scheduled, remove the cause and set it to NULL, or delete them", n))
	}
	ran := map[string]bool{}
	for _, r := range s.Relays {
		ran[r.Relay] = ran[r.Relay] || r.Epoch > 0
	}
	for _, r := range s.Relays {
		switch {
		case r.Waiting > 0 && !ran[r.Relay] && len(s.replicas(r.Relay)) == 0:
			s.Problems = append(s.Problems, fmt.Sprintf("relay %q: rows wait and it never ran: start \"outbox-relay run\"", r.Relay))
		case r.Waiting > 0 && r.Epoch == 0 && len(s.replicas(r.Relay)) == 0:
			s.problem(r, "rows wait and no replica ever took it: start \"outbox-relay run\"")
		case r.Waiting > 0 && !r.Live:
			s.problem(r, "%s", s.unheld(r))
		case r.Waiting > 0 && s.owner(r).Away():
			s.problem(r, "%s", waitsFor(s.owner(r)))
		case r.Waiting > 0 && ageMax > 0 && r.OldestWaitingSeconds > ageMax.Seconds():
			s.problem(r, "the oldest row has waited for longer than %v: see the log of %q, and \"outbox-relay doctor\"", ageMax, r.Owner)
		}
		s.judgeDead(r)
	}
}

func (s *Status) problem(r RelayStatus, format string, args ...any) {
	s.Problems = append(s.Problems, fmt.Sprintf("relay %q, shard %d: ", r.Relay, r.Shard)+message(format, args))
}

// statusAgeMax is how long a row may wait: the default of "status".
const statusAgeMax = time.Minute

// Pipeline reports the problems of ReadStatus as failures, and its notes as warnings.
func Pipeline(ctx context.Context, db operator.Querier, schema string, lagAgeMax time.Duration) (found []Finding) {
	const check, remedy = "status", "as the message says; outbox-relay status shows the numbers"
	s, err := ReadStatus(ctx, db, schema, StatusOptions{AgeMax: statusAgeMax, LagAgeMax: lagAgeMax})
	if err != nil {
		return broken(check, err)
	}
	for _, problem := range s.Problems {
		found = append(found, fail(check, remedy, "%s", problem))
	}
	for _, note := range s.Notes {
		found = append(found, warn(check, remedy, "%s", note))
	}
	if len(found) == 0 {
		found = append(found, ok(check, "well, with %s and %s", human.Count(len(s.Replicas), "replica"), human.Count(len(s.Consuming), "consumer")))
	}
	return found
}
