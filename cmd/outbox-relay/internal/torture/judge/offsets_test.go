package judge_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
)

// Property: a rewind that is not carried out is blamed, and where partitions were added, order is judged
// within each of them, and excused across them.
func TestOffsetsAndPartitionsAreJudged(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		plant  func(e *judge.Evidence)
		blamed differences
	}{
		// Offsets that were set back.
		{"a rewind is ignored", func(e *judge.Evidence) {
			e.Rewinds = append(e.Rewinds, judge.Resume{Group: "a", Topic: topic, Partition: 1, Offset: 1, At: 50})
			e.Resumes = append(e.Resumes, judge.Resume{Group: "a", Topic: topic, Partition: 1, Offset: 0, At: 40}, judge.Resume{Group: "b", Topic: topic, Partition: 1, Offset: 0, At: 60},
				judge.Resume{Group: "a", Topic: topic, Partition: 0, Offset: 0, At: 60}, judge.Resume{Group: "a", Topic: topic, Partition: 1, Offset: 4, At: 60})
		}, differences{"lost": 1}},
		{"a rewind is carried out, at the next offset that has a record", func(e *judge.Evidence) {
			e.Rewinds = append(e.Rewinds, judge.Resume{Group: "a", Topic: topic, Partition: 0, Offset: 1, At: 50})
			at := slices.IndexFunc(e.Records, func(r judge.Record) bool { return r.Topic == topic && r.Partition == 0 && r.Offset >= 1 })
			e.Resumes = append(e.Resumes, judge.Resume{Group: "a", Topic: topic, Partition: 0, Offset: e.Records[at].Offset, At: 51})
		}, differences{}},
		{"nothing is behind the offset that a rewind goes to", func(e *judge.Evidence) {
			e.Rewinds = append(e.Rewinds, judge.Resume{Group: "a", Topic: topic, Partition: 1, Offset: 1000, At: 50})
		}, differences{}},

		// Partitions that were added.
		{"a key moves to another partition, out of order, and its topic grew", func(e *judge.Evidence) {
			e.Grown = map[string]bool{topic: true}
			e.Records[place(e, mother)].Partition = 5
			e.Records = slices.Concat(e.Records[1:], e.Records[:1])
			swap(e, first, sister)
			e.Records[place(e, sister)].Partition = 6
		}, differences{}},
		{"records of one partition are out of order, and its topic grew", func(e *judge.Evidence) {
			e.Grown = map[string]bool{topic: true}
			a, b := place(e, mother), place(e, plain)
			e.Records[a], e.Records[b] = e.Records[b], e.Records[a]
		}, differences{"out_of_order": 1}},
		{"effects of one partition are out of order, and its topic grew", func(e *judge.Evidence) {
			e.Grown = map[string]bool{topic: true}
			swap(e, first, plain)
		}, differences{"out_of_order": 1}},
		{"the key of a topic that did not grow moves", func(e *judge.Evidence) {
			e.Grown = map[string]bool{childTopic(first): true}
			e.Records[place(e, plain)].Partition = 5
		}, differences{"out_of_order": 2}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			e := clean()
			test.plant(e)
			balance(e)
			v := judge.Judge(e)
			assert.Equal(t, test.blamed, of(t, v), "%v", v.Examples)
		})
	}
}
