package verify

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/internal/checker"
	"github.com/effectonce/effectonce/internal/inspect"
	"github.com/effectonce/effectonce/relay"
)

// Options of Run.
type Options struct {
	Schema string
	Relay  string
	// Group whose claims are looked at. Empty: none.
	Group string
	// Since is how old rows and records may be. Zero: any age.
	Since time.Duration
	// Topics to look at, as rows name them. Default: all that rows name.
	Topics []string
	// Routes of the relay. Default: each row goes into the topic that it names.
	Routes relay.Routes
	// Examples is how many of each finding are put into words.
	Examples int
	// DuplicatesAllowed: a record that is there twice is counted, and is well.
	DuplicatesAllowed bool
	// Progress is called now and then. Optional.
	Progress func(phase string, done int64)
}

// Finding is a kind of fault.
type Finding struct {
	Count    int64    `json:"count"`
	Examples []string `json:"examples"`
}

// Report is what Run found.
type Report struct {
	Well      bool       `json:"well"`
	Relay     string     `json:"relay"`
	Group     string     `json:"group"` // empty: claims were not looked at
	Since     *time.Time `json:"since"` // null: everything
	Topics    []string   `json:"topics"`
	Rows      int64      `json:"rows"`      // of the outbox
	Published int64      `json:"published"` // of these
	Records   int64      `json:"records"`   // of the topics
	Foreign   int64      `json:"foreign"`   // of these: without an ID of the relay's
	Claimed   int64      `json:"claimed"`   // records whose claim was looked for
	// Expired counts published rows that are in no topic, and were written before the first record that it
	// still has: Kafka may have deleted them.
	Expired int64 `json:"expired"`
	// Dropped counts published rows that a rule of Routes drops.
	Dropped int64 `json:"dropped"`
	// Moved counts keys with records in several partitions, as after partitions were added. Their order is
	// checked within each.
	Moved int64 `json:"moved_keys"`

	Missing    Finding `json:"missing"`      // published, and not in the topic
	Duplicates Finding `json:"duplicates"`   // records beyond the first of their ID and topic
	OutOfOrder Finding `json:"out_of_order"` // first records that come behind a later row of their key
	Unclaimed  Finding `json:"unclaimed"`    // records before the group's position without a claim
}

// rowItem, recordItem and firstItem are what is known of a row, of a record, and of the first record of a row.
type (
	rowItem struct {
		ID        [16]byte
		Key       [16]byte // hash of topic and key; zero: no key
		Seq       int64
		Created   int64 // in microseconds
		Topic     int32
		Partition int32 // where the relay puts the key; -1: not known
		Published bool
	}
	recordItem struct {
		ID        [16]byte
		Offset    int64
		Topic     int32
		Partition int32
	}
	firstItem struct {
		Key       [16]byte
		Seq       int64
		Offset    int64
		Topic     int32
		Partition int32
	}
)

type run struct {
	Options
	db     inspect.Querier
	kafka  *inspect.Kafka
	report *Report

	cut         *inspect.Cut
	unpublished []int64 // sorted
	now         time.Time
	claims      *claims

	router  *relay.Router
	numbers map[string]int32 // of topics
	names   []string
	extents map[string]checker.Extent
	oldest  map[partition]int64 // time of the first record that is left, in microseconds, where some are gone

	rows    *spill[rowItem]
	records *spill[recordItem]
	firsts  *spill[firstItem]
}

type partition struct{ topic, partition int32 }

// Run compares. It changes nothing.
func Run(ctx context.Context, db inspect.Querier, kafka *inspect.Kafka, opts Options) (_ *Report, err error) {
	router, err := opts.Routes.Router()
	if err != nil {
		return nil, fmt.Errorf("routes: %w", err)
	}
	dir, err := os.MkdirTemp("", "outbox-relay-verify-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for temporary files: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r := &run{
		Options: opts, router: router, db: db, kafka: kafka, numbers: map[string]int32{}, extents: map[string]checker.Extent{}, oldest: map[partition]int64{},
		report: &Report{Relay: opts.Relay, Group: opts.Group, Topics: []string{}},
	}
	for _, f := range r.findings() {
		f.Examples = []string{}
	}
	if r.rows, err = newSpill[rowItem](dir, "rows"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.rows.close()) }()
	if r.records, err = newSpill[recordItem](dir, "records"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.records.close()) }()
	if r.firsts, err = newSpill[firstItem](dir, "firsts"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.firsts.close()) }()
	for _, step := range []func(context.Context) error{r.begin, r.readRows, r.readTopics, r.judgeRecords, r.judgeOrder} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	rep := r.report
	rep.Topics = append(rep.Topics, r.names...)
	for _, f := range r.findings() {
		slices.Sort(f.Examples)
	}
	rep.Well = rep.Missing.Count+rep.OutOfOrder.Count+rep.Unclaimed.Count == 0 && (opts.DuplicatesAllowed || rep.Duplicates.Count == 0)
	return rep, nil
}

func (r *run) findings() []*Finding {
	return []*Finding{&r.report.Missing, &r.report.Duplicates, &r.report.OutOfOrder, &r.report.Unclaimed}
}

func (r *run) found(f *Finding, format string, args ...any) {
	f.Count++
	if len(f.Examples) < r.Examples {
		f.Examples = append(f.Examples, fmt.Sprintf(format, args...))
	}
}

func (r *run) progress(phase string, done int64) {
	if r.Progress != nil {
		r.Progress(phase, done)
	}
}

// number returns the number of a topic. The first time it asks for the topic's end, which is after progress
// was read.
func (r *run) number(ctx context.Context, topic string) (int32, error) {
	if n, known := r.numbers[topic]; known {
		return n, nil
	}
	since := time.Time{}
	if r.report.Since != nil {
		since = r.report.Since.Add(-clockSlack)
	}
	extents, err := checker.Extents(ctx, r.kafka.Client, since, topic)
	if err != nil {
		return 0, err
	}
	n := int32(len(r.names))
	r.numbers[topic], r.names, r.extents[topic] = n, append(r.names, topic), extents[topic]
	return n, nil
}

func keyHash(topic string, key []byte) (hash [16]byte) {
	if key == nil {
		return hash
	}
	sum := sha256.Sum256(append([]byte(topic+"\x00"), key...))
	return [16]byte(sum[:])
}

func (r *run) place(topic, partition int32, offset int64) string {
	return fmt.Sprintf("%s/%d/%d", r.names[topic], partition, offset)
}

func idText(id [16]byte) string { return uuid.UUID(id).String() }
