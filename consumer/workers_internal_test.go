package consumer

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Property: a message that was tried before is taken alone, so that those behind it are not run in
// vain.
func TestTriedMessagesAreTakenAlone(t *testing.T) {
	t.Parallel()
	w := newWorkers(OrderByPartition, 100)
	tried, other := &Message{first: time.Now()}, &Message{Offset: 1}
	w.add([]*Message{tried, other})
	s := w.take(1, 100)
	require.Equal(t, []*Message{tried}, s.msgs)
	w.done(s, &postponed{})
	require.Equal(t, []*Message{other}, w.take(1, 100).msgs)
}
