package pipeline

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/relays"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgerr"
	"github.com/effectonce/effectonce/migrations"
	"github.com/effectonce/effectonce/relay"
)

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
	// Consuming has every name that claims.
	Consuming []ConsumerStatus `json:"consuming"`
	// Paused are the topics that an operator paused for a group. Requests are those to resume at
	// another position that are not done yet.
	Paused   []consumers.Pause   `json:"paused"`
	Requests []consumers.Request `json:"resume_requests"`
	// PausedTopics are the topics whose rows a relay does not publish. Paused is about consumers.
	PausedTopics []PausedTopic `json:"paused_topics"`
	// KafkaError is why it is unknown which topics of consumers exist. Empty: it is known, or no
	// brokers were given.
	KafkaError string `json:"kafka_error"`
	// Scheduled counts the scheduled messages.
	Scheduled Scheduled `json:"scheduled"`
	// Dedup is the space that the claims take.
	Dedup *dedup.Stats `json:"dedup"`

	dead map[string]map[string]int64 // rows in outbox_dead by relay and reason
}

// RelayStatus is one shard of a reader of the outbox.
type RelayStatus struct {
	Progress
	RowsPerSecond *float64 `json:"rows_per_second"` // null: not measured
	// Dead counts rows in outbox_dead by reason; not exact: there are more, of the relay CountMax were
	// counted.
	Dead      map[string]int64 `json:"dead"`
	DeadExact bool             `json:"dead_exact"`
}

// StatusOptions are the options of ReadStatus. The zero value works.
type StatusOptions struct {
	// Relay limits the relays to one name, which is also reported if it never ran. Default: all.
	Relay string
	// ParkedMax is how many messages may be parked before the status is not well. Default: none.
	ParkedMax int
	// AgeMax is how long a row may wait before the status is not well. Default: any time, as long
	// as a replica relays.
	AgeMax time.Duration
	// LagAgeMax is how late a consumer may be before the status is not well. Default: any time.
	LagAgeMax time.Duration
	// Missing returns those of the topics that do not exist. Default: it is not checked.
	Missing func(ctx context.Context, topics []string) ([]string, error)
	// Open describes a transaction that holds back records of a partition. Default: it is not asked for.
	Open func(ctx context.Context, topic string, partition int32) error
}

// ReadStatus reads the state and judges it. db may be a standby: the result is then the state that
// the standby has received.
func ReadStatus(ctx context.Context, db operator.Querier, schema string, opts StatusOptions) (*Status, error) {
	all, err := ShardsOf(ctx, db, schema, opts.Relay)
	if err == nil {
		err = Count(ctx, db, schema, all, CountMax)
	}
	if err != nil {
		return nil, err
	}
	s := &Status{Schema: schema, Problems: []string{}, Notes: []string{}, dead: map[string]map[string]int64{}}
	for _, p := range all {
		s.Relays = append(s.Relays, RelayStatus{Progress: p, Dead: map[string]int64{}, DeadExact: true})
	}
	if err := s.readDead(ctx, db, schema); err != nil {
		return nil, err
	}
	if s.Replicas, err = relays.Replicas(ctx, db, schema); err != nil {
		return nil, err
	}
	s.Replicas = slices.DeleteFunc(s.Replicas, func(r relays.Replica) bool { return opts.Relay != "" && r.Relay != opts.Relay })
	if err := db.QueryRow(ctx, migrations.InSchema(countConsumersSQL, schema)).Scan(&s.Consumers, &s.Positions); err != nil {
		return nil, fmt.Errorf("count consumers: %w", err)
	}
	if s.Scheduled, err = ReadScheduled(ctx, db, schema); err != nil {
		return nil, err
	}
	if err := s.readPausedTopics(ctx, db, schema, opts.Relay); err != nil {
		return nil, err
	}
	s.judge(opts.AgeMax)
	sequences, err := relay.ReadSequences(ctx, db, schema)
	switch {
	case pgerr.Is(err, pgerr.InsufficientPrivilege): // a role that only reads
		s.Notes = append(s.Notes, "unknown whether a sequence went back: this role may not execute outbox_sequence_state")
	case err != nil:
		return nil, err
	}
	if behind := sequencesBehind(sequences); behind != "" {
		s.Problems = append(s.Problems, behind+": run \"outbox-relay repair\"")
	}
	s.judgeReplicas()
	if err := s.readConsumers(ctx, db, schema, opts.Missing); err != nil {
		return nil, err
	}
	if err := s.readBehind(ctx, db, schema, opts.LagAgeMax, opts.Open); err != nil {
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

// MeasureRates sets the rate of each shard: of what was published between the status and now.
func (s *Status) MeasureRates(now []Progress) {
	for i := range s.Relays {
		before := &s.Relays[i]
		for _, p := range now {
			if p.Relay == before.Relay && p.Shard == before.Shard && p.At > before.At {
				before.RowsPerSecond = new(float64(p.Published-before.Published) / (p.At - before.At))
			}
		}
	}
}

func (s *Status) readDead(ctx context.Context, db operator.Querier, schema string) error {
	for _, r := range s.Relays {
		s.dead[r.Relay] = map[string]int64{}
	}
	var name, reason string
	var shard int16
	var n int64
	err := operator.Each(ctx, db, "count dead rows", schema, deadSQL, []any{slices.Collect(maps.Keys(s.dead)), CountMax}, []any{&name, &shard, &reason, &n}, func() error {
		s.dead[name][reason] += n
		for i := range s.Relays {
			if s.Relays[i].Relay == name && s.Relays[i].Shard == shard {
				s.Relays[i].Dead[reason] = n
			}
		}
		return nil
	})
	for i := range s.Relays {
		s.Relays[i].DeadExact = sum(s.dead[s.Relays[i].Relay]) < CountMax
	}
	return err
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
	type trouble struct{ relay, problem string }
	shards := map[trouble][]string{}
	var order []trouble
	for _, r := range s.Relays {
		for _, problem := range []string{movedProblem(r), s.waitingProblem(r, ran[r.Relay], ageMax), s.deadProblem(r)} {
			if problem == "" {
				continue
			}
			t := trouble{r.Relay, problem}
			if shards[t] == nil {
				order = append(order, t)
			}
			shards[t] = append(shards[t], strconv.Itoa(int(r.Shard)))
		}
	}
	for _, t := range order {
		which := ""
		if n := len(shards[t]); n > 1 && ran[t.relay] {
			which = fmt.Sprintf(", %d shards (%s)", n, terminal.Clip(strings.Join(shards[t], ", "), 60))
		} else if ran[t.relay] {
			which = ", shard " + shards[t][0]
		}
		s.Problems = append(s.Problems, fmt.Sprintf("relay %q%s: %s", t.relay, which, t.problem))
	}
}

func movedProblem(r RelayStatus) string {
	if r.Moved {
		return "its progress belongs to another database cluster; when it runs, it publishes everything above the floor again"
	}
	return ""
}

// waitingProblem says why rows wait for a shard, if they should not.
func (s *Status) waitingProblem(r RelayStatus, ran bool, ageMax time.Duration) string {
	alone := len(s.replicas(r.Relay)) == 0
	switch {
	case r.Waiting == 0:
	case !ran && alone:
		return "rows wait and it never ran: start \"outbox-relay run\""
	case r.Epoch == 0 && alone:
		return "rows wait and no replica ever took it: start \"outbox-relay run\""
	case r.Owner == "":
		return s.unheld(r)
	case s.owner(r).Away():
		return waitsFor(s.owner(r))
	case ageMax > 0 && r.OldestWaitingSeconds > ageMax.Seconds():
		return fmt.Sprintf("the oldest row has waited for longer than %v: see the log of %q, and \"outbox-relay doctor\"", ageMax, r.Owner)
	}
	return ""
}

// PausedTopic is a topic whose rows wait until an operator resumes it.
type PausedTopic struct {
	Relay    string    `json:"relay"`
	Topic    string    `json:"topic"`
	Rows     int64     `json:"rows"` // rows that wait in outbox_dead, at most CountMax
	Who      string    `json:"who"`
	Why      string    `json:"why"`
	PausedAt time.Time `json:"paused_at"`
}

// readPausedTopics reads the paused topics, also those without waiting rows: their next row waits.
func (s *Status) readPausedTopics(ctx context.Context, db operator.Querier, schema, name string) (err error) {
	s.PausedTopics, err = operator.Rows(ctx, db, "read paused topics", schema, pausedTopicsSQL, pgx.RowToStructByPos[PausedTopic], name, CountMax)
	if err != nil {
		return err
	}
	for _, p := range s.PausedTopics {
		waiting := "none of its rows wait"
		if p.Rows > 0 {
			waiting = human.Count(p.Rows, "row") + " in outbox_dead"
		}
		s.Notes = append(s.Notes, fmt.Sprintf("relay %q: topic %s is paused since %s by %s (%s), %s: to end the pause, run \"outbox-relay topics resume %s --relay %s\"",
			p.Relay, oneLine(p.Topic), p.PausedAt.UTC().Format(time.RFC3339), oneLine(p.Who), oneLine(p.Why), waiting, human.Word(p.Topic), human.Word(p.Relay)))
	}
	return nil
}

// deadProblem says what to do about a relay's rows in outbox_dead, the same for each shard that has some.
// Rows of a paused topic, and rows behind them, only need the pause to end.
func (s *Status) deadProblem(r RelayStatus) string {
	all := s.dead[r.Relay]
	dead, paused := sum(all), all["paused"]
	stopped := slices.ContainsFunc(s.PausedTopics, func(p PausedTopic) bool { return p.Relay == r.Relay })
	switch {
	case sum(r.Dead) == 0:
	// The pause has ended: they are published by themselves.
	case !stopped && paused > 0 && paused+all["behind"] == dead:
	case paused > 0 && paused+all["behind"] == dead:
		return fmt.Sprintf("%s%s of paused topics in outbox_dead: the notes have the commands that publish them", atLeast(r.DeadExact), human.Count(dead, "row"))
	case paused > 0:
		return fmt.Sprintf("%s%s in outbox_dead: see \"outbox-relay dead list\"; %d more of paused topics: the notes have the commands that publish them", atLeast(r.DeadExact), human.Count(dead-paused, "row"), paused)
	default:
		return fmt.Sprintf("%s%s in outbox_dead: see \"outbox-relay dead list\"", atLeast(r.DeadExact), human.Count(dead, "row"))
	}
	return ""
}

// replicas returns the live replicas of a relay.
func (s *Status) replicas(name string) []relays.Replica {
	return slices.DeleteFunc(slices.Clone(s.Replicas), func(r relays.Replica) bool { return r.Relay != name })
}

// owner returns the replica that holds a shard, or the zero value if nothing is known of it.
func (s *Status) owner(of RelayStatus) relays.Replica {
	for _, r := range s.Replicas {
		if r.Relay == of.Relay && r.Owner == of.Owner {
			return r
		}
	}
	return relays.Replica{}
}

// unheld explains why no replica holds a shard.
func (s *Status) unheld(of RelayStatus) string {
	alive := s.replicas(of.Relay)
	if len(alive) == 0 {
		return "rows wait and no replica runs: start \"outbox-relay run\""
	}
	if i := slices.IndexFunc(alive, relays.Replica.Stuck); i >= 0 {
		return fmt.Sprintf("rows wait and no replica holds its lease: %q is stuck: restart it", alive[i].Owner)
	}
	if i := slices.IndexFunc(alive, relays.Replica.Away); i >= 0 {
		return waitsFor(alive[i])
	}
	return fmt.Sprintf("rows wait and no replica holds its lease, though %d run: see the log of %q", len(alive), alive[0].Owner)
}

// waitsFor says why the rows of a replica wait.
func waitsFor(r relays.Replica) string {
	return fmt.Sprintf("rows wait, since Kafka or the receiver takes none from %q (%s): make it reachable, then the relay publishes automatically", r.Owner, r.Problem)
}

// judgeReplicas reports replicas that cannot publish. A replica that waits while no rows do is a
// note: nothing is late.
func (s *Status) judgeReplicas() {
	for _, r := range s.Replicas {
		switch {
		case r.Stuck():
			s.Problems = append(s.Problems, fmt.Sprintf("relay %q: replica %q is stuck: restart it (%s)", r.Relay, r.Owner, r.Problem))
		case r.Away():
			s.Notes = append(s.Notes, fmt.Sprintf("relay %q: Kafka or the receiver takes no rows from replica %q (%s)", r.Relay, r.Owner, r.Problem))
		}
	}
}

// Scheduled are the scheduled messages that are not in the outbox yet.
type Scheduled struct {
	Count        int64 `json:"count"` // at most CountMax
	CountExact   bool  `json:"count_exact"`
	Overdue      int64 `json:"overdue"` // due and still there, at most CountMax
	OverdueExact bool  `json:"overdue_exact"`
	Refused      int64 `json:"refused"` // by the outbox, see their column refused; at most CountMax
	// OldestOverdueSeconds is the time since the first overdue or refused one was due; 0: there is none.
	OldestOverdueSeconds float64 `json:"oldest_overdue_seconds"`
}

// ReadScheduled counts scheduled messages.
func ReadScheduled(ctx context.Context, db operator.Querier, schema string) (Scheduled, error) {
	var s Scheduled
	row := db.QueryRow(ctx, migrations.InSchema(scheduledSQL, schema), CountMax+1)
	if err := row.Scan(&s.Count, &s.Overdue, &s.Refused, &s.OldestOverdueSeconds); err != nil {
		return s, fmt.Errorf("count messages for later: %w", err)
	}
	s.CountExact, s.OverdueExact = s.Count <= CountMax, s.Overdue <= CountMax
	s.Count, s.Overdue, s.Refused = min(s.Count, CountMax), min(s.Overdue, CountMax), min(s.Refused, CountMax)
	return s, nil
}

// sequencesBehind describes how a sequence of the outbox is behind the numbers that rows or ticks
// have. Empty: none is.
func sequencesBehind(s relay.Sequences) string {
	const cause = "caused by a copy by logical replication, TRUNCATE … RESTART IDENTITY, or setval"
	switch {
	case !s.Behind:
		return ""
	case s.SeqLast < s.SeqKnown:
		return fmt.Sprintf("the sequence of outbox.seq is at %d, and %d was given before: rows would be taken for published (%s)", s.SeqLast, s.SeqKnown, cause)
	case s.Reused != nil:
		return fmt.Sprintf("the row with seq %d has a number that was given before: it would be taken for published (%s)", *s.Reused, cause)
	}
	return fmt.Sprintf("the sequence of outbox_ticks.tick is at %d, and %d was given before (%s)", s.TickLast, s.TickKnown, cause)
}
