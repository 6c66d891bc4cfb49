// Package ledger is what the parts of a torture run write down outside of the system under test:
// append-only files of lines of words. The judge believes them, and nothing that the system says
// about itself.
package ledger

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// What the lines of a ledger begin with.
const (
	// Acked FIRST COUNT SUM: the commit of these orders was confirmed to the producer. SUM is that of
	// their amounts.
	Acked = "acked"
	// Unknown FIRST COUNT: their commit ended with an error.
	Unknown = "unknown"
	// Undone FIRST COUNT: they were rolled back.
	Undone = "undone"
	// Called KEY CALL: the foreign system was called under a key. CALL says for what.
	Called = "called"
	// Request KEY STATUS ORDER: a client got a final answer with this order in its body.
	Request = "request"
	// Asked KEY: a client sent a request for the first time. In the end it must have an answer.
	Asked = "asked"
	// Garbage ID: a record that is no order was published from outside.
	Garbage = "garbage"
	// Forged ORDER: a record with the ID of this order and with other content was published from outside.
	Forged = "forged"
	// Paused PARTITION FROM TO: between a confirmed pause of the topic of orders and its end, the end of
	// the partition moved.
	Paused = "paused"
	// Frozen ROLE: a process of this role was frozen for a while from outside.
	Frozen = "frozen"
	// Struck KIND POINT: a process ended or froze between two steps of the engine.
	Struck = "struck"
	// Position GROUP TOPIC PARTITION NEXT: a stored position as it was seen.
	Position = "position"
	// Moved GROUP TOPIC PARTITION: an operator ordered the partition to another offset.
	Moved = "moved"
	// Resumed GROUP TOPIC PARTITION OFFSET TIME: a process got a record of a partition that is its first
	// one, or not behind the one before. TIME is in nanoseconds.
	Resumed = "resumed"
	// Rewound GROUP TOPIC PARTITION OFFSET TIME: the offset of a group without members was set back in
	// Kafka. TIME is before that.
	Rewound = "rewound"
	// Grown TOPIC: partitions may have been added.
	Grown = "grown"
	// Discarded GROUP ORDER: an operator discarded the parked message of an order.
	Discarded = "discarded"
	// Expired GROUP ORDER: an operator found the message of an order parked as expired, and decided.
	Expired = "expired"
	// Copied ID: a record with this message ID was published again from outside.
	Copied = "copied"
	// Replayed: an operator published rows of the outbox again.
	Replayed = "replayed"
	// SequenceBack: the outbox's sequence was set back, and rows get new numbers.
	SequenceBack = "sequence-back"
	// Restored: a dump took the place of the database.
	Restored = "restored"
	// LostCommits: a standby was promoted that had not all commits.
	LostCommits = "lost-commits"
)

// Writer appends to one file. Each line is written before Write returns, so that it outlives the
// process. Its methods may be called by several goroutines.
type Writer struct {
	mu   sync.Mutex
	file *os.File
	buf  []byte
}

// Open appends to a file of a directory.
func Open(dir, name string) (*Writer, error) {
	file, err := os.OpenFile(filepath.Join(dir, name+".ledger"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600) //nolint:gosec // in the directory of the round
	if err != nil {
		return nil, err
	}
	return &Writer{file: file}, nil
}

// Write appends a line of words, none of which may contain white space.
func (w *Writer) Write(words ...any) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = fmt.Appendln(w.buf[:0], words...)
	_, err := w.file.Write(w.buf)
	return err
}

// Close closes the file.
func (w *Writer) Close() error { return w.file.Close() }

// Read calls each with the words of every line of a directory's ledgers. A last line without its end
// was being written when its process was killed, and is left out.
func Read(dir string, each func(words []string) error) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.ledger"))
	if err != nil {
		return err
	}
	for _, name := range files {
		if err := readFile(name, each); err != nil {
			return fmt.Errorf("ledger %s: %w", name, err)
		}
	}
	return nil
}

func readFile(name string, each func(words []string) error) (err error) {
	file, err := os.Open(name) //nolint:gosec // in the directory of the round
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	lines := bufio.NewReader(file)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return nil // the end, or a line without its end
		}
		if err := each(strings.Fields(line)); err != nil {
			return err
		}
	}
}
