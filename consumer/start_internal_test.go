package consumer

import (
	"math"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
)

// The rows of the table in docs/design.md, "Where a partition begins".
type startRow struct {
	name  string
	in    func(k *known) // changes a partition of offsets 10 to 100, whose row says: handled from 20 to 60
	at    int64
	next  int64 // -1: none
	from  int64 // the range that counts as handled begins here
	to    int64 // and ends here, if not at the position
	moved bool
	halt  string
	why   string
}

const noOffset = -1

var (
	startTopic   = uuid.MustParse("0190a000-0000-4000-8000-000000000001")
	earlierTopic = uuid.MustParse("0190a000-0000-4000-8000-000000000002")
)

func commit(offset int64, metadata string) func(k *known) {
	return func(k *known) { k.log.committed = &committedOffset{offset, metadata} }
}

// ours is an offset as this consumer commits it.
func ours(offset int64) func(k *known) {
	return commit(offset, commitMetadata("cluster", startTopic, offset))
}

func pointer[T any](value T) *T { return &value }

// What may be otherwise about a partition. The row:.
func no(k *known)      { k.row = storedPosition{released: true} } // position is stored
func anew(k *known)    { k.row.topicID = earlierTopic }
func begun(k *known)   { k.row.next, k.row.handledFrom = nil, pointer(int64(10)) }
func unmoved(k *known) { k.row.handledBy, k.row.handledRule, k.row.handledFrom = nil, nil, nil }

// The topic:.
func beyond(k *known) { k.log.end = 50 }   // its end lies the position
func gone(k *known)   { k.log.first = 70 } // are its records up to the position

// The configuration:.
func byPos(k *known)   { k.dedup = DedupByPosition }
func renamed(k *known) { k.consumer = 8 }
func ruled(k *known)   { k.rule = "headers" }

func ordered(at int64) func(k *known) { return func(k *known) { k.row.resumeAt = &at } }

func given(k *known) { k.log = nil } // by Deliver

func with(changes ...func(k *known)) func(k *known) {
	return func(k *known) {
		for _, change := range changes {
			change(k)
		}
	}
}

func startRows() []startRow {
	return []startRow{
		// A stored position.
		{name: "no commit", in: with(), at: 60, next: 60, from: 20, why: "resumes at the stored position"},
		{name: "a rewound range that the topic has lost: other records get its offsets", in: func(k *known) { k.row.handledTo = pointer(int64(101)) }, at: 60, next: 60, from: 60, why: "resumes at the stored position"},
		{name: "our commit lags", in: ours(40), at: 60, next: 60, from: 20, why: "stored position"},
		{name: "our commit is ahead", in: ours(80), at: 60, next: 60, from: 20, why: "stored position"},
		{name: "our commit was moved back", in: commit(40, commitMetadata("cluster", startTopic, 60)), at: 40, next: 40, from: 20, to: 60, moved: true, why: "moved back"},
		{name: "moved back before what the topic has", in: commit(3, ""), at: 10, next: 10, from: 20, to: 60, moved: true, why: "moved back"},
		{name: "another program's commit is behind", in: commit(40, "kgo-1"), at: 40, next: 40, from: 20, to: 60, moved: true, why: "moved back"},
		{name: "a commit without metadata is behind", in: commit(40, ""), at: 40, next: 40, from: 20, to: 60, moved: true, why: "moved back"},
		{name: "a commit of an earlier topic", in: commit(40, commitMetadata("cluster", earlierTopic, 40)), at: 60, next: 60, from: 20, why: "stored position"},
		{name: "a mirrored commit", in: commit(40, commitMetadata("other", earlierTopic, 4)), at: 40, next: 40, from: 20, to: 60, moved: true, why: "moved back"},
		{name: "the end is lost", in: beyond, at: 10, next: 60, from: 20, halt: "lost its end", why: "halts"},
		{name: "the end is lost, by position", in: with(beyond, byPos), at: 10, next: 60, from: 20, halt: "resume-at --group g --topic t --partition 1", why: "halts"},
		{name: "records are gone", in: gone, at: 70, next: 60, from: 20, halt: "records 60 to 69", why: "halts"},

		// Who handled the messages before the position.
		{name: "new name", in: renamed, at: 60, next: 60, from: 60, why: "stored position"},
		{name: "new name, our commit lags", in: with(renamed, ours(40)), at: 60, next: 60, from: 60, why: "stored position"},
		{name: "new name, rewound", in: with(renamed, commit(40, "")), at: 40, next: 40, from: 40, moved: true, why: "moved back"},
		{name: "changed rule", in: with(ruled, ours(40)), at: 60, next: 60, from: 60, why: "stored position"},
		{name: "changed rule, rewound", in: with(ruled, commit(40, "")), at: 40, next: 40, from: 40, moved: true, why: "moved back"},
		{name: "nothing handled is known", in: unmoved, at: 60, next: 60, from: 60, why: "stored position"},
		{name: "went back behind the range", in: func(k *known) { k.row.next = pointer(int64(15)) }, at: 15, next: 15, from: 15, why: "stored"},
		{name: "after a Deliver that left offsets out", in: func(k *known) { k.row.handledFrom = pointer(int64(math.MaxInt64)) }, at: 60, next: 60, from: 60, why: "stored"},

		// No position.
		{name: "new partition", in: no, at: 10, next: noOffset, from: 10, why: "start of the topic"},
		{name: "begun and nothing handled", in: begun, at: 10, next: noOffset, from: 10, why: "start of the topic"},
		{name: "no position, our commit", in: with(no, ours(40)), at: 10, next: noOffset, from: math.MaxInt64, halt: "this database has no position", why: "halts"},
		{name: "begun, our commit: the database lost the first position", in: with(begun, ours(40)), at: 10, next: noOffset, from: 10, why: "lost its first commits"},
		{name: "begun, our commit, and what comes first is deleted", in: with(begun, func(k *known) { k.row.handledFrom = pointer(int64(2)) }, ours(40)), at: 10, next: noOffset, from: 2, halt: "records 2 to 9", why: "halts"},
		{name: "begun further on, our commit", in: with(begun, func(k *known) { k.row.handledFrom = pointer(int64(30)) }, ours(40)), at: 30, next: noOffset, from: 30, why: "lost its first commits"},
		{name: "begun, another commit", in: with(begun, commit(40, "")), at: 40, next: 40, from: 40, why: "Kafka's offset counts"},
		{name: "no position, another commit", in: with(no, commit(40, "")), at: 40, next: 40, from: 40, why: "Kafka's offset counts"},
		{name: "no position, stale commit", in: with(no, commit(40, commitMetadata("cluster", earlierTopic, 40))), at: 10, next: noOffset, from: 10, why: "start of the topic"},
		{name: "no position, commit beyond the end", in: with(no, commit(400, "")), at: 10, next: noOffset, from: 10, why: "start of the topic"},
		{name: "no position, commit beyond the end, by position", in: with(no, byPos, commit(400, "")), at: 10, next: noOffset, from: math.MaxInt64, halt: "resume-at", why: "halts"},
		{name: "no position, commit before the start", in: with(no, commit(4, "")), at: 10, next: noOffset, from: math.MaxInt64, halt: "records 4 to 9", why: "halts"},

		// A recreated topic.
		{name: "made anew", in: anew, at: 10, next: noOffset, from: 10, why: "recreated"},
		{name: "made anew, our stale commit", in: with(anew, commit(40, commitMetadata("cluster", earlierTopic, 40))), at: 10, next: noOffset, from: 10, why: "recreated"},
		{name: "made anew, our commit", in: with(anew, ours(40)), at: 10, next: noOffset, from: math.MaxInt64, halt: "this database has no position", why: "halts"},
		{name: "made anew, translated commit", in: with(anew, commit(40, commitMetadata("other", earlierTopic, 35))), at: 40, next: 40, from: 40, why: "Kafka's offset counts"},
		{name: "made anew, commit put there", in: with(anew, commit(40, "")), at: 40, next: 40, from: 40, why: "Kafka's offset counts"},

		// Orders.
		{name: "order back", in: with(ordered(30), ours(60)), at: 30, next: 30, from: 20, to: 60, moved: true, why: "operator"},
		{name: "order forward", in: with(ordered(90), ours(60)), at: 90, next: 90, from: 90, moved: true, why: "operator"},
		{name: "order forward inside what a rewind repeats", in: with(ordered(90), func(k *known) { k.row.handledTo = pointer(int64(95)) }), at: 90, next: 90, from: 90, to: 95, moved: true, why: "operator"},
		{name: "order to the start", in: ordered(resumeAtStart), at: 10, next: 10, from: 20, to: 60, moved: true, why: "operator"},
		{name: "order to the end", in: with(beyond, byPos, ordered(resumeAtEnd)), at: 50, next: 50, from: 50, moved: true, why: "operator"},
		{name: "order beyond the end", in: ordered(1000), at: 100, next: 100, from: 100, moved: true, why: "operator"},
		{name: "order before the start", in: ordered(1), at: 10, next: 10, from: 20, to: 60, moved: true, why: "operator"},
		{name: "order for an earlier topic", in: with(anew, ordered(30)), at: 10, next: noOffset, from: 10, why: "was for an earlier topic"},
		{name: "delivered", in: given, at: 0, next: 60, from: math.MaxInt64, why: "continues"},
		{name: "delivered to none", in: with(no, given), at: 0, next: noOffset, from: math.MaxInt64, why: "continues"},
	}
}

// Property: a table decides where a partition begins, and what counts as handled: every row.
func TestWhereAPartitionBegins(t *testing.T) {
	t.Parallel()
	for _, row := range startRows() {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			k := known{
				topicPartition: topicPartition{"t", 1}, group: "g", consumer: 7, rule: "standard",
				row: storedPosition{
					topicID: startTopic, next: pointer(int64(60)), epoch: 9, released: true,
					handledFrom: pointer(int64(20)), handledBy: pointer(int32(7)), handledRule: pointer("standard"),
				},
				log: &topicLog{cluster: "cluster", topicID: startTopic, first: 10, end: 100},
			}
			row.in(&k)
			d := decideStart(k)
			next := int64(noOffset)
			if d.next != nil {
				next = *d.next
			}
			require.Equal(t, []int64{row.at, row.next, row.from}, []int64{d.at, next, d.handled.from}, "at, next, handled from: %s", d.why)
			require.Equal(t, row.moved, d.moved)
			to := int64(0)
			if d.handled.to != nil {
				to = *d.handled.to
			}
			require.Equal(t, row.to, to)
			require.Contains(t, d.why, row.why)
			require.Equal(t, k.row.resumeAt != nil, d.ordered, "an order is carried out once")
			if row.halt == "" {
				require.NoError(t, d.halt)
			} else {
				require.ErrorContains(t, d.halt, row.halt)
				k.row.topicID, k.row.next, k.row.handledFrom, k.row.resumeAt = k.log.topicID, d.next, &d.handled.from, nil // as it is stored
				require.Equal(t, d.halt, decideStart(k).halt, "it halts again")
			}
		})
	}
}

// Property: a rewind keeps what was handled, through takeovers on its way and a further rewind; what
// it works through before the range counts once it has reached the range.
func TestRewindsKeepWhatWasHandled(t *testing.T) {
	t.Parallel()
	k := known{
		topicPartition: topicPartition{"t", 0}, group: "g", consumer: 7, rule: "standard", log: &topicLog{cluster: "cluster", topicID: startTopic, first: 0, end: 100},
		row: storedPosition{topicID: startTopic, next: pointer(int64(60)), handledFrom: pointer(int64(20)), handledBy: pointer(int32(7)), handledRule: pointer("standard")},
	}
	// to rewinds, or takes over again at a position; the row becomes what is stored.
	to := func(next int64, rewind bool) handledRange {
		k.log.committed = nil
		if rewind {
			k.log.committed = &committedOffset{next, ""}
		} else {
			k.row.next = &next
		}
		d := decideStart(k)
		k.row.next, k.row.handledFrom, k.row.handledTo, k.row.rewoundFrom = d.next, &d.handled.from, d.handled.to, d.handled.rewound
		return d.handled
	}
	covered := func(r handledRange) (list [2]int64) {
		list[0] = -1
		for offset := range int64(100) {
			if r.contains(offset, k.row.next) {
				if list[0] < 0 {
					list[0] = offset
				}
				list[1] = offset + 1
			}
		}
		return list
	}
	require.Equal(t, [2]int64{20, 60}, covered(to(30, true)))
	require.Equal(t, [2]int64{20, 60}, covered(to(45, false)))
	require.Equal(t, [2]int64{20, 60}, covered(to(5, true)))
	require.Equal(t, [2]int64{20, 60}, covered(to(12, false)), "what a rewind works through counts later")
	require.Equal(t, [2]int64{20, 60}, covered(to(8, true)))
	require.Equal(t, [2]int64{5, 60}, covered(to(25, false)), "it has reached the range")
	require.Equal(t, [2]int64{5, 70}, covered(to(70, false)))
	require.Nil(t, k.row.handledTo)
}

// Property: holders that were killed while the partition had nothing for them are no sign of a message that
// ends the process.
func TestKilledHoldersOfAnIdlePartitionHaveNoSuspects(t *testing.T) {
	t.Parallel()
	c := &Consumer{cfg: Config{Group: "g"}, ids: map[string]dedup.Consumer{}}
	for end, want := range map[int64]int{50: 0, 51: 3} {
		next := int64(50)
		h := c.newHold(topicPartition{"t", 0})
		h.log, h.row = &topicLog{end: end}, storedPosition{next: &next, heldOffset: &next, stuck: 2}
		c.decide(h)
		require.Equal(t, want, h.pos.stuck)
	}
}
