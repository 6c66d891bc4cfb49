package dedup_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// messageIDs are computed by another program, from the text of the documentation. They must never
// change: a release that computes another ID for the same message would run it a second time.
var messageIDs = []struct{ name, scope, raw, want string }{
	{"UUIDv7", "orders", "0191d3a7-5c1e-7abc-9def-0123456789ab", "0191d3a7-5c1e-7abc-9def-0123456789ab"},
	{"UUIDv7 in upper case", "orders", "0191D3A7-5C1E-7ABC-9DEF-0123456789AB", "0191d3a7-5c1e-7abc-9def-0123456789ab"},
	{"smallest UUIDv7", "orders", "00000000-0000-7000-8000-000000000000", "00000000-0000-7000-8000-000000000000"},
	{"largest UUIDv7 that is taken", "orders", "7fffffff-ffff-7fff-bfff-ffffffffffff", "7fffffff-ffff-7fff-bfff-ffffffffffff"},
	{"UUIDv7 with the top bit set", "orders", "80000000-0000-7000-8000-000000000000", "d4cb0e2b-19d2-8a1b-bfe0-de58ce57fd56"},
	{"largest UUIDv7 of all", "orders", "ffffffff-ffff-7fff-bfff-ffffffffffff", "ec4112f0-48fe-82df-8331-c48d2d07760e"},
	{"UUIDv7 of another variant", "orders", "0191d3a7-5c1e-7abc-6def-0123456789ab", "cc477452-bc1a-87e9-b324-8ed25a7819d0"},
	{"UUIDv7 in braces", "orders", "{0191d3a7-5c1e-7abc-9def-0123456789ab}", "f0ff0d27-65a1-8ef8-8df6-4c4a2f48a0bc"},
	{"UUIDv7 without hyphens", "orders", "0191d3a75c1e7abc9def0123456789ab", "c76f2612-2720-8e40-8880-8925756e2e4c"},
	{"UUIDv4", "orders", "9b2f4c1e-6a3d-4e0b-8f57-1c2d3e4f5a6b", "a5f730ac-c886-8e02-8abd-937a0c83d1a7"},
	{"UUIDv4 with the top bit clear", "orders", "1b2f4c1e-6a3d-4e0b-8f57-1c2d3e4f5a6b", "b112cc34-b0d9-85b5-865f-9e3a27d8c0b3"},
	{"UUIDv1", "orders", "0e3a9d52-c6f1-11f0-8de9-0242ac120002", "d2f9aaf4-95ac-8b03-abb5-2ee17a66bd48"},
	{"ULID", "orders", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "01563e3a-b5d3-d676-4c61-efb99302bd5b"},
	{"ULID in lower case", "orders", "01arz3ndektsv4rrffq69g5fav", "01563e3a-b5d3-d676-4c61-efb99302bd5b"},
	{"smallest ULID", "orders", "00000000000000000000000000", "00000000-0000-0000-0000-000000000000"},
	{"largest ULID that is taken", "orders", "3ZZZZZZZZZZZZZZZZZZZZZZZZZ", "7fffffff-ffff-ffff-ffff-ffffffffffff"},
	{"ULID that starts with 4", "orders", "41ARZ3NDEKTSV4RRFFQ69G5FAV", "ff4b8a00-276d-8928-8ce4-378f04238390"},
	{"largest ULID of all", "orders", "7ZZZZZZZZZZZZZZZZZZZZZZZZZ", "c0c176be-07b8-81cd-940b-a3da81bfa639"},
	{"no ULID: it has the letter U", "orders", "01ARZ3NDEKTSV4RRFFQ69G5FAU", "933fdc35-990d-868b-bd99-db5837aefb90"},
	{"text", "orders", "order-4711", "fe0374e1-62b3-872a-aabd-877c33d7b2b3"},
	{"text of a megabyte", "orders", strings.Repeat("x", 1<<20), "e6631c18-a0cd-840b-9dc3-65f20185c22b"},
	{"empty", "orders", "", "b32186ec-a48d-83e1-a135-034ef8e213c4"},
	{"empty, without a scope", "", "", "df3f6198-04a9-8fdb-8057-192dc43dd748"},
	{"beyond ASCII", "bücher", "ß☃😀", "eff4b413-2ad7-80a0-8850-abb1b43b8fe5"},
	{"NUL", "orders", "\x00", "a679be09-f763-8f2c-abce-dee6c5bd064c"},
	{"no UTF-8", "orders", "\xff\xfe", "bfb16990-3514-874c-a180-fca7001a0f45"},
}

// An ID that carries its time is used as it is, anything else becomes the documented hash.
func TestMessageIDIsTheDocumentedOne(t *testing.T) {
	t.Parallel()
	for _, tc := range messageIDs {
		assert.Equal(t, tc.want, dedup.MessageID(tc.scope, []byte(tc.raw)).String(), tc.name)
	}
}

// The SQL function computes the same ID as Go does: for the table above, and for many texts that
// are almost a UUIDv7 or a ULID, which is where two parsers would disagree.
func TestSQLComputesTheSameMessageID(t *testing.T) {
	t.Parallel()
	var scopes, texts []string
	for _, tc := range messageIDs {
		if tc.name == "NUL" || tc.name == "no UTF-8" {
			continue // SQL text cannot hold these; that is why MessageID takes bytes
		}
		scopes, texts = append(scopes, tc.scope), append(texts, tc.raw)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		scopes, texts = append(scopes, randomText(random, 10)), append(texts, almostAnID(random))
	}

	rows, err := pgtest.Pool(t).Query(t.Context(),
		`SELECT effectonce.message_id(scope, id) FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS m (scope, id, place) ORDER BY place`,
		scopes, texts)
	require.NoError(t, err)
	var taken, i int
	var id [16]byte
	for rows.Next() {
		require.NoError(t, rows.Scan(&id))
		require.Equal(t, uuid.UUID(id), dedup.MessageID(scopes[i], []byte(texts[i])), "scope %q, text %.100q", scopes[i], texts[i])
		if id[0]&0x80 == 0 {
			taken++
		}
		i++
	}
	require.NoError(t, rows.Err())
	require.Len(t, texts, i)
	assert.Greater(t, taken, 500, "the generator makes too few IDs that are taken as they are")
	assert.Less(t, taken, i-500, "the generator makes too few IDs that are hashed")
}

// almostAnID makes a UUIDv7, a ULID or a text of their length, and mostly breaks one letter of it.
func almostAnID(random *rand.Rand) string {
	const crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZabcdefghjkmnpqrstvwxyz"
	var text []byte
	switch random.IntN(4) {
	case 0:
		var id uuid.UUID
		for i := range id {
			id[i] = byte(random.Uint32())
		}
		id[6] = id[6]&0x0f | 0x70
		id[8] = id[8]&0x3f | 0x80
		text = []byte(id.String())
	case 1, 2:
		text = make([]byte, 26)
		for i := range text {
			text[i] = crockford[random.IntN(len(crockford))]
		}
		text[0] = "0123456789"[random.IntN(10)]
	default:
		return randomText(random, 40)
	}
	if random.IntN(3) == 0 {
		text = bytes.ToUpper(text)
	}
	if random.IntN(3) == 0 {
		text[random.IntN(len(text))] = byte(' ' + random.IntN('~'-' '))
	}
	if random.IntN(20) == 0 {
		return string(text) + "\n" // where $ in a regular expression may match too early
	}
	return string(text)
}

func randomText(random *rand.Rand, length int) string {
	letters := []rune("0123456789abcxyzABCXYZ -_.:/\n\tüß☃😀")
	text := make([]rune, random.IntN(length))
	for i := range text {
		text[i] = letters[random.IntN(len(letters))]
	}
	return string(text)
}

// A child ID is the same at every re-execution and on every machine, has the form of a UUIDv7 and
// carries the time that it was given; another parent, step or time gives another one.
func TestPublishIDIsDerivedFromItsParts(t *testing.T) {
	t.Parallel()
	parent := uuid.MustParse("0191d3a7-5c1e-7abc-9def-0123456789ab")
	at := time.UnixMilli(1763700000123)

	child := dedup.PublishID("billing", parent, "charge", at)
	assert.Equal(t, "019aa4b6-457b-710f-9dc4-7767167df53c", child.String(), "computed by another program")
	assert.Equal(t, child, dedup.PublishID("billing", parent, "charge", at.UTC().Add(999*time.Microsecond)), "milliseconds count, and no time zone")
	assert.Equal(t, uuid.Version(7), child.Version())
	assert.Equal(t, uuid.RFC4122, child.Variant())
	carried, ok := dedup.Time(child)
	assert.True(t, ok)
	assert.True(t, at.Equal(carried), carried)
	assert.Equal(t, child, dedup.MessageID("any", []byte(child.String())), "the next consumer takes it as it is")

	assert.NotEqual(t, child, dedup.PublishID("billing", parent, "refund", at))
	assert.NotEqual(t, child, dedup.PublishID("shipping", parent, "charge", at), "two consumers of one message publish two")
	assert.NotEqual(t, child, dedup.PublishID("billing", child, "charge", at))
	assert.NotEqual(t, child, dedup.PublishID("billing", parent, "charge", at.Add(time.Millisecond)))
	assert.NotEqual(t, dedup.PublishID("billing", parent, "a", at), dedup.PublishID("billing", parent, "", at))
}

// callKeys are computed by another program, from the text of the documentation. They must never
// change: a release that computes another key for the same call would make the call a second time.
var callKeys = []struct{ name, scope, parent, step, want string }{
	{"of an ID with a time", "billing", "0191d3a7-5c1e-7abc-9def-0123456789ab", "charge", "e36d14fe-f433-8634-a45c-dc9912dae07e"},
	{"another step", "billing", "0191d3a7-5c1e-7abc-9def-0123456789ab", "refund", "e4d4522a-c7bb-8eb7-93cd-d71e25c80a2a"},
	{"another consumer", "shipping", "0191d3a7-5c1e-7abc-9def-0123456789ab", "charge", "e2d08b56-c04e-8467-958e-f3c466eac661"},
	{"of an ID that is a hash", "billing", "a5f730ac-c886-8e02-8abd-937a0c83d1a7", "charge", "af320641-184c-8bed-adfa-70a664a93ea5"},
	{"no step", "billing", "0191d3a7-5c1e-7abc-9def-0123456789ab", "", "97db001d-1d77-8ac5-ba82-d07a8b7c5a5b"},
	{"no consumer", "", "0191d3a7-5c1e-7abc-9def-0123456789ab", "charge", "d949f849-3376-8fda-88c4-c63aeb5b0b73"},
	{"nothing", "", "00000000-0000-0000-0000-000000000000", "", "94cbf0f2-6096-8fa2-abf1-8169fa4c407f"},
	{"beyond ASCII", "bücher", "0191d3a7-5c1e-7abc-9def-0123456789ab", "ß☃😀", "97a06377-c122-805e-899f-90d72741515f"},
	{"long", strings.Repeat("x", 600), "0191d3a7-5c1e-7abc-9def-0123456789ab", strings.Repeat("y", 70000), "a07cd989-bb29-8973-bb2d-efbac00d575b"},
	{"NUL", "billing", "0191d3a7-5c1e-7abc-9def-0123456789ab", "charge\x00", "e9167845-41a8-8090-bbef-150a27fb4985"},
}

// The key of a foreign call is the documented one, depends only on consumer, message and step, and
// never looks like an ID that carries a time. A1.
func TestCallKeyIsTheDocumentedOne(t *testing.T) {
	t.Parallel()
	for _, tc := range callKeys {
		key := dedup.CallKey(tc.scope, uuid.MustParse(tc.parent), tc.step)
		assert.Equal(t, tc.want, key.String(), tc.name)
		assert.Equal(t, uuid.Version(8), key.Version())
		assert.Equal(t, uuid.RFC4122, key.Variant())
		_, timed := dedup.Time(key)
		assert.False(t, timed)
	}
	// The parts cannot run into each other, whatever they hold.
	parent := uuid.MustParse("0191d3a7-5c1e-7abc-9def-0123456789ab")
	scope := "a" + string(binary.BigEndian.AppendUint32(nil, 16)) + string(parent[:])
	assert.NotEqual(t, dedup.CallKey("a", parent, "step"), dedup.CallKey(scope, parent, "step"))
	assert.NotEqual(t, dedup.CallKey("ab", parent, "c"), dedup.CallKey("a", parent, "bc"))
}

// A time that 47 bits of milliseconds cannot hold is replaced by the nearest one: the ID still has
// a time, and is never in the range of hashes.
func TestPublishIDBoundsTheTime(t *testing.T) {
	t.Parallel()
	for at, want := range map[time.Time]int64{
		{}: 0, time.UnixMilli(-1): 0, time.UnixMilli(0): 0, time.UnixMilli(1<<47 - 1): 1<<47 - 1, time.UnixMilli(1 << 47): 1<<47 - 1, time.Unix(1<<50, 0): 1<<47 - 1,
	} {
		carried, ok := dedup.Time(dedup.PublishID("billing", uuid.MustParse("0191d3a7-5c1e-7abc-9def-0123456789ab"), "step", at))
		assert.True(t, ok, at)
		assert.Equal(t, want, carried.UnixMilli(), at)
	}
}

// C25: whatever bytes a message carries, its ID is one of two kinds: one that carries its time and
// is the text itself, or a UUIDv8 with the top bit set.
func FuzzMessageID(f *testing.F) {
	for _, tc := range messageIDs {
		if len(tc.raw) < 1000 {
			f.Add(tc.scope, []byte(tc.raw))
		}
	}
	f.Fuzz(func(t *testing.T, scope string, raw []byte) {
		before := bytes.Clone(raw)
		id := dedup.MessageID(scope, raw)
		require.Equal(t, before, raw, "the caller's bytes were changed")
		require.Equal(t, id, dedup.MessageID(scope, raw), "not deterministic")

		_, timed := dedup.Time(id)
		if !timed {
			require.Equal(t, uuid.Version(8), id.Version())
			require.Equal(t, uuid.RFC4122, id.Variant())
			require.NotEqual(t, id, dedup.MessageID(scope+"'", raw), "the scope is no part of the hash")
			return
		}
		require.Equal(t, id, dedup.MessageID(scope+"'", raw), "an ID that carries its time has no scope")
		switch len(raw) {
		case 36:
			require.Equal(t, uuid.Version(7), id.Version())
			require.True(t, strings.EqualFold(id.String(), string(raw)), "%s became %s", raw, id)
		case 26:
			require.Equal(t, strings.ToUpper(string(raw)), ulid(id))
		default:
			require.Fail(t, "neither UUID nor ULID was taken as it is", "%q", raw)
		}
	})
}

// ulid writes an ID as a ULID, bit by bit.
func ulid(id uuid.UUID) string {
	text := make([]byte, 26)
	for i := range text {
		var digit int
		for bit := i*5 - 2; bit < i*5+3; bit++ { // 26 letters have two bits more than an ID
			digit <<= 1
			if bit >= 0 && id[bit/8]&(0x80>>(bit%8)) != 0 {
				digit |= 1
			}
		}
		text[i] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"[digit]
	}
	return string(text)
}

// Property: an invalid rule is refused: an unknown form must not be taken for another.
func TestWhatIsNoRuleForIDsIsRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"", "Standard", "standard ", "standard+", "standard+debezium+debezium", "debezium", "legacy", "headers", "headers:,", "headers:a,",
		"headers:a b", "headers:ü", "headers:a\x00", "headers:" + strings.Repeat("n", 256), "headers:" + strings.Repeat("a,", 20) + "a",
		"headers:" + strings.Repeat(strings.Repeat("n", 255)+",", 8) + "n",
	} {
		_, err := dedup.ParseIDRule(text)
		require.ErrorIs(t, err, dedup.ErrIDRule, "%q", text)
	}
	_, err := dedup.HeaderIDs("a,b")
	require.ErrorIs(t, err, dedup.ErrIDRule)
	standard, err := dedup.StandardIDs()
	require.NoError(t, err)
	require.Equal(t, "standard", dedup.IDRule{}.String())
	require.True(t, standard.SameIDs(dedup.IDRule{}))
	vouched, err := dedup.StandardIDs(dedup.ProfileWatermill)
	require.NoError(t, err)
	require.False(t, standard.SameIDs(vouched))
}

// Property: consumers and the tools that look for their claims read the same ID from the headers of a message.
func TestIDInHeaders(t *testing.T) {
	t.Parallel()
	read := func(text string) (string, []byte) {
		name, value, _ := strings.Cut(text, "=")
		return name, []byte(value)
	}
	for _, c := range []struct{ rule, headers, want string }{
		{"standard", "message-id=1 ce_id=2", "1"},
		{"standard", "message-id= ce_id=2 message-id=", "2"},
		{"standard", "ce_id=2 ce_id=2", "2"},
		{"standard", "ce_id=2 ce_id=3", "different values"},
		{"standard", "ce_id=2 ce_id=3 message-id=1", "1"},
		{"standard", "id=4 type=x", ""},
		{"standard", "id=4 id=5", ""},
		{"standard", "id=4 __debezium.context.connectorName=c", "4"},
		{"standard", "id=4 id=5 __debezium.context.connectorName=c", "different values"},
		{"standard+debezium", "id=4", "4"},
		{"standard", "_watermill_message_uuid=5", ""},
		{"standard+watermill", "_watermill_message_uuid=5", "5"},
		{"headers:b,a", "a=1 b=2 message-id=3", "2"},
		{"headers:", "a=1 message-id=3", ""},
	} {
		rule, err := dedup.ParseIDRule(c.rule)
		require.NoError(t, err)
		id, err := dedup.ReadID(rule, strings.Fields(c.headers), read)
		if c.want == "different values" {
			require.ErrorContains(t, err, c.want)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.want, string(id), "%s: %s", c.rule, c.headers)
	}
}

// Property: the text of a rule is the rule, whatever the order of its profiles.
func FuzzIDRule(f *testing.F) {
	for _, text := range []string{
		"standard", "standard+debezium", "standard+debezium+watermill", "standard+watermill+debezium", "headers:", "headers:a,b", "headers:a,,b", "standard++",
		"headers:message-id,ce_id,x+y", "headers:" + strings.Repeat("n", dedup.IDHeaderBytesMax),
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rule, err := dedup.ParseIDRule(text)
		if err != nil {
			require.ErrorIs(t, err, dedup.ErrIDRule)
			require.Less(t, len(err.Error()), 2000)
			return
		}
		require.LessOrEqual(t, len(rule.String()), dedup.IDRuleBytesMax)
		again, err := dedup.ParseIDRule(rule.String())
		require.NoError(t, err)
		require.Equal(t, rule, again)
		require.True(t, rule.SameIDs(again))
		require.Equal(t, strings.Replace(text, "+watermill+debezium", "+debezium+watermill", 1), rule.String())
	})
}

// Property: the first registration of a name decides its rule for IDs; later ones get that rule.
func TestNameKeepsItsRuleForIDs(t *testing.T) {
	t.Parallel()
	pool, claims := pgtest.Pool(t), newClaims(t)
	rule := func(text string) dedup.IDRule {
		rule, err := dedup.ParseIDRule(text)
		require.NoError(t, err)
		return rule
	}
	register := func(name, wanted string) string {
		t.Helper()
		consumer := registered(t, pool, claims, dedup.Registration{Name: name, Group: "g", IDRule: rule(wanted)})
		stored := pgtest.Value[string](t, pool, `SELECT id_rule FROM effectonce.consumers WHERE name = $1`, name)
		require.Equal(t, stored, consumer.IDRule().String())
		return stored
	}
	assert.Equal(t, "standard+debezium", register("new", "standard+debezium"))
	assert.Equal(t, "standard+debezium", register("new", "headers:a"))
	unset := registered(t, pool, claims, dedup.Registration{Name: "unset", Group: "g"})
	assert.Equal(t, "standard", unset.IDRule().String())

	pgtest.Exec(t, pool, `UPDATE effectonce.consumers SET id_rule = 'of 2030' WHERE name = 'unset'`)
	_, err := claims.Register(t.Context(), pool, dedup.Registration{Name: "unset", Group: "g"})
	require.ErrorIs(t, err, dedup.ErrIDRule)
}
