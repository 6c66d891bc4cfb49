package consumer

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
)

// Property: the metadata of a commit reads as it was written; and metadata that is read says the
// same after it was written again.
func FuzzCommitMetadata(f *testing.F) {
	topic := uuid.MustParse("0190b7f0-0000-7000-8000-000000000001")
	f.Add(commitMetadata("c", topic, 5, -1), "c", topic[:], int64(5), int64(-1))
	f.Add(commitMetadata("c", topic, 5, 2), "", []byte{}, int64(0), int64(0))
	for _, text := range []string{"", "effectonce/1", "effectonce/2 offset=1", "effectonce/1 offset=x", "effectonce/1 topic=1", "effectonce/1  offset=1 offset=2", "effectonce/1 rewind=-9 x", "effectonce/1 offset=+1 cluster"} {
		f.Add(text, "MkU3OEVBNTcwNTJENDM2Qk", make([]byte, 16), int64(1), int64(1))
	}
	f.Fuzz(func(t *testing.T, text, cluster string, id []byte, offset, rewind int64) {
		if read, ok := parseCommit(text); ok {
			again, ok := parseCommit(commitMetadata(read.cluster, read.topicID, read.offset, read.rewind))
			require.True(t, ok)
			read.rewind = max(read.rewind, -1) // below zero there is none
			require.Equal(t, read, again)
		}
		topic, err := uuid.FromBytes(id)
		if err != nil || strings.ContainsFunc(cluster, func(r rune) bool { return strings.TrimSpace(string(r)) == "" }) {
			return
		}
		read, ok := parseCommit(commitMetadata(cluster, topic, offset, rewind))
		require.True(t, ok)
		require.Equal(t, parsedCommit{cluster, topic, offset, max(rewind, -1)}, read)
	})
}

// Property: whatever the headers are (CloudEvents, Debezium's and Watermill's, each with any text),
// the ID of a message is derived from one header's value and the source or the topic, or the message
// is parked, or it has none. A source never makes an ID of the engine's own scopes.
func FuzzHeaderIDs(f *testing.F) {
	f.Add(uint8(0), "7", "7", "/orders", "id", "", "")
	f.Add(uint8(1), "", "", "", "7", "Order", "")
	f.Add(uint8(2), "", "", "", "", "", "0190b7f0-0000-7000-8000-000000000001")
	f.Add(uint8(0), "a", "", "effectonce:coordinates:t", "", "", "")
	f.Add(uint8(3), "\x00", "\xff", "s", "1", "", "2")
	rules := []string{"standard", "standard+debezium", "standard+watermill", "legacy"}
	f.Fuzz(func(t *testing.T, number uint8, messageID, ceID, ceSource, id, kind, watermill string) {
		rule, err := dedup.ParseIDRule(rules[int(number)%len(rules)])
		require.NoError(t, err)
		m := &Message{Topic: "t", Partition: 1, Offset: 5}
		for _, h := range []struct{ name, value string }{
			{"message-id", messageID},
			{"ce_id", ceID},
			{"ce_source", ceSource},
			{"id", id},
			{"eventType", kind},
			{"_watermill_message_uuid", watermill},
			{"ce_id", ceID},
		} {
			if h.value != "" {
				m.Headers = append(m.Headers, Header{Name: h.name, Value: []byte(h.value)})
			}
		}
		c := &Consumer{engine: &engine{cfg: Config{MessageBytesMax: 1 << 20}}}
		named := c.identified(m, rule.Sources())
		again := &Message{Topic: "t", Partition: 2, Offset: 9, Headers: m.Headers}
		require.Equal(t, named, c.identified(again, rule.Sources()))
		if !named {
			require.True(t, m.ID == uuid.Nil && m.park == nil && messageID == "" && ceID == "")
			return
		}
		if strings.HasPrefix(ceSource, reservedScope) {
			require.NotNil(t, m.park)
			require.Equal(t, coordinatesID(m), m.ID)
			return
		}
		require.Nil(t, m.park)
		require.Equal(t, m.ID, again.ID, "a redelivery at another place has the same ID")
		scope := "t"
		if ceSource != "" {
			scope = ceSource
		}
		var from []string
		for _, h := range m.Headers {
			if bytes.Equal(m.ID[:], idOf(scope, h.Value)) {
				from = append(from, h.Name)
			}
		}
		require.NotEmpty(t, from)
		if messageID != "" {
			require.Equal(t, dedup.MessageID(scope, []byte(messageID)), m.ID, "message-id is the first")
		}
	})
}

func idOf(scope string, value []byte) []byte {
	id := dedup.MessageID(scope, value)
	return id[:]
}
