package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/bounds"
)

// hold is a partition to be taken over.
type hold struct {
	topicPartition
	log     *topicLog // nil: the records do not come from Kafka
	running bool      // its worker continues where it is
	seen    *int64    // a position that was read before log
	offsets []int64   // of the records passed to Deliver
}

// held is a partition that was taken over, or why it could not be.
type held struct {
	pos      *position
	decision decision
	waits    error
	ahead    *int64 // the position is ahead of the log, perhaps only because the log was read earlier
}

var errAhead = errors.New("the position advances while it is taken over")

// aheadOf returns a position that is ahead of the end of the topic, unless it was already ahead
// when the end was read.
func (h hold) aheadOf(row storedPosition) *int64 {
	if h.log == nil || h.running || row.next == nil || *row.next <= h.log.end || (known{row: row, log: h.log}).recreated() {
		return nil
	}
	if h.seen != nil && *h.seen > h.log.end {
		return nil
	}
	return row.next
}

// errNotMet: if a group begins at the end of a topic, all partitions begin there at the same
// moment.
var errNotMet = errors.New("first contact of the group with the topic, to begin at its end (Config.Start): this needs the ends of all partitions, and one is unknown (no leader?)")

// idRule is the text of the rule by which messages of a topic get their IDs. Messages that were
// handled under another rule have other claims.
func (c *Consumer) idRule(topic string) string { return c.rules[topic].String() }

// hold begins a new epoch for each partition, decides where it begins and stores the decision, all
// in one transaction. It locks the rows before it decides. The results are in the order of holds.
func (c *Consumer) hold(ctx context.Context, holds []hold, contacts []contact) ([]held, error) {
	taken := make([]held, len(holds))
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	err := pgx.BeginTxFunc(ctx, c.engine.pool, options, func(tx pgx.Tx) error {
		rows, met, err := c.lockPositions(ctx, tx, holds, contacts)
		if err != nil {
			return err
		}
		for i, h := range holds {
			if _, known := met[h.topic]; !known && h.log != nil && !h.running {
				taken[i].waits = errNotMet
				continue
			}
			if ahead := h.aheadOf(rows[h.topicPartition]); ahead != nil {
				taken[i] = held{waits: errAhead, ahead: ahead}
				continue
			}
			taken[i] = c.decide(c.known(h, rows[h.topicPartition], met))
		}
		return c.storeHolds(ctx, tx, holds, rows, taken)
	})
	if err != nil {
		return nil, fmt.Errorf("take positions over: %w", err)
	}
	return taken, nil
}

func (c *Consumer) known(h hold, row storedPosition, met map[string]int32) known {
	cfg := c.engine.cfg
	rule := c.idRule(h.topic)
	if row.handledRule != nil {
		// Two texts may describe rules that give every message the same ID.
		if earlier, err := dedup.ParseIDRule(*row.handledRule); err == nil && earlier.SameIDs(c.rules[h.topic]) {
			row.handledRule = &rule
		}
	}
	partitions, ok := met[h.topic]
	if !ok {
		partitions = math.MaxInt32
	}
	return known{
		group: cfg.Group, topic: h.topic, partition: h.partition, row: row, log: h.log, met: partitions, running: h.running, offsets: h.offsets,
		outOfRange: cfg.OutOfRange, dedup: cfg.Dedup, consumer: c.ids[h.topic].ID(), rule: rule,
	}
}

func (c *Consumer) decide(k known) held {
	d := decideStart(k)
	pos := &position{
		topic: k.topic, partition: k.partition, epoch: k.row.epoch + 1, stored: d.next,
		handledFrom: d.handledFrom, handledTo: d.handledTo, server: k.row.server,
	}
	if next := k.row.next; !k.row.released && (next == nil) == (k.row.heldOffset == nil) && (next == nil || *next == *k.row.heldOffset) {
		pos.stuck = k.row.stuck + 1
	}
	return held{pos: pos, decision: d}
}

// contact is a topic with which this may be the group's first contact.
type contact struct {
	topic      string
	topicID    uuid.UUID
	partitions int32
	rows       []firstPosition // to be stored together, before the partitions are taken over
}

// firstPosition is where a partition of such a topic begins; nil: at its start, or at Kafka's
// offset.
type firstPosition struct {
	partition int32
	next      *int64
}

// firstPositions returns the positions to store at the group's first contact with a topic.
// Config.Start counts only here: the group was already subscribed when the first records of a
// recreated topic, or of a partition that was added later, arrived.
func firstPositions(start Start, logs map[int32]*topicLog) []firstPosition {
	if start != StartLatest {
		return nil
	}
	rows := make([]firstPosition, 0, len(logs))
	for number, log := range logs {
		row := firstPosition{partition: number}
		if origin := log.committed.origin(log); origin == commitNone || origin == commitStale {
			row.next = &log.end
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b firstPosition) int { return cmp.Compare(a.partition, b.partition) })
	return rows
}

// lockPositions inserts missing rows, then locks and reads all of them.
func (c *Consumer) lockPositions(ctx context.Context, tx pgx.Tx, holds []hold, contacts []contact) (map[topicPartition]storedPosition, map[string]int32, error) {
	topics, numbers := make([]string, len(holds)), make([]int32, len(holds))
	for i, h := range holds {
		topics[i], numbers[i] = h.topic, h.partition
	}
	group := c.engine.cfg.Group
	rows, met := map[topicPartition]storedPosition{}, map[string]int32{}
	batch := &pgx.Batch{}
	batch.Queue(c.engine.sql.settings, c.engine.timeout[0], c.engine.timeout[1], c.engine.timeout[2])
	if len(contacts) > 0 {
		batch.Queue(c.engine.sql.contact, contactArguments(group, contacts)...)
	}
	batch.Queue(c.engine.sql.met, group, topics).Query(func(found pgx.Rows) error {
		var topic string
		var partitions int32
		_, err := pgx.ForEachRow(found, []any{&topic, &partitions}, func() error {
			met[topic] = partitions
			return nil
		})
		return err
	})
	batch.Queue(c.engine.sql.rows, group, topics, numbers)
	batch.Queue(c.engine.sql.lock, group, topics, numbers).Query(func(found pgx.Rows) error {
		var key topicPartition
		var row storedPosition
		var topicID *[16]byte
		_, err := pgx.ForEachRow(found, []any{
			&key.topic, &key.partition, &topicID, &row.next, &row.epoch, &row.handledFrom, &row.handledBy, &row.handledRule,
			&row.resumeAt, &row.held, &row.released, &row.heldOffset, &row.stuck, &row.server,
		}, func() error {
			stored := row
			if topicID != nil {
				stored.topicID = *topicID
			}
			rows[key] = stored
			return nil
		})
		return err
	})
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return nil, nil, fmt.Errorf("read positions: %w", err)
	}
	return rows, met, nil
}

func contactArguments(group string, contacts []contact) []any {
	var topics, rowTopics []string
	var ids, rowIDs []*[16]byte
	var counts, numbers []int32
	var nexts []*int64
	for _, met := range contacts {
		id := nullable(met.topicID)
		topics, ids, counts = append(topics, met.topic), append(ids, id), append(counts, met.partitions)
		for _, row := range met.rows {
			rowTopics, rowIDs = append(rowTopics, met.topic), append(rowIDs, id)
			numbers, nexts = append(numbers, row.partition), append(nexts, row.next)
		}
	}
	return []any{group, topics, ids, counts, rowTopics, rowIDs, numbers, nexts}
}

func nullable(id uuid.UUID) *[16]byte {
	if id == uuid.Nil {
		return nil
	}
	raw := [16]byte(id)
	return &raw
}

// storeHolds stores the decisions.
func (c *Consumer) storeHolds(ctx context.Context, tx pgx.Tx, holds []hold, rows map[topicPartition]storedPosition, taken []held) error {
	var topics, rules []string
	var numbers, stuck, by []int32
	var epochs, from []int64
	var topicIDs []*[16]byte
	var nexts []*int64
	var moved, ordered []bool
	var halts []*string
	batch := &pgx.Batch{}
	for i, h := range holds {
		if taken[i].waits != nil {
			continue
		}
		row, d, pos := rows[h.topicPartition], taken[i].decision, taken[i].pos
		topics, numbers, epochs = append(topics, h.topic), append(numbers, h.partition), append(epochs, row.epoch)
		var topicID *[16]byte
		recreated := false
		if h.log != nil {
			topicID, recreated = nullable(h.log.topicID), known{row: row, log: h.log}.recreated()
		}
		topicIDs, nexts, stuck = append(topicIDs, topicID), append(nexts, d.next), append(stuck, int32(pos.stuck))
		moved, from = append(moved, d.moved || recreated), append(from, d.storeFrom)
		by, rules, ordered = append(by, c.ids[h.topic].ID()), append(rules, c.idRule(h.topic)), append(ordered, d.ordered)
		var halt *string
		if d.halt != nil {
			text := bounds.ErrorText(halted(d.halt))
			halt = &text
		}
		halts = append(halts, halt)
		if d.reset != nil {
			batch.Queue(c.engine.sql.reset, c.owner, bounds.ErrorText(d.reset), c.engine.cfg.Group, h.topic, h.partition, *d.next)
		}
	}
	batch.Queue(c.engine.sql.hold, c.engine.cfg.Group, c.owner, topics, numbers, epochs, topicIDs, nexts, stuck, moved, from, by, rules, ordered, halts)
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("store where partitions begin: %w", err)
	}
	return nil
}

func halted(problem error) error { return fmt.Errorf("the partition halts: %w", problem) }

// paused lists the topics that an operator paused for the group.
func (c *Consumer) paused(ctx context.Context) (map[string]bool, error) {
	rows, err := c.engine.pool.Query(ctx, c.engine.sql.pauses, c.engine.cfg.Group)
	if err != nil {
		return nil, fmt.Errorf("read which topics are paused: %w", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("read which topics are paused: %w", err)
	}
	found := map[string]bool{}
	for _, name := range names {
		found[name] = true
	}
	return found, nil
}

// giveUp stores that positions are released in good order.
func (c *Consumer) giveUp(ctx context.Context, positions []*position) error {
	if len(positions) == 0 {
		return nil
	}
	topics, numbers, epochs := make([]string, len(positions)), make([]int32, len(positions)), make([]int64, len(positions))
	for i, pos := range positions {
		topics[i], numbers[i], epochs[i] = pos.topic, pos.partition, pos.epoch
	}
	ctx, cancel := context.WithTimeout(ctx, markMax)
	defer cancel()
	if _, err := c.engine.pool.Exec(ctx, c.engine.sql.givenUp, c.engine.cfg.Group, topics, numbers, epochs); err != nil {
		return fmt.Errorf("release positions: %w", err)
	}
	return nil
}

// handled reports whether an offset is in the handled range: a fresh claim there means that the
// earlier one was forgotten.
func (p *position) handled(offset int64) bool {
	to := p.handledBefore()
	return to != nil && p.handledFrom <= offset && offset < *to
}

// handledBefore is the end of that range; nil: it is empty.
func (p *position) handledBefore() *int64 {
	if p.handledTo != nil {
		return p.handledTo
	}
	return p.stored
}
