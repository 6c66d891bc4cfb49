package trace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/consumers"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
)

// Positions are the positions of relays and consumers.
type Positions struct {
	Shards    []pipeline.Progress `json:"shards"`
	Consumers []Position          `json:"consumers"`
	// Paused are the topics that an operator paused for a group.
	Paused []consumers.Pause `json:"paused"`
	// MissingTopics are the topics of registered consumers that do not exist. Empty if Kafka was
	// not asked.
	MissingTopics []MissingTopic `json:"missing_topics"`
	// KafkaError is why the ends of topics, or the members of groups, are unknown. Empty: they are
	// known, or there are no brokers to ask.
	KafkaError string `json:"kafka_error"`
}

// Position is the position of a consumer group in a partition.
type Position struct {
	Group      string     `json:"group"`
	Topic      string     `json:"topic"`
	Partition  int32      `json:"partition"`
	NextOffset *int64     `json:"next_offset"`    // null: nothing handled yet
	Start      *int64     `db:"-" json:"start"`   // first offset that Kafka has; null: unknown
	End        *int64     `db:"-" json:"end"`     // offset of the next record; null: unknown
	Lag        *int64     `db:"-" json:"lag"`     // records that Kafka has from the position on
	Deleted    *int64     `db:"-" json:"deleted"` // records from the position on that Kafka has deleted
	Epoch      int64      `json:"epoch"`
	Owner      string     `json:"owner"`          // its last holder
	Members    *int       `db:"-" json:"members"` // of the group, as Kafka knows them; null: unknown
	Released   bool       `json:"released"`       // its holder released it in good order
	RecordTime *time.Time `json:"record_time"`
	CaughtUpAt *time.Time `json:"caught_up_at"`
	AgeSeconds float64    `json:"age_seconds"` // since it moved
	Trouble    string     `json:"trouble"`
	Paused     bool       `json:"paused"` // by an operator
	// Where an operator requested to resume, which is not done yet; -2: earliest, -1: latest
	ResumeAt *int64 `json:"resume_at"`
}

// MissingTopic is a topic that a consumer asked for and Kafka does not have.
type MissingTopic struct {
	Consumer string `json:"consumer"`
	Group    string `json:"group"`
	Topic    string `json:"topic"`
}

// PositionFilter selects positions; a nil field does not filter.
type PositionFilter struct {
	Relay, Group, Topic *string
}

// ReadPositions reads all positions. Without kafka (nil) the ends of topics are unknown. A Kafka
// error is part of the result: what the database knows is shown even if no broker answers.
func ReadPositions(ctx context.Context, db operator.Querier, kafka *Kafka, schema string, filter PositionFilter) (*Positions, error) {
	p := &Positions{MissingTopics: []MissingTopic{}}
	var err error
	if p.Shards, err = pipeline.Shards(ctx, db, schema, filter.Relay); err != nil {
		return nil, err
	}
	if err = pipeline.Count(ctx, db, schema, p.Shards, pipeline.CountMax); err != nil {
		return nil, err
	}
	p.Consumers, err = operator.Rows(ctx, db, "read positions", schema, positionsSQL, pgx.RowToStructByPos[Position], filter.Group, filter.Topic)
	if err != nil {
		return nil, err
	}
	if p.Paused, err = consumers.Pauses(ctx, db, schema, filter.Group, filter.Topic); err != nil {
		return nil, err
	}
	if kafka != nil {
		err := p.readEnds(ctx, kafka)
		if err == nil {
			err = p.readMissing(ctx, db, kafka, schema, filter)
		}
		if err == nil { // last: a coordinator may be unavailable while the partitions are available
			err = p.readMembers(ctx, kafka)
		}
		if err != nil {
			p.KafkaError = err.Error()
		}
	}
	return p, nil
}

// readMissing checks the topics of registered consumers: a topic that never existed has no
// position.
func (p *Positions) readMissing(ctx context.Context, db operator.Querier, kafka *Kafka, schema string, filter PositionFilter) error {
	registered, err := consumers.Registered(ctx, db, schema)
	if err != nil {
		return err
	}
	wanted := []MissingTopic{}
	var names []string
	for _, c := range registered {
		for _, topic := range c.Topics {
			if (filter.Group == nil || *filter.Group == c.Group) && (filter.Topic == nil || *filter.Topic == topic) {
				wanted, names = append(wanted, MissingTopic{c.Name, c.Group, topic}), append(names, topic)
			}
		}
	}
	absent, err := consumers.Missing(ctx, kadm.NewClient(kafka.Client), names)
	if err != nil {
		return err
	}
	p.MissingTopics = slices.DeleteFunc(wanted, func(m MissingTopic) bool { return !slices.Contains(absent, m.Topic) })
	return nil
}

// readMembers counts the members of each group. A row alone does not show whether its holder lives:
// it keeps the name of a holder that was killed.
func (p *Positions) readMembers(ctx context.Context, kafka *Kafka) error {
	var names []string
	for _, c := range p.Consumers {
		if !slices.Contains(names, c.Group) {
			names = append(names, c.Group)
		}
	}
	if len(names) == 0 {
		return nil
	}
	var groups kadm.DescribedGroups
	err := consumers.AskCoordinators(ctx, func() (err error) {
		if groups, err = kadm.NewClient(kafka.Client).DescribeGroups(ctx, names...); err != nil {
			return err
		}
		for _, g := range groups {
			if consumers.CoordinatorStarts(g.Err) {
				return g.Err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("ask for the members of groups: %w", err)
	}
	for i := range p.Consumers {
		c := &p.Consumers[i]
		switch g, listed := groups[c.Group]; {
		case !listed || errors.Is(g.Err, kerr.GroupIDNotFound):
			c.Members = new(int)
		case g.Err != nil: // for example without the right to describe it: unknown
		default:
			c.Members = new(len(g.Members))
		}
	}
	return nil
}

func (p *Positions) readEnds(ctx context.Context, kafka *Kafka) error {
	extents := map[string]topicscan.Extent{}
	for i := range p.Consumers {
		c := &p.Consumers[i]
		if extents[c.Topic] == nil {
			found, err := topicscan.ExtentOf(ctx, kafka.Client, time.Time{}, c.Topic)
			if err != nil {
				return err
			}
			extents[c.Topic] = found
		}
		span, known := extents[c.Topic][c.Partition]
		if !known {
			continue
		}
		c.Start, c.End = &span.Start, &span.End
		if c.NextOffset != nil {
			c.Lag, c.Deleted = new(max(0, span.End-max(*c.NextOffset, span.Start))), new(max(0, span.Start-*c.NextOffset))
		}
	}
	return nil
}
