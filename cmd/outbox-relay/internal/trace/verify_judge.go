package trace

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/uuid"
)

type message struct {
	id    [16]byte
	topic int32
}

// judgeRecords finds missing and duplicate records, and passes on the first record of each row.
func (r *run) judgeRecords(ctx context.Context) error {
	for part := range parts {
		if err := ctx.Err(); err != nil {
			return err
		}
		records, err := r.records.read(part)
		if err != nil {
			return err
		}
		rows, err := r.rows.read(part)
		if err != nil {
			return err
		}
		slices.SortFunc(records, func(a, b recordItem) int {
			return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
		})
		owed := make(map[message]int, len(rows)) // a message that was replayed has several rows
		for _, row := range rows {
			owed[message{row.ID, row.Topic}]++
		}
		firsts := make(map[message]recordItem, len(records))
		for _, record := range records {
			m := message{record.ID, record.Topic}
			owed[m]--
			if first, again := firsts[m]; !again {
				firsts[m] = record
			} else if owed[m] < 0 {
				r.found(&r.report.Duplicates, "message %s is at %s and again at %s", uuid.UUID(record.ID),
					r.place(first.Topic, first.Partition, first.Offset), r.place(record.Topic, record.Partition, record.Offset))
			}
		}
		// The same message may have been published again, as after a failover that lost the first
		// row. Its place in the order is that of its first row. Rows are in the order of seq.
		placed := make(map[message]bool, len(rows))
		for _, row := range rows {
			m := message{row.ID, row.Topic}
			again := placed[m]
			placed[m] = true
			first, there := firsts[m]
			switch {
			case there && !again && row.Key != [16]byte{}:
				err = r.firsts.add(row.Key[0], firstItem{Key: row.Key, Seq: row.Seq, Offset: first.Offset, Topic: first.Topic, Partition: first.Partition})
				if err != nil {
					return err
				}
			case there || !row.Published:
			case r.expired(row):
				r.report.Expired++
			default:
				r.found(&r.report.Missing, "row %d (id %s) is published, but not in topic %s", row.Seq, uuid.UUID(row.ID), r.names[row.Topic])
			}
		}
		r.Progress("parts", int64(part+1))
	}
	return nil
}

// expired reports whether Kafka may have deleted the record of a row: the row is older than the
// first remaining record of a partition that may have had it. With a key, that is the key's
// partition under each number of partitions since then.
func (r *run) expired(row rowItem) bool {
	deleted := func(p int32) bool {
		oldest, gone := r.oldest[partition{row.Topic, p}]
		return gone && row.Created <= oldest
	}
	now := int32(len(r.extents[r.names[row.Topic]]))
	switch {
	case row.Partition >= 0:
		return deleted(row.Partition)
	case row.Hash < 0:
		for p := range now {
			if deleted(p) {
				return true
			}
		}
		return false
	}
	for n := r.partitionsAt(row.Topic, row.Created, now); n <= now; n++ {
		if deleted(row.Hash % n) {
			return true
		}
	}
	return false
}

// partitionsAt returns the least number of partitions that a topic had at a time: those up to the
// last one with a record from before.
func (r *run) partitionsAt(topic int32, at int64, now int32) int32 {
	for p := now - 1; p > 0; p-- {
		if first, some := r.first[partition{topic, p}]; some && first <= at {
			return p + 1
		}
	}
	return 1
}

// judgeOrder follows each key through its partition: the first record of a row must not follow one
// of a later row.
func (r *run) judgeOrder(ctx context.Context) error {
	for part := range parts {
		if err := ctx.Err(); err != nil {
			return err
		}
		firsts, err := r.firsts.read(part)
		if err != nil {
			return err
		}
		slices.SortFunc(firsts, func(a, b firstItem) int {
			return cmp.Or(bytes.Compare(a.Key[:], b.Key[:]), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
		})
		var latest firstItem
		moved := false
		for i, first := range firsts {
			switch {
			case i == 0 || first.Key != latest.Key:
				latest, moved = first, false
			case first.Partition != latest.Partition:
				if !moved {
					r.report.Moved++
				}
				latest, moved = first, true
			case first.Seq < latest.Seq:
				r.found(&r.report.OutOfOrder, "row %d at %s comes behind row %d of the same key at %s", first.Seq,
					r.place(first.Topic, first.Partition, first.Offset), latest.Seq, r.place(latest.Topic, latest.Partition, latest.Offset))
			default:
				latest = first
			}
		}
	}
	return nil
}

// parts is the number of files into which a spill is divided; one of them at a time is in memory.
const parts = 128

// spill keeps items of a fixed size in files, partitioned by one of their bytes.
type spill[T any] struct {
	files   [parts]*os.File
	writers [parts]*bufio.Writer
	buffer  []byte
}

func (s *spill[T]) create(dir, name string) error {
	for i := range s.files {
		file, err := os.Create(filepath.Join(dir, fmt.Sprintf("%s-%d", name, i))) //nolint:gosec // in a directory of our own
		if err != nil {
			return err
		}
		s.files[i], s.writers[i] = file, bufio.NewWriterSize(file, 16<<10)
	}
	return nil
}

func (s *spill[T]) add(by byte, item T) (err error) {
	if s.buffer, err = binary.Append(s.buffer[:0], binary.LittleEndian, item); err != nil {
		return err
	}
	_, err = s.writers[int(by)%parts].Write(s.buffer)
	return err
}

// read returns the items of a part.
func (s *spill[T]) read(part int) ([]T, error) {
	if err := s.writers[part].Flush(); err != nil {
		return nil, err
	}
	file := s.files[part]
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	items := make([]T, int(size)/binary.Size(*new(T)))
	return items, binary.Read(bufio.NewReader(file), binary.LittleEndian, items)
}

// close closes the files that were created.
func (s *spill[T]) close() error {
	var all []error
	for _, file := range s.files {
		if file != nil {
			all = append(all, file.Close())
		}
	}
	return errors.Join(all...)
}
