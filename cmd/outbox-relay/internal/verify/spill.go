package verify

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// parts is the number of files into which a spill is divided; one of them at a time is in memory.
const parts = 128

// spill keeps items of a fixed size in files, partitioned by one of their bytes.
type spill[T any] struct {
	files   [parts]*os.File
	writers [parts]*bufio.Writer
	buffer  []byte
}

func newSpill[T any](dir, name string) (*spill[T], error) {
	s := &spill[T]{}
	for i := range s.files {
		file, err := os.Create(filepath.Join(dir, fmt.Sprintf("%s-%d", name, i))) //nolint:gosec // in a directory of our own
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.files[i], s.writers[i] = file, bufio.NewWriterSize(file, 16<<10)
	}
	return s, nil
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

func (s *spill[T]) close() error {
	var all []error
	for _, file := range s.files {
		if file != nil {
			all = append(all, file.Close())
		}
	}
	return errors.Join(all...)
}
