package outbox

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Buffer collects messages during a transaction and inserts them in one statement at its end, when
// every lock that orders their keys is held. A Buffer belongs to one transaction and one goroutine.
type Buffer struct {
	outbox *Outbox
	msgs   []Message
}

// Buffer returns an empty buffer.
func (o *Outbox) Buffer() *Buffer { return &Buffer{outbox: o} }

// NewBuffer returns an empty buffer for the default schema with the default limits.
func NewBuffer() *Buffer { return standard.Buffer() }

// Add checks messages and keeps them; nothing is sent. After an error none of them is kept. The
// bytes of Key, Payload and Headers must not change before Flush.
func (b *Buffer) Add(ctx context.Context, msgs ...Message) error {
	prepared, err := b.outbox.prepare(ctx, msgs)
	if err != nil {
		return err
	}
	b.msgs = append(b.msgs, prepared...)
	return nil
}

// Len returns the number of messages that wait for Flush.
func (b *Buffer) Len() int { return len(b.msgs) }

// Flush inserts the buffered messages, in order, and empties the buffer. Call it as the last
// statement before COMMIT: messages that are still in a buffer when its transaction commits are
// never published. After an error the transaction is aborted and the buffer is unchanged.
func (b *Buffer) Flush(ctx context.Context, tx pgx.Tx) error {
	if len(b.msgs) == 0 {
		return nil
	}
	if collector, ok := tx.(Collector); ok {
		if err := collector.CollectOutbox(b.outbox, b.msgs); err != nil {
			return err
		}
	} else if err := b.outbox.flush(ctx, tx, b.msgs); err != nil {
		return err
	}
	b.msgs = nil
	return nil
}
