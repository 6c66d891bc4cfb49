package trace

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	recordof "github.com/effectonce/effectonce/internal/record"
	"github.com/effectonce/effectonce/outbox"
)

const (
	pageRows = 5000
	// progressEvery is the number of records after which progress is reported.
	progressEvery = 10_000
)

// begin reads what has to be found later, before it reads any topic.
func (r *run) begin(ctx context.Context) error {
	var since time.Time
	if err := r.db.QueryRow(ctx, sinceSQL, r.Since).Scan(&r.now, &since); err != nil {
		return fmt.Errorf("read the database's clock: %w", err)
	}
	if r.Since > 0 {
		r.report.Since = &since
	}
	var err error
	if r.cut, err = pipeline.ReadCut(ctx, r.db, r.Schema, r.Relay); err != nil {
		return err
	}
	if r.unpublished, err = operator.Rows(ctx, r.db, "read dead rows", r.Schema, unpublishedSQL, pgx.RowTo[int64], r.Relay); err != nil {
		return err
	}
	if r.Group != "" {
		if r.claims, err = readClaims(ctx, r.db, r.Schema, r.Group); err != nil {
			return err
		}
	}
	for _, topic := range r.Topics {
		if _, err := r.number(ctx, r.TopicPrefix+topic); err != nil {
			return err
		}
	}
	return nil
}

// readRows reads the outbox page by page, so that no snapshot is held for long.
func (r *run) readRows(ctx context.Context) error {
	var last int64
	for {
		n := 0
		var item rowItem
		var topic string
		var key []byte
		var created time.Time
		var headers *string
		into := []any{&item.Seq, &item.ID, &topic, &key, &created, &headers, &item.Published}
		err := operator.Each(ctx, r.db, "read the outbox", r.Schema, outboxSQL, r.cut.Args(last, r.report.Since, r.Topics, pageRows), into, func() (err error) {
			n++
			last = item.Seq
			topic := r.TopicPrefix + topic
			if item.Topic, err = r.number(ctx, topic); err != nil {
				return err
			}
			item.Partition, item.Key, item.Created, item.Hash = partitionAsked(headers), keyHash(topic, key), created.UnixMicro(), HashOf(key)
			if _, dead := slices.BinarySearch(r.unpublished, item.Seq); dead {
				item.Published = false
			}
			r.report.Rows++
			if item.Published {
				r.report.Published++
			}
			return r.rows.add(item.ID[15], item)
		})
		if err != nil {
			return err
		}
		r.Progress("rows", r.report.Rows)
		if n < pageRows {
			return nil
		}
	}
}

// partitionAsked returns the partition that a row asks for, or -1. A row whose headers cannot be
// read is dead.
func partitionAsked(headers *string) int32 {
	if headers == nil {
		return -1
	}
	decoded, _ := outbox.DecodeHeaders([]byte(*headers))
	if _, p, err := recordof.TakePartition(decoded); err == nil && p != nil {
		return *p
	}
	return -1
}

// readTopics reads every topic up to the end that it had when a row or an option first named it.
func (r *run) readTopics(ctx context.Context) error {
	for topic, extent := range r.extents {
		for p, span := range extent {
			if span.Start > 0 && span.From == span.Start {
				r.oldest[partition{r.numbers[topic], p}] = math.MaxInt64 // unless a record says otherwise
			}
		}
	}
	err := topicscan.Scan(ctx, r.kafka.Options, r.extents, func(record *kgo.Record) error { return r.addRecord(ctx, record) })
	if err != nil {
		return fmt.Errorf("read the topics: %w", err)
	}
	r.Progress("records", r.report.Records)
	return r.flushClaims(ctx)
}

func (r *run) addRecord(ctx context.Context, record *kgo.Record) error {
	if r.report.Records++; r.report.Records%progressEvery == 0 {
		r.Progress("records", r.report.Records)
	}
	topic := r.numbers[record.Topic]
	at := partition{topic, record.Partition}
	if _, some := r.first[at]; !some {
		r.first[at] = record.Timestamp.UnixMicro()
	}
	if oldest, some := r.oldest[at]; some && oldest == math.MaxInt64 {
		r.oldest[at] = record.Timestamp.UnixMicro()
	}
	if r.claims != nil {
		if err := r.claim(ctx, record); err != nil {
			return err
		}
	}
	id, ours := messageID(record)
	if !ours {
		r.report.Foreign++
		return nil
	}
	return r.records.add(id[15], recordItem{ID: id, Offset: record.Offset, Topic: topic, Partition: record.Partition})
}

// messageID returns the ID that the relay wrote.
func messageID(record *kgo.Record) (uuid.UUID, bool) {
	for _, h := range record.Headers {
		if h.Key == outbox.HeaderMessageID {
			id, err := uuid.ParseBytes(h.Value)
			return id, err == nil
		}
	}
	return uuid.UUID{}, false
}
