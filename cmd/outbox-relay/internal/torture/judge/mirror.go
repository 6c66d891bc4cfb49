package judge

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
)

// MirrorName is the file, among the ledgers, of the records that were deleted from topics.
const MirrorName = "deleted.records"

// Mirror writes the records of extents as lines of JSON, before they are deleted.
func Mirror(ctx context.Context, options []kgo.Opt, extents map[string]topicscan.Extent, to io.Writer) error {
	lines := json.NewEncoder(to)
	return topicscan.Scan(ctx, options, extents, func(r *kgo.Record) error { return lines.Encode(recordOf(r)) })
}

// ReadMirror adds the records that were deleted to those of the topics, once each: a deletion may have
// failed.
func (e *Evidence) ReadMirror(dir string) (err error) {
	file, err := os.Open(filepath.Join(dir, MirrorName)) //nolint:gosec // in the directory of the round
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	for lines := json.NewDecoder(bufio.NewReader(file)); ; {
		var r Record
		if err := lines.Decode(&r); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		e.Records = append(e.Records, r)
	}
	e.sortRecords()
	return nil
}

func (e *Evidence) sortRecords() {
	place := func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	}
	slices.SortStableFunc(e.Records, place)
	e.Records = slices.CompactFunc(e.Records, func(a, b Record) bool { return place(a, b) == 0 })
}
