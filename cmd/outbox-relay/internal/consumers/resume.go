package consumers

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/migrations"
)

// Where a partition resumes, other than at an offset: values of
// consumer_positions.resume_at.
const (
	AtEarliest int64 = -2
	AtLatest   int64 = -1
)

// ParseAt parses earliest, latest or an offset.
func ParseAt(text string) (int64, error) {
	switch text {
	case "earliest":
		return AtEarliest, nil
	case "latest":
		return AtLatest, nil
	}
	at, err := strconv.ParseInt(text, 10, 64)
	if err != nil || at < 0 {
		return 0, errors.New("want earliest, latest or an offset")
	}
	return at, nil
}

// AtText is the inverse of ParseAt.
func AtText(at int64) string {
	switch at {
	case AtEarliest:
		return "earliest"
	case AtLatest:
		return "latest"
	}
	return strconv.FormatInt(at, 10)
}

// Partition is a partition for which a group has a position.
type Partition struct {
	Group     string `json:"group"`
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
}

func (p Partition) String() string {
	return fmt.Sprintf("%s/%d of group %s", p.Topic, p.Partition, p.Group)
}

// Request asks the holder of a partition to resume at another position. It is not done yet.
type Request struct {
	Partition

	Position *int64 `json:"position"` // null: nothing is handled yet
	ResumeAt int64  `json:"resume_at"`
	Holder   string `json:"holder"` // empty: the next holder follows it
}

// Requests returns the requests that are not done, at most 1000.
func Requests(ctx context.Context, db operator.Querier, schema string) ([]Request, error) {
	return operator.Rows(ctx, db, "read requests to resume", schema, requestsSQL, pgx.RowToStructByPos[Request])
}

// Resumption is a request and what it replaces.
type Resumption struct {
	Request

	Before  *int64 `json:"before"`  // an earlier request that is not done
	Trouble string `json:"trouble"` // why the partition does not move; empty: it does
	Effect  string `json:"effect"`  // what the request skips or repeats
	DryRun  bool   `json:"dry_run"`
}

// ResumeAt asks the holder of a partition, or the next one, to continue at an offset, at
// AtEarliest or at AtLatest. With an extent, an offset outside of it is refused. A dry run only
// returns what the request would do.
func ResumeAt(
	ctx context.Context, db operator.Beginner, schema string, by operator.By, p Partition, at int64, extent *topicscan.Span, dryRun bool,
) (*Resumption, error) {
	r := &Resumption{Request: Request{Partition: p, ResumeAt: at}, DryRun: dryRun}
	err := change(ctx, db, "resume "+p.String(), func(tx pgx.Tx) error {
		if err := r.lock(ctx, tx, schema); err != nil {
			return err
		}
		if err := within(at, extent); err != nil {
			return err
		}
		if r.Effect = effect(r.Position, at, extent); dryRun {
			return nil
		}
		return r.store(ctx, tx, schema, by, &at, new(AtText(at)))
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Cancel removes a request that is not done yet. canceled is false if there was none.
func Cancel(ctx context.Context, db operator.Beginner, schema string, by operator.By, p Partition) (canceled bool, err error) {
	err = change(ctx, db, "resume "+p.String(), func(tx pgx.Tx) error {
		r := &Resumption{Request: Request{Partition: p}}
		if err := r.lock(ctx, tx, schema); err != nil {
			return err
		}
		if canceled = r.Before != nil; !canceled {
			return nil
		}
		return r.store(ctx, tx, schema, by, nil, nil)
	})
	return canceled, err
}

// store stores and records where the partition resumes; nil: where it is.
func (r *Resumption) store(ctx context.Context, tx pgx.Tx, schema string, by operator.By, at *int64, text *string) error {
	p := r.Partition
	if _, err := tx.Exec(ctx, migrations.InSchema(resumeAtSQL, schema), p.Group, p.Topic, p.Partition, at); err != nil {
		return err
	}
	return operator.Note(ctx, tx, schema, by, "consumer.resume_at", map[string]any{
		"group": p.Group, "topic": p.Topic, "partition": p.Partition, "resume_at": text, "position": r.Position, "before": r.Before,
	})
}

// lock reads and locks the partition until the transaction ends.
func (r *Resumption) lock(ctx context.Context, tx pgx.Tx, schema string) error {
	p := r.Partition
	row := tx.QueryRow(ctx, migrations.InSchema(positionSQL, schema), p.Group, p.Topic, p.Partition)
	err := row.Scan(&r.Position, &r.Before, &r.Holder, &r.Trouble)
	if !errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	if err := knows(ctx, tx, schema, p.Group, p.Topic); err != nil {
		return err
	}
	numbers, err := operator.Rows(ctx, tx, "read its partitions", schema, partitionsSQL, pgx.RowTo[int32], p.Group, p.Topic)
	if err != nil {
		return err
	}
	names := make([]string, len(numbers))
	for i, n := range numbers {
		names[i] = strconv.Itoa(int(n))
	}
	return fmt.Errorf("no position is stored for it, the partition is %w: %s", ErrUnknown, thereIs(names))
}

// within refuses an offset at which there is nothing to resume.
func within(at int64, extent *topicscan.Span) error {
	switch {
	case extent == nil || at < 0:
		return nil
	case at < extent.Start:
		return fmt.Errorf("offset %d is deleted, the first one is %d: use that, or earliest", at, extent.Start)
	case at > extent.End:
		return fmt.Errorf("offset %d is behind the end of the partition, %d: use that, or latest", at, extent.End)
	}
	return nil
}

// What a request does to messages.
const (
	skipped  = "they are skipped and have no effect, unless the group is rewound to before them"
	repeated = "they are delivered again: those with a claim are dropped as duplicates, those older than the forgotten claims are parked as expired, " +
		"and a consumer that deduplicates by position handles all of them a second time"
)

// effect describes what a request skips or repeats, as far as that is known.
func effect(position *int64, at int64, extent *topicscan.Span) string {
	if position == nil {
		return "nothing of the partition is handled yet: it begins there, whatever offset Kafka has"
	}
	switch { // a known place is compared like an offset
	case extent != nil && at == AtEarliest:
		at = extent.Start
	case extent != nil && at == AtLatest:
		at = extent.End
	}
	switch {
	case at == AtEarliest:
		return fmt.Sprintf("messages from the start of the partition to the position, %d: %s", *position, repeated)
	case at == AtLatest:
		return fmt.Sprintf("messages from the position, %d, to the end of the partition: %s", *position, skipped)
	case at > *position:
		return fmt.Sprintf("%d offsets, from the position, %d, to %d: %s", at-*position, *position, at-1, skipped)
	case at < *position:
		return fmt.Sprintf("%d offsets, from %d to %d: %s", *position-at, at, *position-1, repeated)
	}
	return "the partition resumes at its position: nothing is skipped, nothing is repeated"
}
