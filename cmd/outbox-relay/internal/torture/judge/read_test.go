package judge_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: every kind of line becomes the evidence that it is.
func TestLedgersAreRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w, err := ledger.Open(dir, "all")
	require.NoError(t, err)
	for _, line := range [][]any{
		{ledger.Acked, int64(1)<<48 + 1, 3, 60},
		{ledger.Unknown, 7, 2},
		{ledger.Undone, 9, 1},
		{ledger.Called, "key-a", "1/64"},
		{ledger.Called, "key-a", "1/64"},
		{ledger.Called, "key-b", "1/64"},
		{ledger.Request, "request-1", 201, "-"},
		{ledger.Position, "group", "orders", 3, 17},
		{ledger.Rewound, "group", "orders", 3, 11, 4}, // before an operator's order, which counts
		{ledger.Moved, "group", "orders", 3},
		{ledger.Discarded, 2, 9},
		{ledger.Expired, 2, 9},
		{ledger.Copied, "id"},
		{ledger.Copied, "id"},
		{ledger.Asked, "request-1"},
		{ledger.Garbage, "id-2"},
		{ledger.Struck, "exit-at", "relay.read"},
		{ledger.Forged, int64(1) << 48},
		{ledger.Paused, 2, 10, 12},
		{ledger.Frozen, "relay"},
		{ledger.Frozen, "relay"},
		{ledger.Resumed, "group", "orders", 3, 17, 1_900_000_000_000_000_001},
		{ledger.Rewound, "group", "orders", 3, 12, 5},
		{ledger.Grown, "orders"},
		{ledger.Replayed},
		{ledger.SequenceBack},
		{ledger.Restored},
		{ledger.LostCommits},
	} {
		require.NoError(t, w.Write(line...))
	}
	require.NoError(t, w.Close())
	var e judge.Evidence
	require.NoError(t, e.ReadLedgers(dir))
	assert.Equal(t, judge.Evidence{
		Acked: []judge.Batch{{First: 1<<48 + 1, Count: 3, Sum: 60}}, Unknown: []judge.Batch{{First: 7, Count: 2}}, Undone: []judge.Batch{{First: 9, Count: 1}},
		Calls:   map[string]map[string]int{"1/64": {"key-a": 2, "key-b": 1}},
		Answers: []judge.Answer{{Key: "request-1", Status: 201, Order: "-"}},
		Moves:   []judge.Move{{Partition: "group/orders/3", Next: 17}, {Partition: "group/orders/3", Ordered: true}},
		Asked:   []string{"request-1"}, Garbage: map[string]struct{}{"id-2": {}}, Struck: map[string]int{"exit-at relay.read": 1},
		Resumes: []judge.Resume{{Group: "group", Topic: "orders", Partition: 3, Offset: 17, At: 1_900_000_000_000_000_001}},
		Rewinds: []judge.Resume{{Group: "group", Topic: "orders", Partition: 3, Offset: 12, At: 5}}, Grown: map[string]bool{"orders": true},
		Forged: map[int64]struct{}{1 << 48: {}}, Paused: []judge.Pause{{Partition: 2, From: 10, To: 12}}, Frozen: map[string]int{"relay": 2},
		Copied: map[string]int{"id": 2}, Discarded: map[string]struct{}{"2/9": {}}, Expired: []judge.Expired{{Group: 2, Order: 9}}, Replayed: true, SequenceBack: true, Restored: true, LostCommits: true,
	}, e)
}

// Property: records that were deleted from a topic are judged with those that are left, in their order,
// and once each.
func TestDeletedRecordsCount(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	lines := `{"Topic":"orders","Partition":1,"Offset":4,"ID":"d"}` + "\n" + `{"Topic":"orders","Partition":0,"Offset":3,"ID":"b"}` + "\n" + `{"Topic":"orders","Partition":0,"Offset":2,"ID":"a"}` + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, judge.MirrorName), []byte(lines), 0o600))
	e := judge.Evidence{Records: []judge.Record{{Topic: "orders", Offset: 3, ID: "b"}, {Topic: "orders", Offset: 7, ID: "c"}}}
	require.NoError(t, e.ReadMirror(dir))
	ids := ""
	for _, r := range e.Records {
		ids += r.ID
	}
	assert.Equal(t, "abcd", ids)
	require.NoError(t, e.ReadMirror(t.TempDir()), "nothing was deleted")
	require.NoError(t, os.WriteFile(filepath.Join(dir, judge.MirrorName), []byte(lines[:20]), 0o600))
	require.Error(t, e.ReadMirror(dir), "evidence must not be passed over")
}

// Property: a line that the judge does not know is an error: evidence must not be passed over.
func TestUnknownLineIsAnError(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"", "acked 1 2", "acked 1 2 3 4", "borrowed 1", "moved group orders", "replayed 1"} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "a.ledger"), []byte("copied x\n"+line+"\n"), 0o600))
		var e judge.Evidence
		assert.Error(t, e.ReadLedgers(dir), "%q", line)
	}
}

// Property: the workload's tables become evidence, and what the system's own tables hold is left.
func TestTablesAreRead(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Database(t))
	pgtest.Exec(t, conn, scene.TablesSQL)
	pgtest.Exec(t, conn, scene.RowsSQL, 2, []int16{1})
	const message = "01900000-0000-7000-8000-000000000001"
	pgtest.Exec(t, conn, `INSERT INTO shop.orders (id, message_id, key, version, amount, kind, request)
		VALUES (4, '`+message+`', 1, 2, 30, 5, NULL), (5, '`+message+`', 2, 0, 1, 0, 'request-1')`)
	pgtest.Exec(t, conn, `INSERT INTO shop.effects (grp, order_id, key, version, amount) VALUES (1, 5, 2, 0, 1), (2, 4, 1, 2, 30), (1, 4, 1, 2, 30)`)
	pgtest.Exec(t, conn, `UPDATE shop.balances SET balance = 30, effects = 1 WHERE key = 1`)
	pgtest.Exec(t, conn, `INSERT INTO shop.entries (grp, version, order_id) VALUES (1, 2, 4), (1, 1, 5), (2, 1, 4)`)
	pgtest.Exec(t, conn, `INSERT INTO shop.fenced (grp, key, version) VALUES (1, 2, 9), (1, 1, 3)`)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, epoch, next_offset, resume_at) VALUES ('group', 'orders', 3, 1, 9, 5), ('group', 'orders', 4, 1, 9, -2)`)
	pgtest.Exec(t, conn, `UPDATE effectonce.consumer_positions SET resume_at = 4 WHERE partition = 3`)
	pgtest.Exec(t, conn, `UPDATE effectonce.consumer_positions SET resume_at = NULL, next_offset = 4`)
	var e judge.Evidence
	require.NoError(t, e.ReadDatabase(t.Context(), conn))
	assert.Equal(t, []judge.Resumption{{Partition: "group/orders/3", Ordered: 4, Next: 4}}, e.Resumed)
	assert.Empty(t, e.Left)
	slices.SortFunc(e.Balances, func(a, b judge.Balance) int { return int(a.Key - b.Key) })
	assert.Equal(t, judge.Evidence{
		Orders:   map[int64]judge.Order{4: {MessageID: message, Key: 1, Version: 2, Amount: 30, Kind: 5}, 5: {MessageID: message, Key: 2, Amount: 1, Request: "request-1"}},
		Effects:  map[int16][]judge.Effect{1: {{Order: 5, Key: 2, Amount: 1}, {Order: 4, Key: 1, Version: 2, Amount: 30}}, 2: {{Order: 4, Key: 1, Version: 2, Amount: 30}}},
		Balances: []judge.Balance{{Group: 1, Key: 1, Balance: 30, Effects: 1}, {Group: 1, Key: 2}},
		Entries:  map[int16][]int64{1: {5, 4}, 2: {4}},
		Fenced:   map[int16][]judge.Version{1: {{Key: 2, Version: 9}, {Key: 1, Version: 3}}},
	}, judge.Evidence{Orders: e.Orders, Effects: e.Effects, Balances: e.Balances, Entries: e.Entries, Fenced: e.Fenced})

	pgtest.Exec(t, conn, `INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('name', 'group', '{orders}')`)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.parked_messages (consumer, message_id, topic, partition, "offset", reason, error, state)
		SELECT id, '`+message+`', 'orders', 3, 17, 'failed', 'no', 'parked' FROM effectonce.consumers`)
	pgtest.Exec(t, conn, `INSERT INTO effectonce.outbox_dead (relay, seq, id, topic, headers, created_at, reason, error, state)
		VALUES ('default', 1, '`+message+`', 'orders', '{}', now(), 'paused', 'no', 'held')`)
	require.NoError(t, e.ReadDatabase(t.Context(), conn))
	assert.ElementsMatch(t, []string{"parked: name orders/3/17 failed parked: no", "dead: orders paused held: no"}, e.Left)
}

// Property: records become evidence with their IDs, keys and bodies; one whose body is no order, or
// that has the key of another order, is unreadable.
func TestTopicsAreRead(t *testing.T) {
	t.Parallel()
	orders, children := kafkatest.Topic(t, 1), kafkatest.Topic(t, 1)
	client := kafkatest.Client(t)
	const text = `{"order":4,"key":1,"version":2,"amount":30,"kind":8,"group":1,"padding":"xxx"}`
	header := []kgo.RecordHeader{{Key: "other", Value: []byte("y")}, {Key: "message-id", Value: []byte("id-4")}}
	require.NoError(t, client.ProduceSync(t.Context(),
		&kgo.Record{Topic: orders, Key: []byte("key-1"), Value: []byte(text), Headers: header},
		&kgo.Record{Topic: orders, Key: []byte("key-2"), Value: []byte(text), Headers: header},
		&kgo.Record{Topic: orders, Key: []byte("key-1"), Value: []byte("no JSON")},
	).FirstErr())
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: children, Key: []byte("key-1"), Value: []byte(text)}).FirstErr())
	var e judge.Evidence
	require.NoError(t, e.ReadTopics(t.Context(), []kgo.Opt{kgo.SeedBrokers(kafkatest.Brokers(t)...)}, orders, children))
	body := scene.Body{Order: 4, Key: 1, Version: 2, Amount: 30, Kind: scene.KindLater, Group: 1}
	require.Len(t, e.Records, 4)
	of := func(topic string, offset int64) judge.Record {
		at := slices.IndexFunc(e.Records, func(r judge.Record) bool { return r.Topic == topic && r.Offset == offset })
		require.GreaterOrEqual(t, at, 0)
		return e.Records[at]
	}
	assert.Equal(t, judge.Record{Topic: orders, ID: "id-4", Key: "key-1", Body: body}, of(orders, 0))
	assert.Contains(t, of(orders, 1).Unreadable, `its key is "key-2"`)
	assert.NotEmpty(t, of(orders, 2).Unreadable)
	assert.Equal(t, judge.Record{Topic: children, Key: "key-1", Body: body}, of(children, 0))
}
