package trace

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
)

// VerifyOptions are the options of Verify.
type VerifyOptions struct {
	Schema string
	Relay  string
	// Group is the group whose claims are checked. Empty: none.
	Group string
	// Since is how old rows and records may be. Zero: any age.
	Since time.Duration
	// Topics to check, as rows name them. Default: all that rows name.
	Topics []string
	// TopicPrefix of the relay.
	TopicPrefix string
	// Examples is how many examples of each finding are reported.
	Examples int
	// DuplicatesAllowed: duplicate records are counted, but do not make the report not well.
	DuplicatesAllowed bool
	// Progress is called now and then. Optional.
	Progress func(phase string, done int64)
}

// Finding is a kind of fault.
type Finding struct {
	Count    int64    `json:"count"`
	Examples []string `json:"examples"`
}

// Report is what Verify found.
type Report struct {
	Well      bool       `json:"well"`
	Relay     string     `json:"relay"`
	Group     string     `json:"group"` // empty: claims were not checked
	Since     *time.Time `json:"since"` // null: everything
	Topics    []string   `json:"topics"`
	Rows      int64      `json:"rows"`      // of the outbox
	Published int64      `json:"published"` // how many of the rows
	Records   int64      `json:"records"`   // of the topics
	Foreign   int64      `json:"foreign"`   // how many of the records have no ID from the relay
	Claimed   int64      `json:"claimed"`   // records whose claim was looked up
	// Expired counts published rows that are in no topic, and were written before the first record
	// that the topic still has: Kafka may have deleted them.
	Expired int64 `json:"expired"`
	// Unchecked is what could not be checked. Then the report is not well: a run that checks
	// nothing finds nothing.
	Unchecked []string `json:"unchecked"`
	// Notes are remarks about the run.
	Notes []string `json:"notes"`
	// Moved counts keys with records in several partitions, as after partitions were added. Their
	// order is checked within each partition.
	Moved int64 `json:"moved_keys"`

	Missing    Finding `json:"missing"`      // published, and not in the topic
	Duplicates Finding `json:"duplicates"`   // records beyond the rows of their ID and topic
	OutOfOrder Finding `json:"out_of_order"` // first records that follow a later row of their key
	Unclaimed  Finding `json:"unclaimed"`    // records before the group's position without a claim
}

// rowItem, recordItem and firstItem hold what is known of a row, of a record, and of the first
// record of a row.
type (
	rowItem struct {
		ID        [16]byte
		Key       [16]byte // hash of topic and key; zero: no key
		Seq       int64
		Created   int64 // in microseconds
		Topic     int32
		Hash      int32 // of the key, whose remainder is the partition; -1: any
		Partition int32 // that the row asks for; -1: none
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
	VerifyOptions
	db     operator.Querier
	kafka  *Kafka
	report *Report

	cut         *pipeline.Cut
	unpublished []int64 // sorted
	now         time.Time
	claims      *claims

	numbers map[string]int32 // of topics
	names   []string
	extents map[string]topicscan.Extent
	// Time of the first remaining record, in microseconds, where some were deleted
	oldest map[partition]int64
	first  map[partition]int64 // time of the first record that was read, in microseconds

	rows    spill[rowItem]
	records spill[recordItem]
	firsts  spill[firstItem]
}

type partition struct{ topic, partition int32 }

// Verify compares the outbox with the topics, and the topics with the claims. It changes nothing.
func Verify(ctx context.Context, db operator.Querier, kafka *Kafka, opts VerifyOptions) (_ *Report, err error) {
	dir, err := os.MkdirTemp("", "outbox-relay-verify-")
	if err != nil {
		return nil, fmt.Errorf("create a directory for temporary files: %w: set TMPDIR to one that can be written", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r := &run{
		VerifyOptions: opts, db: db, kafka: kafka, numbers: map[string]int32{}, extents: map[string]topicscan.Extent{}, oldest: map[partition]int64{},
		first:  map[partition]int64{},
		report: &Report{Relay: opts.Relay, Group: opts.Group, Topics: []string{}, Unchecked: []string{}, Notes: []string{}},
	}
	if r.Progress == nil {
		r.Progress = func(string, int64) {}
	}
	for _, f := range r.findings() {
		f.Examples = []string{}
	}
	defer func() { err = errors.Join(err, r.rows.close(), r.records.close(), r.firsts.close()) }()
	if err := errors.Join(r.rows.create(dir, "rows"), r.records.create(dir, "records"), r.firsts.create(dir, "firsts")); err != nil {
		return nil, err
	}
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
	r.nothingChecked()
	rep.Well = len(rep.Unchecked) == 0 && rep.Missing.Count+rep.OutOfOrder.Count+rep.Unclaimed.Count == 0 && (opts.DuplicatesAllowed || rep.Duplicates.Count == 0)
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

// number returns the number of a topic. At the first call for a topic it reads the topic's end,
// which is after progress was read.
func (r *run) number(ctx context.Context, topic string) (int32, error) {
	if n, known := r.numbers[topic]; known {
		return n, nil
	}
	since := time.Time{}
	if r.report.Since != nil {
		since = r.report.Since.Add(-clockSlack)
	}
	extent, err := topicscan.ExtentOf(ctx, r.kafka.Client, since, topic)
	if err != nil {
		return 0, err
	}
	n := int32(len(r.names))
	r.numbers[topic], r.names, r.extents[topic] = n, append(r.names, topic), extent
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

// nothingChecked reports what the run looked for and found nothing of: that proves nothing.
func (r *run) nothingChecked() {
	rep := r.report
	unchecked := func(format string, args ...any) { rep.Unchecked = append(rep.Unchecked, fmt.Sprintf(format, args...)) }
	for _, topic := range r.Topics {
		if len(r.extents[r.TopicPrefix+topic]) == 0 {
			unchecked("topic %s does not exist: was it deleted, or is its name misspelt?", topic)
		}
	}
	if rep.Rows+rep.Records == 0 {
		unchecked("no rows and no records%s: there was nothing to compare", r.window())
	}
	if r.Since > 0 && r.Since < clockSlack {
		rep.Notes = append(rep.Notes, fmt.Sprintf("--since %s is shorter than the %s by which clocks may differ: records from up to that long before --since were read, but their rows were not", human.Duration(r.Since), human.Duration(clockSlack)))
	}
	if r.claims == nil || rep.Claimed > 0 {
		return
	}
	consumed := slices.DeleteFunc(slices.Sorted(slices.Values(r.names)), func(topic string) bool { return r.claims.topics[topic] == nil })
	if len(consumed) == 0 {
		unchecked("no claims looked for: group %s consumes none of the topics that rows%s name: give --topic", r.Group, r.window())
		return
	}
	unchecked("no claims looked for: no record of %s%s is before the position of group %s, carries an ID and is within the dedup window (less %s: claims may just be forgotten)",
		strings.Join(consumed, ", "), r.window(), r.Group, human.Duration(windowSlack))
}

func (r *run) window() string {
	if r.Since == 0 {
		return ""
	}
	return " of the last " + human.Duration(r.Since)
}
