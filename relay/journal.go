package relay

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/internal/kafkaclient"
	"github.com/effectonce/effectonce/internal/pause"
)

// journal is a shard's progress in Kafka: records of one key in a compacted topic, written in the
// transactions whose records they cover.
type journal struct {
	*publisher
	wrote   int64     // offset of the last record of the open transaction
	last    *int64    // offset of this shard's last committed record; nil: none is known
	written time.Time // when that was committed, or the work began
}

// entry is a progress record. It is complete in itself: the ticks that it names may be lost in a
// failover.
type entry struct {
	System    *int64      `json:"system_identifier"`
	Timeline  *int32      `json:"timeline"`
	Epoch     int64       `json:"epoch"`
	Published int64       `json:"published"`
	From      storedTick  `json:"from"`
	To        *storedTick `json:"to,omitempty"`
	Seq       int64       `json:"seq"`
	Floor     int64       `json:"floor"`
	// Sure is an offset that the database has, unless it lost dead rows that the entry does not name.
	Sure    *int64  `json:"sure,omitempty"`
	Revived []int64 `json:"revived,omitempty"`
	// Dead are the rows that the transaction skipped, by reason: the first seq, then the difference
	// of each seq to the one before it, so that a page of them is a small record.
	Dead map[Reason][]int64 `json:"dead,omitempty"`

	offset int64
}

type storedTick struct {
	Tick     int64  `json:"tick"`
	Token    string `json:"token"`
	Snapshot string `json:"snapshot"`
	SeqLast  int64  `json:"seq_last"`
}

// transactionalID, which is also the key of the records, has what makes two outboxes different, so that
// relays of several databases can share a Kafka cluster.
func (r *Relay) transactionalID(l *lease) string {
	return fmt.Sprintf("effectonce/%v/%s/%s/%s/%d", deref(l.cluster.system), l.cluster.database, r.cfg.Schema, r.cfg.Name, l.shard)
}

// prepare creates the topic if it does not exist.
func (j *journal) prepare(ctx context.Context, client *kgo.Client) error {
	admin := kadm.NewClient(client)
	topics, err := admin.ListTopics(ctx, j.cfg.ProgressTopic)
	if err != nil {
		return fmt.Errorf("ask Kafka for topic %q: %w", j.cfg.ProgressTopic, err)
	}
	if topics.Has(j.cfg.ProgressTopic) {
		return nil
	}
	created, err := admin.CreateTopic(ctx, 1, -1, journalSettings(), j.cfg.ProgressTopic)
	if err = cmp.Or(err, created.Err); err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
		return fmt.Errorf("create progress topic %q: %w %s; create it yourself with one partition and cleanup.policy=compact", j.cfg.ProgressTopic, err, created.ErrMessage)
	}
	return nil
}

// journalSettings let the brokers delete superseded records. The compactor does not touch the
// segment that is written to, so a segment is small and short-lived. The end of each transaction is
// a record of its own, which stays for delete.retention.ms longer than the other records: with
// Kafka's default of a day these would be most of the topic.
func journalSettings() map[string]*string {
	lasts := kadm.StringPtr(fmt.Sprint(JournalSegmentLasts.Milliseconds()))
	return map[string]*string{
		"cleanup.policy": kadm.StringPtr("compact"), "min.cleanable.dirty.ratio": kadm.StringPtr("0.1"),
		"segment.bytes": kadm.StringPtr(fmt.Sprint(JournalSegmentBytes)), "segment.ms": lasts, "delete.retention.ms": lasts,
	}
}

// Settings of a progress topic that the relay creates: segment.bytes, and segment.ms and
// delete.retention.ms.
const (
	JournalSegmentBytes = 8 << 20
	JournalSegmentLasts = 10 * time.Minute
)

func (j *journal) record(l *lease, end cursor, published int64, t *toTransactions) (*kgo.Record, error) {
	e := entry{
		System: l.cluster.system, Timeline: l.cluster.timeline, Epoch: l.epoch, Published: published,
		From: storedTick{end.from.id, end.from.token, end.from.snapshot, end.from.seqLast}, Seq: end.seq, Floor: end.floor, Sure: t.sure, Revived: t.released,
	}
	e.setDead(t.dead)
	if end.to != nil {
		e.To = &storedTick{end.to.id, end.to.token, end.to.snapshot, end.to.seqLast}
	}
	value, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode progress: %w", err)
	}
	return &kgo.Record{Topic: j.cfg.ProgressTopic, Key: []byte(j.transactionalID(j.lease)), Value: value}, nil
}

// setDead records the rows that the transaction skips, delta-encoded per reason. dead must be sorted by
// seq.
func (e *entry) setDead(dead []deadRow) {
	if len(dead) == 0 {
		return
	}
	e.Dead = map[Reason][]int64{}
	last := map[Reason]int64{}
	for _, d := range dead {
		e.Dead[d.reason] = append(e.Dead[d.reason], d.row.seq-last[d.reason])
		last[d.reason] = d.row.seq
	}
}

// verdicts returns the dead rows of an entry. A holder committed the entry and died before it moved
// them to outbox_dead. They are tried again at once, which finds the details.
func (e *entry) verdicts() verdicts {
	v := verdicts{state: "retry"}
	for reason, above := range e.Dead {
		var seq int64
		for _, n := range above {
			seq += n
			v.add(seq, reason, "the relay was interrupted after it found this", "")
		}
	}
	return v
}

// after reports whether the entry is from this cluster and newer than the database's copy. If the
// copy has a later epoch, it is from a recovery, a change of the number of shards, or a time
// without exactly-once.
func (e *entry) after(l *lease) bool {
	if deref(e.System) != deref(l.cluster.system) || l.journal != nil && *l.journal == e.offset {
		return false
	}
	return e.Epoch > l.made || e.Epoch == l.made && e.Published > l.published
}

func (e *entry) cursor() (c cursor, err error) {
	c = cursor{seq: e.Seq, floor: e.Floor}
	if c.from, err = e.From.tick(); err != nil {
		return c, err
	}
	if e.To != nil {
		c.to, err = e.To.tick()
	}
	return c, err
}

func (s *storedTick) tick() (*tick, error) {
	t, err := newTick(s.Snapshot, s.SeqLast)
	if err != nil {
		return nil, err
	}
	t.id, t.token = s.Tick, s.Token
	return t, nil
}

// remembered reports whether the database has the ticks of an entry, which were durable there
// before the entry was. It does not have them after it went back to a backup or a dump, in the same
// cluster. Then row numbers are assigned again, and the rows that the entry counts as published are
// different rows.
func (j *journal) remembered(ctx context.Context, c cursor) (bool, error) {
	var has, same bool
	to, token := c.to.ref()
	err := j.pool.QueryRow(ctx, j.sql.of(hasTicksSQL), j.lease.cluster.run, c.from.id, c.from.token, to, token).Scan(&has, &same)
	if err == nil && !same {
		err = errAnotherRun
	}
	return has, err
}

// extent returns the first and the end offset of the topic. It waits while the topic is new to the
// brokers.
func (j *journal) extent(ctx context.Context, admin *kadm.Client) (begin, end int64, err error) {
	for {
		begins, err := admin.ListStartOffsets(ctx, j.cfg.ProgressTopic)
		ends, failed := admin.ListEndOffsets(ctx, j.cfg.ProgressTopic)
		if err = cmp.Or(err, failed); err != nil {
			return 0, 0, err
		}
		if n := len(ends[j.cfg.ProgressTopic]); n > 1 {
			return 0, 0, fmt.Errorf("it has %d partitions: want 1", n)
		}
		begin, _ := begins.Lookup(j.cfg.ProgressTopic, 0)
		end, there := ends.Lookup(j.cfg.ProgressTopic, 0)
		if problem := errors.Join(begin.Err, end.Err); there && !kerr.IsRetriable(begin.Err) && !kerr.IsRetriable(end.Err) {
			return begin.Offset, end.Offset, problem
		}
		if !pause.For(ctx, 20*time.Millisecond) {
			return 0, 0, fmt.Errorf("its end is unknown: %w", errors.Join(end.Err, ctx.Err()))
		}
	}
}

// read returns the last committed entry, or nil. from is the offset of that record according to the
// database's copy of progress; nil: the copy has none.
//
// It reads the topic from there, and from its beginning if no entry of this shard is behind that. In the
// only partition, a later record was committed later, so the last entry that it finds is the last of
// all: the offset never chooses where the search ends. The copy may be old (newer entries are behind the
// offset), its record compacted (a newer one of the key is behind it), and the topic another one, or
// truncated (the offset is beyond the end, or no entry is behind it). A transaction that begins before the
// offset and ends behind it counts with its end: brokers send which transactions were aborted.
func (j *journal) read(ctx context.Context, client *kgo.Client, from *int64) (*entry, error) {
	begin, end, err := j.extent(ctx, kadm.NewClient(client))
	if err != nil {
		return nil, err
	}
	var last *entry
	if from != nil && *from > begin && *from < end {
		if last, err = j.readPiece(ctx, *from, end); err != nil {
			return nil, err
		}
		end = *from
	}
	if last == nil {
		last, err = j.readPiece(ctx, begin, end)
	}
	if last != nil {
		j.last = &last.offset
	}
	return last, err
}

// readPiece returns the last committed entry from one offset up to another. It waits for
// transactions of other shards that are still open in that range: what is behind them is not known
// before they end.
func (j *journal) readPiece(ctx context.Context, start, end int64) (*entry, error) {
	reader, err := kafkaclient.New(append(append([]kgo.Opt{kgo.MaxDecompressBatchBytes(journalInflateMax)}, j.kafka...),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{j.cfg.ProgressTopic: {0: kgo.NewOffset().At(start)}}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return nil, fmt.Errorf("kafka options: %w", err)
	}
	defer reader.Close()
	id := j.transactionalID(j.lease)
	var last *entry
	for at := start; at < end; {
		j.progressed()
		polling, cancel := j.limited(ctx, complaintEvery, context.DeadlineExceeded)
		fetches := reader.PollFetches(polling)
		silent := polling.Err() != nil && ctx.Err() == nil
		cancel()
		if err := fetches.Err(); silent && errors.Is(err, context.DeadlineExceeded) {
			j.say.warn(ctx, "waiting for a transaction that is open in the progress topic; if it hangs, kafka-transactions.sh finds and aborts it",
				"relay", j.cfg.Name, "shard", j.lease.shard, "topic", j.cfg.ProgressTopic, "offset", at)
			continue
		} else if err != nil {
			return nil, err
		}
		for _, record := range fetches.Records() {
			at = record.Offset + 1
			if record.Offset >= end || record.Attrs.IsControl() || string(record.Key) != id {
				continue
			}
			last = &entry{offset: record.Offset}
			if err := json.Unmarshal(record.Value, last); err != nil {
				return nil, fmt.Errorf("offset %d: %w", record.Offset, err)
			}
		}
	}
	return last, nil
}

// journalInflateMax bounds the inflated size of a batch of the progress topic, in bytes. Relays
// write entries of less than a kilobyte.
const journalInflateMax = 16 << 20

// complaintEvery is how often a relay logs that it waits for another relay's transaction.
const complaintEvery = 10 * time.Second

// copied reports whether the database's copy of progress names the last record.
func (j *journal) copied() bool {
	return j.last == nil || (j.lease.journal != nil && *j.lease.journal == *j.last)
}

// journalEvery is how often a shard without rows writes its progress again: else, beside a busy shard,
// its last record would get ever farther from the end of the topic, and a takeover has to read from it.
const journalEvery = time.Minute
